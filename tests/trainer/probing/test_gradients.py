"""The oracles that need a model of their own: 4, 6 to 9, 11 and 13; and the classic mistake."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.probing import ProbeSession, scalars, shares, totals, vectors
from tests.trainer.probing import tools
from tests.trainer.probing.tools import BATCH, FEATURES, TIME, UNITS


def probe_layer(layer, inputs, loss, mode="graph", **options):
    """The per-example report of a layer in NumPy."""

    def run(x):
        session = ProbeSession(layer, **options)
        with tf.GradientTape() as tape:
            with session:
                outputs = layer(x)
            value = loss(outputs)
        return session.report(tape.gradient(value, session.sources))

    (report,) = tools.as_mode(run, mode)(tf.constant(inputs, layer.compute_dtype)).values()
    return {name: value.numpy() for name, value in report.items()}


def test_the_classic_mistake_is_told_apart():
    """Six LSTM steps, loss on the last: the gradient of the stacked outputs is e_t, and hides that of the states."""
    layer = keras.layers.LSTM(8, return_sequences=True)
    x = tf.constant(np.random.default_rng(0).normal(size=[2, 6, 3]).astype("float32"))
    with tf.GradientTape() as tape:
        outputs = layer(x)
        tape.watch(outputs)
        loss = tf.reduce_sum(outputs[:, -1])
    wrong = tf.norm(tape.gradient(loss, outputs), axis=-1)
    report = probe_layer(layer, x, lambda outputs: tf.reduce_sum(outputs[:, -1]))
    np.testing.assert_allclose(report["external"], wrong, rtol=1e-6)
    assert np.all(wrong[:, :-1] == 0)
    assert np.all(report["hidden"][:, :-1] > 1e-3) and np.all(np.diff(report["hidden"], axis=1) > 0)


@pytest.mark.parametrize("mode", tools.MODES)
@pytest.mark.parametrize("cls", [keras.layers.SimpleRNN, keras.layers.LSTM, keras.layers.GRU])
def test_4_gains_multiply_to_the_ratio_of_the_ends(cls, mode):
    if mode == "xla" and cls is keras.layers.SimpleRNN:
        pytest.skip("two compilations are enough")
    layer = cls(UNITS, dtype="float64")
    layer(tools.make_inputs())
    report = probe_layer(layer, tools.make_inputs(), tools.loss_of, mode)
    assert np.all(report["external"][:, :-1] == 0)
    product = np.prod(report["gain"][:, 1:], axis=1)
    np.testing.assert_allclose(product, report["state"][:, 0] / report["state"][:, -1], rtol=1e-5)
    np.testing.assert_allclose(report["gain"], report["recurrent"] / report["state"], rtol=1e-6)


def test_6_an_orthogonal_linear_network_keeps_the_norm():
    layer = keras.layers.SimpleRNN(6, activation=None, recurrent_initializer="orthogonal", dtype="float64")
    layer.build((None, None, FEATURES))
    x = np.random.default_rng(1).normal(size=[3, 50, FEATURES])
    report = probe_layer(layer, x, lambda outputs: tf.reduce_sum(outputs**2))
    np.testing.assert_allclose(report["state"], np.repeat(report["state"][:, :1], 50, axis=1), rtol=1e-6)
    np.testing.assert_allclose(report["gain"], 1.0, rtol=1e-6)
    sums = totals({"layer": {name: tf.constant(value) for name, value in report.items()}})
    found = {name: float(value) for name, value in scalars(sums)["layer"].items()}
    assert (
        found["horizon"] == 50
        and found["median_gain"] == pytest.approx(1)
        and found["omega"] == pytest.approx(0, abs=1e-6)
    )


def test_7_finite_differences():
    """Each state of a GRU is moved a little, and the rest of the sequence runs on."""
    cell = keras.layers.GRUCell(UNITS, dtype="float64")
    layer = keras.layers.RNN(cell, return_sequences=True, dtype="float64")
    inputs = tools.make_inputs()
    layer(inputs)
    report = probe_layer(layer, inputs, tools.loss_of, full=True)
    direction = np.random.default_rng(5).normal(size=[BATCH, UNITS])

    def loss(moved, amount):
        state, outputs = tf.zeros([BATCH, UNITS], tf.float64), []
        for t in range(TIME):
            state, _ = cell(tf.constant(inputs[:, t]), [state])
            state = state + amount * direction if t == moved else state
            outputs.append(state)
        return float(tools.loss_of(tf.stack(outputs, 1)))

    for t in range(TIME):
        slope = (loss(t, 1e-5) - loss(t, -1e-5)) / 2e-5
        assert slope == pytest.approx(np.sum(report["state_gradient/0"][:, t] * direction), rel=1e-5)


def test_8_ghost_norms():
    """‖G_t‖² = Σ (d_b · d_b')(a_b · a_b') for a linear map with inputs a and deltas d."""
    layer = keras.layers.SimpleRNN(UNITS, activation=None, dtype="float64", return_sequences=True)
    inputs = tools.make_inputs()
    layer(inputs)
    report = probe_layer(layer, inputs, tools.loss_of, full=True)
    deltas = report["state_gradient/0"]
    for t in range(TIME):
        inner = (deltas[:, t] @ deltas[:, t].T) * (inputs[:, t] @ inputs[:, t].T)
        assert report["weight/kernel"][t] == pytest.approx(np.sqrt(np.sum(inner)), rel=1e-5)


def several_losses(layer, x, weights, mode="graph"):
    """Reports of each weighted loss and of their sum, and the inner products, from one persistent tape."""

    def run(x):
        session = ProbeSession(layer, full=True)
        with tf.GradientTape(persistent=True) as tape:
            with session:
                outputs = layer(x)
            losses = [tf.reduce_sum(outputs[:, -1] ** 2), tf.reduce_mean(outputs), tf.reduce_sum(outputs[:, 1] ** 3)]
            losses = [weight * loss for weight, loss in zip(weights, losses, strict=True)]
            total = tf.add_n(losses)
        gradients = [tape.gradient(loss, session.sources) for loss in losses]
        whole = session.report(tape.gradient(total, session.sources))
        return [session.report(own) for own in gradients], whole, session.products(gradients)

    return tools.as_mode(run, mode)(x)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_9_losses_add_up_and_their_shares_sum_to_one(mode):
    layer = keras.layers.LSTM(UNITS, return_sequences=True, name="lstm")
    x = tf.constant(tools.make_inputs().astype("float32"))
    layer(x)
    each, whole, products = several_losses(layer, x, (1.0, 4.0, 2.0), mode)
    for state in ("state_gradient/0", "state_gradient/1"):
        parts = [report["lstm"][state].numpy() for report in each]
        np.testing.assert_allclose(sum(parts), whole["lstm"][state], rtol=1e-4, atol=1e-6)
    found = shares(products)["lstm"].numpy()
    np.testing.assert_allclose(np.sum(found, axis=0), 1.0, rtol=1e-5)
    flat = [np.concatenate([r["lstm"][f"state_gradient/{j}"] for j in range(2)], axis=2) for r in each]
    total = np.sum(flat, axis=0)
    expected = [np.sum(part * total, axis=(0, 2)) / np.sum(total**2, axis=(0, 2)) for part in flat]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    # Other weights need no other backward pass.
    _, _, unweighted = several_losses(layer, x, (1.0, 1.0, 1.0), mode)
    np.testing.assert_allclose(shares(unweighted, [1.0, 4.0, 2.0])["lstm"], found, rtol=1e-4, atol=1e-6)


def test_a_loss_that_does_not_reach_a_layer_has_no_share_of_it():
    inputs = keras.Input((TIME, FEATURES))
    outputs = [keras.layers.GRU(2, name=name)(inputs) for name in ("first", "second")]
    model = keras.Model(inputs, outputs)

    @tf.function(autograph=False)
    def run(x):
        session = ProbeSession(model)
        with tf.GradientTape(persistent=True) as tape:
            with session:
                first, second = model(x)
            losses = [tf.reduce_sum(first), tf.reduce_sum(first**2) + tf.reduce_sum(second)]
        return session.products([tape.gradient(loss, session.sources) for loss in losses])

    found = shares(run(tf.constant(tools.make_inputs().astype("float32"))))
    np.testing.assert_array_equal(found["second"], [[0] * TIME, [1] * TIME])
    assert np.all(found["first"].numpy()[0] != 0)


def test_11_a_loss_has_no_gradient_at_later_states():
    layer = keras.layers.GRU(UNITS, return_sequences=True)
    x = tf.constant(tools.make_inputs().astype("float32"))
    layer(x)

    @tf.function(autograph=False)
    def run(x):
        session = ProbeSession(layer, weights=False)
        with tf.GradientTape(persistent=True) as tape:
            with session:
                outputs = layer(x)
            losses = tf.unstack(tf.reduce_sum(outputs**2, axis=[0, 2]), TIME)
        rows = [session.totals(tape.gradient(loss, session.sources)) for loss in losses]
        return tf.stack([next(iter(vectors(row).values()))["state"] for row in rows])

    credit = run(x).numpy()
    assert np.all(np.triu(credit, 1) == 0)
    assert np.all(credit[np.tril_indices(TIME)] > 0)


def test_13_omega_from_the_same_numbers():
    layer = keras.layers.GRU(UNITS, return_sequences=True)
    layer(tools.make_inputs())
    report = probe_layer(layer, tools.make_inputs(), tools.loss_of)
    sums = totals({"gru": {name: tf.constant(value) for name, value in report.items()}})
    found = {name: float(value) for name, value in scalars(sums)["gru"].items()}
    gains = np.mean(report["gain"], axis=0)
    assert found["omega"] == pytest.approx(np.sum((gains - 1) ** 2), rel=1e-5)
    assert found["median_gain"] == pytest.approx(np.median(gains), rel=1e-6)
    norms = np.mean(report["state"], axis=0)
    assert found["horizon"] == np.sum(norms > 0.01 * norms.max())


def test_norms_alone_are_those_of_the_whole_gradients():
    """The usual way to probe weights, in the loop, against keeping all of G_t."""
    layer = keras.layers.LSTM(80, return_sequences=True)  # one weight is large, two are small
    x = np.random.default_rng(0).normal(size=[2, 7, 5]).astype("float32")
    layer(x)
    for mode in ("graph", "xla"):
        norms = probe_layer(layer, x, lambda outputs: tf.reduce_sum(outputs**2), mode)
        whole = probe_layer(layer, x, lambda outputs: tf.reduce_sum(outputs**2), mode, weights="full")
        for name in ("weight/kernel", "weight/recurrent_kernel", "weight/bias"):
            np.testing.assert_allclose(norms[name], whole[name], rtol=1e-5)
    assert not any(name.startswith("weight") for name in probe_layer(layer, x, tf.reduce_sum, weights=False))


def test_vanished_gradients_are_not_zero():
    """λ shrinks to 1e-30, where its square is no float32; neither states nor weights may read 0 (a large weight,
    too).
    """
    layer = keras.layers.SimpleRNN(
        70,
        activation=None,
        kernel_initializer=keras.initializers.Constant(0.01),
        recurrent_initializer=keras.initializers.Identity(0.1),
    )
    x = np.ones([2, 30, 70], "float32")
    layer(x)
    report = probe_layer(layer, x, lambda outputs: tf.reduce_sum(outputs))
    expected = np.sqrt(70) * 10.0 ** -np.arange(29.0, -1, -1)
    np.testing.assert_allclose(report["state"], np.tile(expected, [2, 1]), rtol=1e-4)
    np.testing.assert_allclose(report["weight/kernel"], 2 * np.sqrt(70) * expected, rtol=1e-4)
    assert report["weight/recurrent_kernel"][0] == 0 and np.all(report["weight/recurrent_kernel"][1:] > 0)
