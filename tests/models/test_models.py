"""The small models, each by what it is for."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models import (
    ActorCritic,
    AdversarialPair,
    LanguageModel,
    PhysicsInformedNetwork,
    SharedTrunk,
    VariationalAutoencoder,
)

TOKENS = np.random.default_rng(0).integers(0, 7, (3, 8)).astype(np.int32)


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_a_language_model_carries_its_state_from_batch_to_batch(cell):
    model = LanguageModel(7, 6, 2, cell=cell, batch_size=3)
    plain = LanguageModel(7, 6, 2, cell=cell)
    plain.set_weights(model.get_weights())
    parts = [np.asarray(model(TOKENS[:, :5])), np.asarray(model(TOKENS[:, 5:]))]
    whole = np.asarray(plain(TOKENS))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=1e-6)
    model.reset_states()
    np.testing.assert_allclose(model(TOKENS[:, :5]), parts[0], atol=1e-6)
    assert not np.allclose(plain(TOKENS[:, 5:]), parts[1])  # without the state it is another answer


def test_a_language_model_sees_no_later_token():
    model = LanguageModel(7, 6)
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 7
    one, other = np.asarray(model(TOKENS)), np.asarray(model(changed))
    np.testing.assert_array_equal(one[:, :5], other[:, :5])
    assert not np.allclose(one[:, 5], other[:, 5])


def test_a_language_model_continues_a_prompt():
    model = LanguageModel(7, 6, 2)
    tokens = model.sample(TOKENS[:, :3], 4, temperature=1e-6).numpy()
    text = TOKENS[:, :3]
    for index in range(4):  # as cold as that it takes the likeliest token: what one pass over all of it would take
        likeliest = np.argmax(np.asarray(model(text))[:, -1], axis=-1)
        np.testing.assert_array_equal(tokens[:, index], likeliest)
        text = np.concatenate([text, likeliest[:, np.newaxis].astype(np.int32)], axis=1)


def test_samples_follow_the_seed_and_leave_carried_states_alone():
    model = LanguageModel(50, 6, batch_size=3)
    model(TOKENS)
    before = [np.array(state) for layer in model.recurrent for state in keras.tree.flatten(layer.states)]
    draws = [model.sample([[1, 2]], 12, seed=seed).numpy() for seed in (0, 0, 1)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])
    after = [np.array(state) for layer in model.recurrent for state in keras.tree.flatten(layer.states)]
    np.testing.assert_array_equal(before, after)
    assert any(np.any(state != 0) for state in before)


def test_the_code_of_an_autoencoder_is_drawn_from_its_gaussian():
    """With an encoder that ignores its input and a decoder that is the identity, the outputs are the draws."""
    model = VariationalAutoencoder((2,), 2, (), seed=3)
    mean, deviation = np.array([1.0, -2.0]), np.array([2.0, 0.5])
    model.encoder.set_weights([np.zeros((2, 4)), np.concatenate([mean, 2 * np.log(deviation)])])
    model.decoder.set_weights([np.eye(2), np.zeros(2)])
    inputs = np.zeros((20_000, 2), np.float32)
    drawn = np.asarray(model(inputs, training=True)["reconstruction"])
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=0.05)
    np.testing.assert_allclose(drawn.std(axis=0), deviation, rtol=0.03)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.03
    settled = model(inputs[:3], training=False)
    np.testing.assert_allclose(settled["reconstruction"], np.broadcast_to(mean, (3, 2)), atol=1e-6)
    np.testing.assert_allclose(settled["latent"], np.broadcast_to([1, -2, np.log(4), np.log(0.25)], (3, 4)), atol=1e-6)
    np.testing.assert_allclose(model.generate(np.array([[0.0, 3.0]])), [[0.5, 1 / (1 + np.exp(-3))]], rtol=1e-5)


def numpy_network(model, points, mean, scale):
    """The network in float64, from its weights."""
    values = (points - mean) / scale
    weights = [w.astype(np.float64) for w in model.get_weights()]
    for kernel, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        values = np.tanh(values @ kernel + bias)
    return values @ weights[-2] + weights[-1]


def test_the_derivatives_of_a_physics_informed_network_are_those_of_finite_differences():
    mean, scale = [0.5, -1.0], [2.0, 0.25]
    model = PhysicsInformedNetwork(2, (6, 5), mean, scale)
    points = np.random.default_rng(0).normal(size=(4, 2))
    values, first, second = model.derivatives(tf.constant(points, tf.float32))
    network = lambda x: numpy_network(model, x, mean, scale)[:, 0]  # noqa: E731
    np.testing.assert_allclose(values[:, 0], network(points), atol=1e-5)
    for axis, step in enumerate(1e-4 * np.eye(2)):
        slope = (network(points + step) - network(points - step)) / 2e-4
        curvature = (network(points + step) - 2 * network(points) + network(points - step)) / 1e-8
        np.testing.assert_allclose(first[:, axis], slope, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(second[:, axis], curvature, rtol=1e-3, atol=1e-3)


def test_a_residual_trains_every_weight_of_a_physics_informed_network():
    model = PhysicsInformedNetwork(2, (6, 5))

    @tf.function
    def gradients(points):
        with tf.GradientTape() as tape:
            values, first, second = model.derivatives(points)
            loss = tf.reduce_mean(tf.square(tf.reduce_sum(second, axis=1) + values[:, 0] + first[:, 0]))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    for variable, gradient in zip(model.trainable_variables, gradients(tf.random.normal([5, 2])), strict=True):
        assert np.any(gradient.numpy() != 0), variable.path


def test_points_and_their_statistics_must_agree():
    with pytest.raises(ValueError, match=r"\[1.0, 2.0, 3.0\] has 3 numbers for 2 dimensions. Give one, or one each."):
        PhysicsInformedNetwork(2, mean=[1.0, 2.0, 3.0])


def test_heads_have_their_names_and_share_the_trunk():
    model = SharedTrunk(3, {"label": 4, "value": 1}, (8,), head_units=5)
    outputs = model(np.ones((2, 3), np.float32))
    assert {name: tuple(output.shape) for name, output in outputs.items()} == {"label": (2, 4), "value": (2, 1)}
    with tf.GradientTape(persistent=True) as tape:
        outputs = model(np.ones((2, 3), np.float32))
        losses = {name: tf.reduce_sum(output) for name, output in outputs.items()}
    reached = {}
    for name, loss in losses.items():
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        pairs = zip(model.trainable_variables, gradients, strict=True)
        reached[name] = {v.path.split("/")[-2] for v, gradient in pairs if gradient is not None}
    assert reached == {
        "label": {"trunk_0", "label_hidden", "label"},
        "value": {"trunk_0", "value_hidden", "value"},
    }
    with pytest.raises(ValueError, match="`heads` is empty; it must be {name: size of its output}"):
        SharedTrunk(3, {})


def test_a_policy_starts_nearly_uniform():
    model = ActorCritic(4, 3)
    outputs = model(np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32))
    assert outputs["value"].shape == (50,)
    np.testing.assert_allclose(tf.nn.softmax(outputs["policy"]), np.full((50, 3), 1 / 3), atol=0.02)


def test_actor_and_critic_share_their_layers_only_if_told():
    apart, together = ActorCritic(4, 3, (8,)), ActorCritic(4, 3, (8,), shared=True)
    assert apart.count_params() - together.count_params() == 4 * 8 + 8


def test_generator_and_discriminator_have_their_own_variables():
    pair = AdversarialPair(2, 3, (8,))
    parts = [{id(v) for v in part.trainable_variables} for part in (pair.generator, pair.discriminator)]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == {id(v) for v in pair.trainable_variables}
    latents = np.ones((5, 3), np.float32)
    examples = pair.generator(latents)
    assert examples.shape == (5, 2)
    np.testing.assert_array_equal(pair(latents), pair.discriminator(examples))


def test_an_unknown_cell_is_refused():
    with pytest.raises(ValueError, match=r"`cell` is 'lstn'; it must be one of \['lstm', 'gru', 'rnn'\]"):
        LanguageModel(7, cell="lstn")
