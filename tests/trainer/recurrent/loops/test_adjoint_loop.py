"""The backward loop: state gradients of cells whose output is not a state, actions on them, second derivatives."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.models import LoopRNN
from looptape.trainer.probing import ProbeSession
from looptape.trainer.recurrent.loops.recurrent_loop import recurrent_loop
from tests.trainer.recurrent import tools
from tests.trainer.recurrent.tools import BATCH, FEATURES, TIME, UNITS

CELLS = {"diagonal": tools.DiagonalCell, "normalised": tools.NormalisedCell, "projected": tools.ProjectedCell}


def make_layer(kind, **options):
    keras.utils.set_random_seed(7)
    layer = keras.layers.RNN(CELLS[kind](), name="own", **options)
    layer.build((BATCH, TIME, FEATURES))
    return layer


def unrolled(layer, x, mask, act=None):
    """λ_t by an eager loop that adds a zero to each state after its time step and before its output is made.

    Returns ([state] of [time, batch, units], gradients of the inputs and the weights), by iteration. With `act` λ_t is
    changed where the zero is added, by `act(t, λ)` of all states.
    """
    cell, changes = layer.cell, []

    @tf.custom_gradient
    def changed(t, *states):
        def gradient(*upstream):
            return (None, *act(int(t), list(upstream)))

        return [tf.identity(state) for state in states], gradient

    with tf.GradientTape() as tape:
        tape.watch(x)
        states, outputs, previous = [tf.zeros([BATCH, n]) for n in cell.state_size], [], None
        for t in range(TIME - 1, -1, -1) if layer.go_backwards else range(TIME):
            new = cell.update(x[:, t], states)
            zeros = [tf.zeros_like(state) for state in new]
            tape.watch(zeros)
            changes.append(zeros)
            new = [state + zero for state, zero in zip(new, zeros, strict=True)]
            if act is not None:
                new = list(changed(t, *new))
            output = cell.read(x[:, t], new)
            if mask is not None:
                valid = tf.constant(mask[:, t, None])
                new = [tf.where(valid, a, b) for a, b in zip(new, states, strict=True)]
                output = tf.where(valid, output, tf.zeros_like(output) if previous is None else previous)
            states, previous = new, output
            outputs.append(output)
        value = tools.loss_of(tf.stack(outputs, 1) if layer.return_sequences else outputs[-1])
    sources = [x, *(v.value for v in layer.trainable_variables)]
    found, gradients = tape.gradient(value, (changes, sources), unconnected_gradients="zero")
    return [np.stack(state) for state in zip(*found, strict=True)], gradients


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", CELLS)
def test_state_gradients_where_the_output_is_not_a_state(kind, masked, mode):
    layer = make_layer(kind, return_sequences=kind != "normalised", go_backwards=kind == "projected")
    x, mask = tools.make_inputs(), tools.make_mask() if masked else None

    def probed(x):
        session = ProbeSession(layer, full=True)
        with tf.GradientTape() as tape, session:
            value = tools.loss_of(layer(x, mask=mask))
        return session.report(tape.gradient(value, session.sources))

    report = (probed if mode == "eager" else tf.function(probed, autograph=False))(x)
    (report,) = report.values()
    expected, _ = unrolled(layer, x, mask)
    valid = np.ones([BATCH, TIME], bool) if mask is None else mask
    for j, own in enumerate(expected):
        own = np.moveaxis(own[::-1] if layer.go_backwards else own, 0, 1)
        np.testing.assert_allclose(report[f"state_gradient/{j}"].numpy()[valid], own[valid], rtol=1e-4, atol=1e-6)
    whole = np.sqrt(sum(np.sum(np.square(own), axis=2) for own in expected)).T
    whole = whole[:, ::-1] if layer.go_backwards else whole
    np.testing.assert_allclose(report["state"].numpy()[valid], whole[valid], rtol=1e-4, atol=1e-6)
    if kind == "diagonal":
        gains = report["gain"].numpy()[valid]
        assert np.all(gains[np.isfinite(gains)] < 1)


# ---- Actions.


def scaled(t, gradients, valid=None):
    return [gradient * (0.5 + 0.1 * tf.cast(t, tf.float32)) for gradient in gradients]


@pytest.mark.parametrize("memory", [None, "sqrt"])
@pytest.mark.parametrize("kind", CELLS)
def test_an_action_is_that_of_an_unrolled_loop(kind, memory):
    layer, x = make_layer(kind, go_backwards=True, return_sequences=True), tools.make_inputs()
    core = tools.make_core(layer, memory=memory, act_of=lambda name: scaled)
    found = tools.make_pass(layer, core)(x)[2]
    _, expected = unrolled(layer, x, None, lambda t, gradients: scaled(t, gradients))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_an_action_in_eager_mode():
    layer, x = make_layer("diagonal"), tools.make_inputs()
    core = tools.make_core(layer, act_of=lambda name: scaled)
    for a, b in zip(*[tools.run(layer, x, core=core, mode=mode) for mode in ("eager", "graph")], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["lstm", "normalised"])
def test_an_action_that_does_nothing_changes_no_bit(kind):
    keras.utils.set_random_seed(3)
    layer = keras.layers.LSTM(UNITS) if kind == "lstm" else make_layer(kind, return_sequences=True)
    layer.build((BATCH, TIME, FEATURES))
    core = tools.make_core(layer, loops="adjoint", act_of=lambda name: lambda t, gradients, valid: gradients)
    plain, acted = [tools.run(layer, tools.make_inputs(), core=c, mask=tools.make_mask()) for c in (None, core)]
    if kind == "lstm":
        tools.assert_same_bits(plain, acted)
    for a, b in zip(plain, acted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_cut_everywhere_is_a_stopped_gradient():
    """Cut before each time step, λ_t is only what arrives at its output: as if the state were a constant."""
    layer, x = make_layer("diagonal", return_sequences=True), tools.make_inputs()
    mask = tools.make_mask()
    kept: dict = {}

    def cut(t, gradients, valid):
        kept["valid"] = valid
        return [tf.zeros_like(gradient) for gradient in gradients]

    core = tools.make_core(layer, act_of=lambda name: cut)
    names = ["x", *(v.name for v in layer.trainable_variables)]
    found = dict(zip(names, tools.make_pass(layer, core, mask=mask)(x)[2], strict=True))
    assert tuple(kept["valid"].shape) == (BATCH, 1)
    assert np.all(found["enter"] == 0)
    _, expected = unrolled(layer, x, mask, lambda t, gradients: [tf.zeros_like(g) for g in gradients])
    np.testing.assert_allclose(found["x"], expected[0], rtol=1e-5, atol=1e-6)


# ---- Second derivatives.


def hessian_product(layer, core, x, direction, mode="graph"):
    """Hessian times a direction, with respect to the inputs and the weights."""
    sources = [x, *(v.value for v in layer.trainable_variables)]

    def product(x):
        own = [x, *sources[1:]]
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                with core.running():
                    value = tools.loss_of(layer(x, training=True, mask=tools.make_mask()))
            first = inner.gradient(value, own)
            product = tf.add_n([tf.reduce_sum(g * d) for g, d in zip(first, direction, strict=True)])
        return outer.gradient(product, own)

    return tf.function(product, autograph=False, jit_compile=mode == "xla" or None)(x)


@pytest.mark.parametrize("kind", ["lstm", "diagonal"])
def test_second_derivatives_by_finite_differences(kind):
    keras.utils.set_random_seed(9)
    if kind == "lstm":
        layer = keras.layers.LSTM(UNITS, dtype="float64", recurrent_dropout=0.2, seed=4)
    else:
        layer = keras.layers.RNN(CELLS[kind](dtype="float64"), dtype="float64", return_sequences=True)
    layer.build((BATCH, TIME, FEATURES))
    core, x = tools.make_core(layer, loops="adjoint"), tools.make_inputs(dtype="float64")
    random = np.random.default_rng(2)
    direction = [tf.constant(random.normal(size=v.shape)) for v in (x, *layer.trainable_variables)]
    seeds = [v for v in layer.variables if "seed" in v.path]
    begin = [v.numpy() for v in seeds]

    def restart():
        for variable, value in zip(seeds, begin, strict=True):
            variable.assign(value)

    found = hessian_product(layer, core, x, direction)
    sides, step, weights = [], 1e-5, layer.get_weights()
    trained = [v.numpy() for v in layer.trainable_variables]
    for sign in (1, -1):
        restart()
        for variable, value, own in zip(layer.trainable_variables, trained, direction[1:], strict=True):
            variable.assign(value + sign * step * own)
        sides.append(tools.run(layer, x + sign * step * direction[0], mask=tools.make_mask(), mode="eager")[2:])
    layer.set_weights(weights)
    for own, plus, minus in zip(found, *sides, strict=True):
        np.testing.assert_allclose(own, (plus - minus) / (2 * step), rtol=1e-5, atol=1e-7)


def test_a_second_derivative_through_an_action_is_refused():
    layer, x = make_layer("diagonal"), tools.make_inputs()
    core = tools.make_core(layer, act_of=lambda name: scaled)
    direction = [tf.ones_like(v) for v in (x, *(v.value for v in layer.trainable_variables))]
    with pytest.raises(RuntimeError, match="changed gradient is not the derivative of anything"):
        hessian_product(layer, core, x, direction)


# ---- Step functions.


def test_a_step_function_trains_what_it_captures():
    """Tensors and variables that a step closes over have gradients, those of an outer graph, too."""
    kernel = tf.Variable(np.random.default_rng(0).normal(size=[FEATURES, FEATURES]).astype("float32"))
    outside = tf.constant([0.5, -1.0, 2.0])

    def forward(x, shift, loop):
        scale = tf.sin(outside) + shift

        def step(t, inputs, states):
            hidden = tf.tanh(inputs * scale + states[0] @ kernel)
            return hidden, [hidden, states[1] + 1]

        states = [tf.zeros([BATCH, FEATURES]), tf.zeros([BATCH], tf.int32)]
        if loop:
            return recurrent_loop(step, x, states)
        outputs = []
        for t in range(TIME):
            output, states = step(t, x[:, t], states)
            outputs.append(output)
        return tf.stack(outputs, 1), states

    def run(x, loop):
        shift = tf.constant(0.25)
        with tf.GradientTape() as tape:
            tape.watch([outside, shift])
            outputs, states = forward(x, shift, loop)
            value = tools.loss_of(outputs)
        return states[1], tape.gradient(value, [kernel, outside, shift])

    found = tf.nest.flatten(tf.function(lambda x: run(x, True), autograph=False)(tools.make_inputs()))
    for a, b in zip(found, tf.nest.flatten(run(tools.make_inputs(), False)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_step_with_random_numbers_of_tensorflow_is_not_run_again():
    """The gradient of its noise is that of the noise it drew: the loop leaves it to TensorFlow."""

    def run(x, **options):
        def step(t, inputs, states):
            hidden = states[0] + inputs * tf.random.normal([BATCH, FEATURES])
            return hidden, [hidden]

        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs, _ = recurrent_loop(step, x, [tf.zeros([BATCH, FEATURES])], return_sequences=False, **options)
            value = tf.reduce_sum(outputs)
        return value, tape.gradient(value, x)

    x = tools.make_inputs()
    value, gradient = tf.function(run, autograph=False)(x)
    np.testing.assert_allclose(tf.reduce_sum(gradient * x), value, rtol=1e-4)
    with pytest.raises(RuntimeError, match=r"\['RandomStandardNormal'\], which give something else.*SeedGenerator"):
        tf.function(lambda x: run(x, memory="sqrt"), autograph=False)(x)


@pytest.mark.parametrize("kind", ["function", "layer"])
def test_inside_a_loop_of_ones_own(kind):
    """The whole recurrent loop as the body of a `tf.while_loop` that a tape differentiates."""
    kernel = tf.Variable(np.random.default_rng(0).normal(size=[FEATURES, FEATURES]).astype("float32") / 2)
    layer = LoopRNN(keras.layers.GRUCell(FEATURES))
    layer.build((BATCH, TIME, FEATURES))
    sources = [kernel] if kind == "function" else [v.value for v in layer.trainable_variables]

    def step(t, inputs, states):
        hidden = tf.tanh(inputs + states[0] @ kernel)
        return hidden, [hidden]

    def once(x, state):
        if kind == "layer":
            return layer(x, initial_state=[state])
        return recurrent_loop(step, x, [state], return_sequences=False)[0]

    def run(x, loop):
        with tf.GradientTape() as tape:
            tape.watch(x)
            state = tf.zeros([BATCH, FEATURES])
            if loop:
                _, state = tf.while_loop(lambda n, _: n < 3, lambda n, s: (n + 1, once(x, s)), (0, state))
            else:
                for _ in range(3):
                    state = once(x, state)
            value = tf.reduce_sum(state**2)
        return tape.gradient(value, [*sources, x])

    traced = tf.function(run, autograph=False)
    for a, b in zip(traced(tools.make_inputs(), True), run(tools.make_inputs(), False), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
