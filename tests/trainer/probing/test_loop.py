"""`recurrent_loop`: a user's step function on our loop, and the probes in it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.probing import ProbeSession, probe, recurrent_loop, totals, vectors
from tests.trainer.probing import tools

BATCH, TIME, UNITS = 3, 5, 2


def make_inputs():
    return tf.constant(np.random.default_rng(0).normal(size=[BATCH, TIME, UNITS]).astype("float32"))


KERNEL = tf.constant(np.random.default_rng(1).normal(size=[UNITS, UNITS]).astype("float32"))


def step(t, x, states):
    hidden = tf.tanh(x + states[0] @ KERNEL)
    return hidden, [hidden]


@pytest.mark.parametrize("mode", tools.MODES)
@pytest.mark.parametrize("go_backwards", [False, True])
def test_values_are_those_of_a_python_loop(mode, go_backwards):
    x = make_inputs()
    run = tools.as_mode(lambda x: recurrent_loop(step, x, [tf.zeros([BATCH, UNITS])], go_backwards=go_backwards), mode)
    outputs, states = run(x)
    hidden, expected = tf.zeros([BATCH, UNITS]), []
    for t in range(TIME - 1, -1, -1) if go_backwards else range(TIME):
        hidden, _ = step(t, x[:, t], [hidden])
        expected.append(hidden)
    np.testing.assert_allclose(outputs, tf.stack(expected, 1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(states[0], hidden, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", tools.MODES)
def test_masks_and_nested_states(mode):
    x, mask = make_inputs(), np.array([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], bool)

    def count(t, x, states):
        total = states["sum"] + x
        return total, {"sum": total, "steps": states["steps"] + 1}

    def run(x, **options):
        states = {"sum": tf.zeros([BATCH, UNITS]), "steps": tf.zeros([BATCH, 1], tf.int32)}
        return recurrent_loop(count, x, states, mask=mask, **options)

    outputs, states = tools.as_mode(run, mode)(x)
    sums = np.cumsum(x * mask[..., None], axis=1)
    np.testing.assert_array_equal(states["steps"][:, 0], mask.sum(axis=1))
    np.testing.assert_allclose(outputs, sums, rtol=1e-5)
    np.testing.assert_allclose(states["sum"], sums[:, -1], rtol=1e-5)
    zeroed, _ = tools.as_mode(lambda x: run(x, zero_output_for_mask=True), mode)(x)
    np.testing.assert_allclose(zeroed, sums * mask[..., None], rtol=1e-5)
    last, _ = tools.as_mode(lambda x: run(x, return_sequences=False), mode)(x)
    np.testing.assert_allclose(last, sums[:, -1], rtol=1e-5)


def report_of(forward, mode, **options):
    def run(x):
        session = ProbeSession(**options)
        with tf.GradientTape() as tape:
            with session:
                outputs = forward(x)
            loss = tf.reduce_sum(outputs**2)
        return session.report(tape.gradient(loss, session.sources))

    return tools.as_mode(run, mode)(make_inputs())


@pytest.mark.parametrize("mode", tools.MODES)
def test_a_named_loop_reports_its_states_and_the_probes_in_it(mode):
    def probed(t, x, states):
        kernel = probe("kernel", KERNEL, t, batched=False)
        before = probe("before", x + states[0] @ kernel, t)
        hidden = tf.tanh(before)
        return hidden, [hidden]

    def forward(x):
        return recurrent_loop(probed, x, [tf.zeros([BATCH, UNITS])], return_sequences=False, name="mine")[0]

    found = report_of(forward, mode)
    assert list(found) == ["mine", "kernel", "before"]
    # The same, written as a Keras cell.
    layer = keras.layers.SimpleRNN(UNITS, use_bias=False, name="layer")
    layer.build((None, None, UNITS))
    layer.set_weights([np.eye(UNITS), KERNEL])
    with tf.GradientTape() as tape:
        with ProbeSession(layer) as session:
            outputs = layer(make_inputs())
        loss = tf.reduce_sum(outputs**2)
    expected = session.report(tape.gradient(loss, session.sources))["layer"]
    for name in ("state", "hidden", "recurrent", "external", "input", "gain"):
        np.testing.assert_allclose(found["mine"][name], expected[name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["before"]["state"], expected["input"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["kernel"]["weight"], expected["weight/recurrent_kernel"], rtol=1e-4, atol=1e-6)


def test_the_delivery_of_its_probes_does_not_capture():
    """They come by lists that the loop carries: no table, whose cost grows with the square of the time."""

    def probed(t, x, states):
        hidden = probe("hidden", x + states[0], t)
        return hidden, [hidden]

    @tf.function(autograph=False)
    def run(x):
        session = ProbeSession()
        with session:
            recurrent_loop(probed, x, [tf.zeros([BATCH, UNITS])], name="mine")
        assert session.layers == ["mine", "hidden"] and session.shapes == {}
        return tf.stack([tf.size(source) for source in session.sources])

    assert np.max(run(make_inputs())) == TIME * BATCH * UNITS


def test_a_loop_without_a_name_only_lets_its_probes_through():
    def probed(t, x, states):
        hidden = probe("hidden", x + states[0], t)
        return hidden, [hidden]

    def forward(x):
        return recurrent_loop(probed, x, [tf.zeros([BATCH, UNITS])], return_sequences=False)[0]

    for mode in ("eager", "graph"):
        found = report_of(forward, mode, per_example=True, capacity={"hidden": TIME})
        assert list(found) == ["hidden"]
        state = vectors(totals(found))["hidden"]["state"].numpy()
        np.testing.assert_allclose(state, np.full(TIME, state[0]), rtol=1e-6)


def test_a_loop_that_runs_twice_reports_twice():
    def probed(t, x, states):
        hidden = probe("hidden", x + states[0], t)
        return hidden, [hidden]

    def forward(x):
        for _ in range(2):
            x, _ = recurrent_loop(probed, x, [tf.zeros([BATCH, UNITS])], name="mine")
        return x

    found = report_of(forward, "graph")
    assert list(found) == ["mine", "hidden", "mine_call_2", "hidden_call_2"]
    np.testing.assert_allclose(found["hidden"]["state"], found["mine"]["state"])
    assert not np.allclose(found["hidden"]["state"], found["hidden_call_2"]["state"])


def test_unrolling_needs_a_length():
    run = tf.function(
        lambda x: recurrent_loop(step, x, [tf.zeros([BATCH, UNITS])], unroll=True),
        input_signature=[tf.TensorSpec([BATCH, None, UNITS])],
        autograph=False,
    )
    with pytest.raises(ValueError, match="number of time steps is known; it is None"):
        run(make_inputs())


def test_gradients_are_linear_in_time():
    """What a backward pass carries per time step must not grow with the number of time steps: no list of lists."""

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs, _ = recurrent_loop(step, x, [tf.zeros([BATCH, UNITS])])
            loss = tf.reduce_sum(outputs**2)
        return tape.gradient(loss, x)

    graph = run.get_concrete_function(make_inputs()).graph
    backward = [op for op in graph.get_operations() if "While" in op.type][-1]
    body = next(f for f in graph.as_graph_def().library.function if f.signature.name == backward.get_attr("body").name)
    kinds = {node.op for node in body.node_def}
    assert "TensorListGetItem" in kinds
    assert not kinds & {"TensorListReserve", "TensorListPushBack", "TensorListConcat", "AddN"}
