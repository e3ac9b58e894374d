"""Ω against an eager loop, and its two derivatives against finite differences of the same definition."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, timesteps
from looptape.trainer.recurrent.omega import omega
from tests.trainer.recurrent import tools
from tests.trainer.tools import assert_same_weights

BATCH, TIME, UNITS = 3, 5, 4
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(BATCH, TIME, 2))
Y = RANDOM.normal(size=(BATCH, 1))
LAYERS = {"rnn": keras.layers.SimpleRNN, "gru": keras.layers.GRU, "lstm": keras.layers.LSTM}
CELLS = {"diagonal": tools.DiagonalCell, "normalised": tools.NormalisedCell, "projected": tools.ProjectedCell}


@contextlib.contextmanager
def dtype_of_parts(dtype):
    """The layers that a cell makes for itself have the global policy."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def network(kind="rnn", sequences=False, dtype="float64", masked=False, **options):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((None, 2), dtype=keras.DTypePolicy(dtype).variable_dtype)
    x = keras.layers.Masking(0.0, dtype=dtype)(inputs) if masked else inputs
    options |= {"return_sequences": sequences, "dtype": dtype, "name": "memory"}
    if kind in CELLS:
        with dtype_of_parts(dtype):
            layer = keras.layers.RNN(CELLS[kind](dtype=dtype), **options)
    else:
        layer = LAYERS[kind](UNITS, **options)
    return keras.Model(inputs, keras.layers.Dense(1, dtype=dtype)(layer(x)))


def error(net, x=X):
    outputs = net(x)
    targets = Y[:, None] if outputs.shape.rank == 3 else Y
    return tf.reduce_mean(tf.square(outputs - targets))


def by_hand(net, x=X, constants=None, mask=None):
    """(Ω_t [batch, time] by eager loops, its (states, λ)); `constants` holds both of them fixed at the values given.

    Each zero is added to a state after its time step and before the output is made.
    """
    layer, dense = net.layers[-2], net.layers[-1]
    x, cell = x[:, ::-1] if layer.go_backwards else x, layer.cell
    states = [tf.zeros([BATCH, size], tf.float64) for size in tf.nest.flatten(cell.state_size)]
    update = getattr(cell, "update", lambda x, states: cell(x, states)[1])
    read = getattr(cell, "read", lambda x, states: states[0])
    trace, outputs, before = [], [], (*states, 0.0)
    added = [[tf.zeros([BATCH, UNITS], tf.float64) for _ in states] for _ in range(x.shape[1])]
    with tf.GradientTape() as tape:
        tape.watch(added)
        for t in range(x.shape[1]):
            states = update(x[:, t], states)
            states = [state + zero for state, zero in zip(states, added[t], strict=True)]
            new = (*states, read(x[:, t], states))
            if mask is not None:
                new = [tf.where(mask[:, t, None], a, b) for a, b in zip(new, before, strict=True)]
            before, (*states, output) = new, new
            trace.append(states)
            outputs.append(output)
        outputs = tf.stack(outputs, 1) if layer.return_sequences else outputs[-1]
        targets = Y[:, None] if layer.return_sequences else Y
        total = tf.reduce_mean(tf.square(dense(outputs) - targets))
    adjoints = tape.gradient(total, added, unconnected_gradients="zero")
    if constants is not None:
        trace, adjoints = constants
    found = []
    for t in range(1, x.shape[1]):
        with tf.GradientTape() as tape:
            tape.watch(trace[t - 1])
            after = update(x[:, t], trace[t - 1])
        sent = tape.gradient(after, trace[t - 1], output_gradients=adjoints[t])
        norms = [np.sqrt(sum(np.sum(np.square(g), axis=1) for g in each)) for each in (sent, adjoints[t])]
        with np.errstate(invalid="ignore"):  # λ is 0 at padding
            found.append((norms[0] / norms[1] - 1) ** 2)
    return np.stack(found, 1), (trace, adjoints)


def ours(net, form="immediate", x=X):
    _, values, weights = omega(net, lambda: (None, error(net, x)), form=form)
    return values, weights


@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
@pytest.mark.parametrize("options", [{}, {"sequences": True}, {"go_backwards": True}], ids=str)
def test_values_against_eager_loops(kind, options):
    net = network(kind, **options)
    values, weights = ours(net)
    np.testing.assert_array_equal(weights, np.tile([0, 1, 1, 1, 1], [BATCH, 1]))
    np.testing.assert_allclose(values[:, 1:], by_hand(net)[0], rtol=2e-5)


def differences(net, variable, function, size=1e-6):
    """The gradient of the mean of `function()` by central differences."""
    value, found = variable.numpy(), np.zeros(variable.shape)
    for place in np.ndindex(*value.shape):
        ends = []
        for sign in (1, -1):
            changed = value.copy()
            changed[place] += sign * size
            variable.assign(changed)
            ends.append(np.mean(function()))
        found[place] = (ends[0] - ends[1]) / (2 * size)
    variable.assign(value)
    return found


KINDS = [(form, kind) for form in ("immediate", "full") for kind in ("rnn", "diagonal")]
# Without the full form of "normalised": the second derivative of `tf.nn.moments` is not exact.
SLOW = [("immediate", "lstm"), ("full", "lstm"), ("immediate", "normalised"), ("full", "projected")]


@pytest.mark.parametrize(("form", "kind"), [*KINDS, *(pytest.param(*k, marks=pytest.mark.long) for k in SLOW)])
def test_derivatives_against_finite_differences(form, kind):
    net = network(kind)

    @tf.function(autograph=False)
    def gradient():
        with tf.GradientTape() as tape:
            values, _ = ours(net, form)
            mean = tf.reduce_mean(values[:, 1:])
        return tape.gradient(mean, [v.value for v in net.trainable_variables], unconnected_gradients="zero")

    found = dict(zip([v.path for v in net.trainable_variables], gradient(), strict=True))
    constants = by_hand(net)[1] if form == "immediate" else None
    for variable in net.trainable_variables:
        expected = differences(net, variable, lambda: by_hand(net, constants=constants)[0])
        np.testing.assert_allclose(found[variable.path], expected, atol=2e-5 * max(np.abs(expected).max(), 1.0))
    if kind in LAYERS:
        assert np.abs(found[net.layers[1].cell.recurrent_kernel.path]).max() > 1e-3


def test_the_forms_differ_and_nothing_reaches_the_readout_by_the_immediate_one():
    net = network()
    for form, reached in (("immediate", False), ("full", True)):
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(ours(net, form)[0])
        gradient = tape.gradient(mean, net.layers[-1].kernel.value, unconnected_gradients="zero")
        assert (np.abs(gradient).max() > 1e-6) == reached


@pytest.mark.parametrize("kind", ["rnn", "normalised"])
def test_padding_does_not_count(kind):
    net = network(kind, masked=True, sequences=True)
    padded = X.copy()
    padded[0, 3:] = 0.0
    padded[1, :2] = 0.0
    values, weights = ours(net, x=padded)
    np.testing.assert_array_equal(weights, [[0, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
    assert np.all(np.asarray(values)[np.asarray(weights) == 0] == 0)
    alone = network(kind, masked=True, sequences=True)
    alone.set_weights(net.get_weights())
    mask = np.any(padded != 0, -1)
    expected = np.where(np.asarray(weights)[:, 1:], by_hand(net, padded, mask=mask)[0], 0.0)
    np.testing.assert_allclose(values[:, 1:], expected, rtol=2e-5)
    np.testing.assert_allclose(values[1, 3:], ours(alone, x=X[1:2, 2:].repeat(3, 0))[0][1, 1:], rtol=2e-4)


def test_a_gradient_too_small_to_be_squared_still_counts():
    net = network(dtype="float32")
    _, values, weights = omega(net, lambda: (None, 1e-30 * error(net, X.astype("float32"))))
    _, expected, _ = omega(net, lambda: (None, error(net, X.astype("float32"))))
    assert np.all(weights[:, 1:] == 1)
    np.testing.assert_allclose(values, expected, rtol=1e-3)


def test_gradients_too_small_for_float16_count():
    """With an error of 1e-5, λ itself would be 0 in float16 at most time steps."""
    found = []
    for policy in ("float32", "mixed_float16"):
        net = network(dtype=policy, recurrent_initializer=keras.initializers.Orthogonal(0.2, seed=1))
        losses = {"error": "mse", "omega": timesteps.Omega("memory")}
        trainer = Trainer(net, "sgd", losses, loss_weights={"error": 1e-5, "omega": 0.0})
        data = tf.data.Dataset.from_tensors((X.astype("float32"), Y.astype("float32"))).repeat()
        found.append(trainer.fit(data, steps=1, progress=False).history["omega"][-1])
    assert found[1] == pytest.approx(found[0], rel=2e-2)


def trained(**options):
    net = network(dtype="float32")
    losses = {"error": "mse", "omega": timesteps.Omega("memory", **options.pop("omega", {}))}
    trainer = Trainer(net, keras.optimizers.SGD(0.05), losses, loss_weights={"error": 1.0, "omega": 0.5}, **options)
    data = tf.data.Dataset.from_tensors((X.astype("float32"), Y.astype("float32"))).repeat()
    history = trainer.fit(data, steps=3, progress=False)
    return trainer, data, history


@pytest.mark.parametrize("form", ["immediate", "full"])
def test_a_trainer_trains_it(form):
    trainer, data, history = trained(omega={"form": form})
    net = network(dtype="float32")
    optimizer = keras.optimizers.SGD(0.05)
    x = X.astype("float32")
    for _ in range(3):
        with tf.GradientTape() as tape:
            total, values, weights = omega(net, lambda: _twice(net, x), None, form)
            objective = total + 0.5 * tf.reduce_sum(values) / tf.reduce_sum(weights)
        optimizer.apply(tape.gradient(objective, net.trainable_variables), net.trainable_variables)
    assert_same_weights(trainer.model, net, tolerance=2e-6)
    assert history.history["omega"][-1] > 0
    assert "omega" not in trainer.evaluate(data.take(1))


def _twice(net, x):
    total = error(net, x)
    return total, total


@pytest.mark.parametrize(
    "options",
    [{"probe_every": 2}, pytest.param({"jit_compile": True}, marks=pytest.mark.long), {"run_eagerly": True}],
    ids=str,
)
def test_however_it_runs(options):
    plain, other = trained()[0], trained(**options)[0]
    assert_same_weights(plain.model, other.model, tolerance=0 if "probe_every" in options else 2e-6)
    if "probe_every" in options:
        assert set(other._engine.timesteps.latest["memory"]) >= {"state", "gain"}


def test_bad_input():
    with pytest.raises(ValueError, match="`form` of Omega is 'half'; it must be one of"):
        timesteps.Omega(form="half")
    with pytest.raises(TypeError, match="`layer` of Omega is 3"):
        timesteps.Omega(3)
    with pytest.raises(TypeError, match="Ω is not a function of targets and outputs"):
        timesteps.Omega()(1, 2)
    net = network(dtype="float32")
    data = (X.astype("float32"), Y.astype("float32"))

    def fit(net, penalty, **options):
        Trainer(net, "sgd", {"error": "mse", "omega": penalty}, **options).fit(data, steps=1, progress=False)

    with pytest.raises(ValueError, match="Omega is for the layer 'memroy'; .*Did you mean 'memory'?"):
        fit(net, timesteps.Omega("memroy"))
    with pytest.raises(ValueError, match="'memory', which has actions on its gradient"):
        fit(net, timesteps.Omega(), timestep_actions=[timesteps.ClipNorm(1.0)])
    with pytest.raises(ValueError, match="'memory', which has dropout inside its cell"):
        fit(network(dtype="float32", dropout=0.5), timesteps.Omega())
    with pytest.raises(ValueError, match="nothing but `Omega`"):
        Trainer(net, "sgd", {"omega": timesteps.Omega()}).fit(data, steps=1, progress=False)
