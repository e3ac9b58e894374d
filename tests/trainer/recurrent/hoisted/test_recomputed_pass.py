"""Recomputed stretches against `keras.layers` and against one run that keeps every state."""

import pytest
import tensorflow as tf

from looptape.trainer.recurrent.hoisted import both_ways
from looptape.trainer.recurrent.hoisted.cells import lstm
from tests.trainer.recurrent.hoisted.test_both_ways import (
    BATCH,
    FEATURES,
    KINDS,
    TIME,
    TOLERANCE,
    UNITS,
    differentiated,
    distance,
    keras_own,
    loss_of,
    make_data,
    make_layer,
    make_taps,
    number_of_states,
    ours,
)


def test_recomputed_stretches_leave_nothing_over_if_they_can():
    assert both_ways.even_stride(10_000, 100) == 100
    assert both_ways.even_stride(100_000, 317) == 250
    assert both_ways.even_stride(7, 3) == 3
    assert both_ways.even_stride(6, 4) == 3
    assert both_ways.even_stride(5, 9) == 5


@pytest.mark.parametrize(
    ("kind", "go_backwards"),
    [
        pytest.param(
            kind, back, marks=[] if (kind, back) in {("lstm", True), ("simple_rnn", False)} else [pytest.mark.long]
        )
        for kind in KINDS
        for back in (False, True)
    ],
)
def test_recomputed_stretches_equal_keras(kind, go_backwards):
    layer = make_layer(kind, go_backwards=go_backwards)
    x, states = make_data(time=7, states=number_of_states(kind))
    wanted = tf.function(differentiated)(keras_own(layer), layer, x, states)
    for stride, compiled in ((1, False), (3, True), (9, False)) if not go_backwards else ((3, False),):
        found = tf.function(differentiated)(ours(layer, compiled=compiled, stride=stride), layer, x, states)
        assert distance(found, wanted) < TOLERANCE
    call = ours(layer, stride=3, wanted=False)
    found = tf.function(lambda states: differentiated(call, layer, tf.identity(x), states))(states)
    place = 1 + len(states)
    assert found[place] is None  # the gradient of the inputs, which costs memory
    assert distance(found[:place] + found[place + 1 :], wanted[:place] + wanted[place + 1 :]) < TOLERANCE


def test_recomputed_stretches_keep_nothing_of_a_time_step():
    """The forward pass hands nothing to the backward pass but inputs, weights and the states between stretches."""
    layer = make_layer("lstm")
    layer.return_sequences = False
    x, states = make_data(time=6)
    arrays = [tensor.numpy() for tensor in (x, *states)]
    values, graph = layer.get_weights(), tf.Graph()
    with graph.as_default():
        x, states = tf.constant(arrays[0]), [tf.constant(array) for array in arrays[1:]]
        weights = [tf.constant(value) for value in values]

        def view(begin, size):
            return tf.transpose(tf.slice(x, [0, begin, 0], [BATCH, size, FEATURES]), [1, 0, 2])

        inputs = both_ways.Recomputed(view, 6, 2)
        _, _, last = lstm.run(inputs, states, weights, compiled=False, sequences=False)
        before = set(graph.get_operations())
        tf.gradients(tf.reduce_sum(last), weights)
        taken = {
            source
            for operation in set(graph.get_operations()) - before
            for source in operation.inputs
            if source.op in before and source.op.type not in ("Const", "ReadVariableOp")
        }
    kept = [tuple(tensor.shape) for tensor in taken if tensor.shape.rank == 3]
    assert kept == [(3, BATCH, UNITS)] * 2, "hidden state and carry at the start of each stretch"


@pytest.mark.parametrize("go_backwards", [False, True])
def test_actions_and_reports_in_recomputed_stretches(go_backwards):
    """As in one run: the time steps count on, and what enters from the later stretch is not from outside."""
    layer = make_layer("lstm", go_backwards=go_backwards)
    x, states = make_data()

    def act(t, adjoints, valid):
        return [adjoint * (1 + 0.1 * tf.cast(t, tf.float32)) for adjoint in adjoints]

    act.carried = lambda t, adjoints, sender: [adjoint * (2.0 + tf.cast(t, tf.float32)) for adjoint in adjoints]
    taps = make_taps([f"{kind}/{j}" for kind in ("recurrent", "state", "after") for j in range(2)])
    taps["weights"] = tf.zeros([TIME, 3])

    def both(**options):
        with tf.GradientTape() as tape:
            tape.watch([x, *states, *taps.values()])
            outputs, *final = ours(layer, act=act, taps=taps, **options)(x, states)
            loss = loss_of(outputs, final)
        return tape.gradient(loss, [x, *states, *taps.values(), *(weight.value for weight in layer.weights)])

    wanted = tf.function(both)()
    assert distance(tf.function(both)(stride=2), wanted) < 3e-6
    if not go_backwards:
        assert distance(tf.function(both)(stride=2, compiled=True), wanted) < 3e-6


@pytest.mark.long
def test_second_derivatives_through_recomputed_stretches():
    layer = make_layer("gru")
    x, states = make_data(batch=2, time=4, states=1)

    def penalty(call):
        with tf.GradientTape() as outer:
            outer.watch(x)
            first = differentiated(call, layer, x, states)[2]
            loss = tf.reduce_sum(tf.square(first))
        return outer.gradient(loss, [x, *(weight.value for weight in layer.weights)])

    wanted = tf.function(penalty)(keras_own(layer))
    assert distance(tf.function(penalty)(ours(layer, stride=2)), wanted) < 3e-6
