"""Steering through the trainer: the same update whatever the micro-batches, the loss scale or the kind of loop."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, timesteps
from tests.trainer.tools import assert_identical_weights, assert_same_weights, read_events

TIME, BATCH = 6, 8
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(BATCH, TIME, 2)).astype("float32")
Y = RANDOM.normal(size=(BATCH, TIME, 1)).astype("float32")
LENGTHS = np.array([6, 3, 5, 1, 6, 2, 4, 6])
MASKED = X * (np.arange(TIME) < LENGTHS[:, None])[..., None].astype("float32")


def model(kind="lstm", mask=False, seed=1, **options):
    keras.utils.set_random_seed(seed)
    layers = {"lstm": keras.layers.LSTM, "gru": keras.layers.GRU}
    layer = (
        keras.layers.RNN(Minimal(3), return_sequences=True, name="minimal")
        if kind == "minimal"
        else layers[kind](3, return_sequences=True, name=kind, **options)
    )
    front = [keras.layers.Masking()] if mask else []
    return keras.Sequential([keras.Input((TIME, 2)), *front, layer, keras.layers.Dense(1)])


@keras.saving.register_keras_serializable("tests")
class Minimal(keras.layers.Layer):
    """A cell of one's own whose output is not its state."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = self.state_size = self.output_size = units
        self.inner = keras.layers.Dense(units, activation="tanh")

    def build(self, shape):
        self.inner.build((shape[0], shape[-1] + self.units))

    def call(self, inputs, states, training=False):
        state = self.inner(keras.ops.concatenate([inputs, states[0]], axis=-1))
        return 2.0 * state + inputs[:, :1], [state]


def fit(net, actions, steps=3, parts=1, x=X, trainer_class=Trainer, **options):
    data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(BATCH // parts).repeat()
    trainer = trainer_class(
        net,
        keras.optimizers.SGD(0.1),
        {"error": keras.losses.MeanSquaredError()},
        accumulation_steps=parts,
        timestep_actions=actions,
        **options,
    )
    trainer.fit(data, steps=steps, progress=False)
    return trainer


CLIP = [timesteps.Detach(0.3, seed=1), timesteps.ClipNorm(0.3)]


@pytest.mark.parametrize("kind", ["lstm", "minimal"])
def test_accumulation_equals_the_large_batch(kind):
    one, four, free = model(kind), model(kind), model(kind)
    fit(one, CLIP)
    fit(four, CLIP, parts=4)
    fit(free, ())
    assert_same_weights(one, four)
    with pytest.raises(AssertionError):
        assert_same_weights(one, free)


def test_eager_updates_have_the_same_steps_and_units():
    class Limited(Trainer):
        def transform_timestep_gradient(self, layer, t, gradient):
            return tf.clip_by_norm(gradient, 0.2, axes=[-1])

    for trainer_class in (Trainer, Limited):
        traced, eager = model("minimal"), model("minimal")
        fit(traced, CLIP, trainer_class=trainer_class)
        fit(eager, CLIP, trainer_class=trainer_class, run_eagerly=True)
        assert_same_weights(traced, eager)


def test_accumulation_with_masks():
    one, two = model(mask=True), model(mask=True)
    x = np.concatenate([MASKED[:4], MASKED[:4]])
    fit(one, CLIP, x=x)
    fit(two, CLIP, x=x, parts=2)  # each with as many valid time steps: the limit is in the same units
    assert_same_weights(one, two, tolerance=2e-6)


@pytest.mark.parametrize("kind", ["lstm", "minimal"])
def test_a_limit_that_is_never_reached_leaves_every_bit(kind):
    one, two = model(kind), model(kind)
    fit(one, [timesteps.ClipNorm(float("inf"))])
    fit(two, ())
    if kind == "lstm":
        assert_same_weights(one, two, tolerance=1e-6)
    else:
        assert_identical_weights(one, two)


def test_the_loss_scale_does_not_count():
    policies = {}
    for policy in ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        try:
            policies[policy] = model()
            fit(policies[policy], [timesteps.ClipNorm(0.3)], steps=2)
        finally:
            keras.config.set_dtype_policy("float32")
    assert_same_weights(policies["float32"], policies["mixed_float16"], tolerance=4e-3)


def test_a_window_is_a_cut_and_one_of_the_whole_length_is_none():
    by_window, by_cut, whole, free = model(), model(), model(), model()
    fit(by_window, (), bptt_window=2)
    fit(by_cut, [timesteps.Cut(every=2)])
    fit(whole, (), bptt_window=TIME)
    fit(free, ())
    assert_identical_weights(by_window, by_cut)
    assert_same_weights(whole, free)
    with pytest.raises(AssertionError):
        assert_same_weights(by_window, free)


@pytest.mark.parametrize("loops", ["auto", "adjoint"])
@pytest.mark.parametrize("window", [4, TIME])
def test_windows_lie_in_the_order_of_the_inputs_for_both_directions(window, loops):
    """Against an eager loop in both directions, without a gradient between the time steps of two windows."""
    keras.utils.set_random_seed(1)
    both = keras.layers.Bidirectional(keras.layers.GRU(3, return_sequences=True))
    net = keras.Sequential([keras.Input((TIME, 2)), both, keras.layers.Dense(1)])
    with tf.GradientTape() as tape:
        directions = []
        for layer, order in ((both.forward_layer, range(TIME)), (both.backward_layer, reversed(range(TIME)))):
            state, outputs, before = [tf.zeros([BATCH, 3])], {}, None
            for t in order:
                if before is not None and before // window != t // window:
                    state = [tf.stop_gradient(state[0])]
                outputs[t], state = layer.cell(X[:, t], state)
                before = t
            directions.append(tf.stack([outputs[t] for t in range(TIME)], 1))
        loss = tf.reduce_mean(tf.square(net.layers[-1](tf.concat(directions, -1)) - Y))
    gradients = tape.gradient(loss, net.trainable_variables)
    expected = [w.numpy() - 0.1 * g.numpy() for w, g in zip(net.trainable_variables, gradients, strict=True)]
    fit(net, (), steps=1, bptt_window=window, recurrent=loops)
    for new, wanted in zip(net.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(new.numpy(), wanted, atol=1e-6)


@pytest.mark.parametrize("loops", ["auto", "adjoint"])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_windows_end_between_time_steps_whatever_is_masked(kind, loops):
    """Padded sequences and gaps: only the way over a border is cut, not what arrives at the last valid output."""
    lengths, window = np.array([3, 4, 6, 1, 5, 2, 6, 3]), 3
    valid = (np.arange(TIME) < lengths[:, None]) & (np.arange(TIME) != np.array([9, 9, 2, 9, 3, 9, 1, 0])[:, None])
    layer, size = {"gru": (keras.layers.GRU, 1), "lstm": (keras.layers.LSTM, 2)}[kind]
    keras.utils.set_random_seed(1)
    net = keras.Sequential([keras.Input((TIME, 2)), keras.layers.Masking(), layer(3), keras.layers.Dense(1)])
    x = X * valid[..., None]
    with tf.GradientTape() as tape:
        states, output = [tf.zeros([BATCH, 3])] * size, tf.zeros([BATCH, 3])
        for t in range(TIME):
            if t % window == 0:
                states = [tf.stop_gradient(state) for state in states]
            now, new = valid[:, t, None], net.layers[1].cell(x[:, t], states)[1]
            states = [tf.where(now, after, before) for after, before in zip(new, states, strict=True)]
            output = tf.where(now, new[0], output)
        loss = tf.reduce_mean(tf.square(net.layers[-1](output) - Y[:, 0]))
    gradients = tape.gradient(loss, net.trainable_variables)
    expected = [w.numpy() - 0.1 * g.numpy() for w, g in zip(net.trainable_variables, gradients, strict=True)]
    data = tf.data.Dataset.from_tensors((x, Y[:, 0])).repeat()
    trainer = Trainer(net, keras.optimizers.SGD(0.1), {"error": "mse"}, bptt_window=window, recurrent=loops)
    trainer.fit(data, steps=1, progress=False)
    for new, wanted in zip(net.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(new.numpy(), wanted, atol=1e-6)


def test_the_hook_equals_the_action_and_sees_the_units_of_the_logs():
    seen = []

    class Halved(Trainer):
        def transform_timestep_gradient(self, layer, t, gradient):
            seen.append((str(layer), layer.state, t.dtype, gradient.shape))
            return 0.5 * gradient

    by_hook, by_action = model(), model()
    fit(by_hook, (), trainer_class=Halved)
    fit(by_action, [timesteps.Scale(0.5)])
    assert_same_weights(by_hook, by_action)
    assert {(name, state) for name, state, *_ in seen} == {("lstm", 0), ("lstm", 1)}
    assert all(kind == tf.int32 and shape[-1] == 3 for *_, kind, shape in seen)


def test_actions_of_one_layer_only():
    keras.utils.set_random_seed(1)
    net = keras.Sequential(
        [
            keras.Input((TIME, 2)),
            keras.layers.GRU(3, return_sequences=True, name="lower"),
            keras.layers.GRU(3, return_sequences=True, name="upper"),
            keras.layers.Dense(1),
        ]
    )
    before = [w.numpy() for w in net.trainable_variables]
    fit(net, {"upper": [timesteps.Scale(0.0)]}, steps=1)
    moved = [np.abs(w.numpy() - old).max() for w, old in zip(net.trainable_variables, before, strict=True)]
    assert max(moved[:6]) == 0.0 and min(moved[6:]) > 0.0, "the lower layer gets its gradient through the upper one"


def test_what_is_looked_at_is_the_gradient_as_it_is():
    steered, free = model(), model()
    one = fit(steered, [timesteps.Scale(0.0)], steps=1)
    two = fit(free, (), steps=1)
    for left, right in zip(steered.trainable_variables, free.trainable_variables, strict=True):
        left.assign(right)
    shown, plain = (trainer.timestep_gradients((X, Y))["lstm"]["state"] for trainer in (one, two))
    np.testing.assert_allclose(shown, plain, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timestep_actions": {"lstn": [timesteps.Scale(0.5)]}}, "layer 'lstn'.*Did you mean 'lstm'"),
        ({"timestep_actions": ["clip"]}, "`timestep_actions` has 'clip'"),
        (
            {"timestep_actions": {"lstm": {"h": [timesteps.Scale(0.5)]}}},
            "for the layer 'lstm'; it must be an action",
        ),
        ({"bptt_updates": "yes", "bptt_window": 2}, "`bptt_updates` is 'yes'; it must be True or False"),
        ({"timestep_actions": [timesteps.Normalize]}, "`timestep_actions` has <class .*Normalize'>; each must be"),
        ({"bptt_window": 0}, "`bptt_window` is 0; it must be at least 1"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fit(model(), options.pop("timestep_actions", ()), **options)


def test_a_layer_that_keras_has_to_run():
    class Own(keras.layers.LSTM):
        def inner_loop(self, *arguments, **options):
            return super().inner_loop(*arguments, **options)

    net = keras.Sequential([keras.Input((TIME, 2)), Own(3, return_sequences=True, name="own"), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="'own' cannot have an action on its gradient, because it runs on Keras"):
        fit(net, [timesteps.Scale(0.5)])


class Halves(timesteps.Action):
    def change(self, gradients, moment):
        return [tf.cast(g, tf.float16) for g in gradients]


class Shortens(timesteps.Action):
    def change(self, gradients, moment):
        return [g[:, :1] for g in gradients]


class Forgets(timesteps.Action):
    def change(self, gradients, moment):
        gradients[0] *= 0.5


class Sums(timesteps.Action):
    def change(self, gradients, moment):
        return gradients[0]


@pytest.mark.parametrize(("action", "got"), [(Forgets(), "None"), (Sums(state=0), "a .*Tensor")])
def test_an_action_that_does_not_return_a_list_is_refused(action, got):
    with pytest.raises(ValueError, match=f"The action {type(action).__name__}.* returned {got} for [12] gradient"):
        fit(model(), [action])


def test_a_hook_that_returns_nothing_is_refused():
    class Forgetful(Trainer):
        def transform_timestep_gradient(self, layer, t, gradient):
            gradient *= 0.5

    with pytest.raises(ValueError, match="returned None for the gradient of layer 'lstm'; .* `return gradient`"):
        fit(model(), (), trainer_class=Forgetful)


@pytest.mark.parametrize("kind", ["lstm", "minimal"])
@pytest.mark.parametrize("action", [Halves(), Shortens()])
def test_an_action_that_changes_shape_or_type_is_refused_before_the_first_update(action, kind):
    net = model(kind)
    before = net.get_weights()
    with pytest.raises(ValueError, match=r"The action (Halves|Shortens).*returned .* shape and type must stay"):
        fit(net, [action])
    for old, new in zip(before, net.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("kind", ["lstm", "minimal"])
def test_the_log_has_what_arrived_and_what_was_made_of_it(kind):
    limit = 0.2
    trainer = fit(model(kind), [timesteps.ClipNorm(limit)], steps=1, probe_every=1)
    free = fit(model(kind), (), steps=1, probe_every=1)
    found = trainer._engine.timesteps.latest[kind]
    before, after = found["state"], found["steered"]
    last = free._engine.timesteps.latest[kind]["state"][-1]
    assert before[-1] == pytest.approx(last, rel=1e-5), "nothing has acted yet on what arrives last"
    assert after.max() <= limit * (1 + 1e-5) and (after <= before * (1 + 1e-6)).all() and (after < 0.9 * before).any()
    assert "steered" not in free._engine.timesteps.latest[kind]


def test_how_often_a_clip_acted(tmp_path):
    with_limit = {}
    for limit in (1e-9, 1e9):
        directory = tmp_path / str(limit)
        net = model("minimal")
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).repeat()
        actions = [timesteps.ClipNorm(limit)]
        trainer = Trainer(net, "sgd", {"error": "mse"}, timestep_actions=actions, probe_every=1)
        trainer.fit(data, steps=1, workdir=directory, progress=False)
        rows = [values for _, values in read_events(directory / "train") if "timestep/minimal/acted" in values]
        with_limit[limit] = [float(values["timestep/minimal/acted"]) for values in rows]
    assert with_limit == {1e-9: [1.0], 1e9: [0.0]}


class OwnTape(Trainer):
    """A `train_step` that `timestep_actions` cannot know."""

    def train_step(self, batch):
        inputs, targets = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(inputs, training=True) - targets))
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timestep_actions": [timesteps.Scale(0.0)]}, "would never act: the update of this trainer runs no recurrent"),
        ({"timestep_actions": {"lstm": timesteps.Scale(0.0)}}, r"The actions on \['lstm'\] would never act"),
        ({"bptt_window": 2}, "`bptt_window` or the hook would never act"),
        ({"recurrent_memory": "sqrt"}, "`recurrent_memory` is 'sqrt', and the update .* runs no recurrent layer"),
    ],
)
def test_what_is_asked_of_an_update_with_a_tape_of_its_own(options, message):
    trainer = OwnTape(model(), "sgd", **options)
    with pytest.raises(ValueError, match=message):
        trainer.fit((X, Y), steps=1, batch_size=BATCH, progress=False)


def test_the_summary_of_an_update_with_a_tape_of_its_own(capsys):
    trainer = OwnTape(model(), "sgd")
    trainer.fit((X, Y), steps=1, batch_size=BATCH, progress=False)
    trainer.summary()
    assert "lstm: Keras's: `train_step` takes its gradients by itself" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"recurrent_memory": 10**6}, {"bptt_window": 2, "bptt_updates": True}])
def test_what_is_asked_of_a_model_without_recurrent_layers(options):
    net = keras.Sequential([keras.Input((None, 2)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"runs no recurrent layer that it could be for; those of the model are \[\]"):
        fit(net, (), **options)


class Unchanged(Trainer):
    def transform_timestep_gradient(self, layer, t, gradient):
        assert gradient.dtype == tf.float32
        return gradient


@pytest.mark.parametrize("kind", ["lstm", "minimal"])
def test_a_hook_that_changes_nothing_in_float16(kind):
    """Loss weight 1e-5: in float16 the gradient without its loss scale has few bits left."""

    def updated(trainer_class):
        net = model(kind)
        data = tf.data.Dataset.from_tensors((X, Y)).repeat()
        options = {"loss_weights": {"error": 1e-5}}
        trainer_class(net, keras.optimizers.SGD(1e4), {"error": "mse"}, **options).fit(data, steps=1, progress=False)
        return net

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        hooked, plain, start = updated(Unchanged), updated(Trainer), model(kind)
    finally:
        keras.config.set_dtype_policy(before)
    assert_same_weights(hooked, plain, tolerance=1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(plain.get_weights(), start.get_weights(), strict=True)) > 1e-3


@keras.saving.register_keras_serializable("tests")
class Outer(keras.layers.Layer):
    """A cell that runs a recurrent layer over the features of each time step."""

    state_size = output_size = 3

    def build(self, shape):
        self.inner = keras.layers.GRU(3, name="inner")
        self.inner.build((shape[0], shape[-1], 1))

    def call(self, inputs, states):
        state = states[0] + self.inner(inputs[..., tf.newaxis])
        return state, [state]


def nested():
    keras.utils.set_random_seed(1)
    outer = keras.layers.RNN(Outer(), return_sequences=True, name="outer")
    return keras.Sequential([keras.Input((TIME, 2)), outer, keras.layers.Dense(1)])


def test_a_layer_inside_a_cell_is_left_out():
    everywhere, outside = nested(), nested()
    fit(everywhere, [timesteps.ClipNorm(0.02)], steps=1, recurrent_memory="sqrt", bptt_window=4)
    fit(outside, {"outer": [timesteps.Cut(every=4), timesteps.ClipNorm(0.02)]}, steps=1)
    assert_same_weights(everywhere, outside)
    with pytest.raises(ValueError, match="'inner' cannot have an action on its gradient, because it runs inside"):
        fit(nested(), {"inner": timesteps.Scale(0.5)}, steps=1)
