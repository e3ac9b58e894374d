"""Actions on λ_t against an unrolled eager loop in which identities change the gradient at every time step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.recurrent import actions
from looptape.trainer.recurrent.actions import ClipNorm, Cut, Detach, Moment, Normalize, Scale
from looptape.trainer.recurrent.hoisted.cells import gru, lstm
from looptape.trainer.recurrent.loops.recurrent_loop import recurrent_loop
from looptape.trainer.recurrent.steering import Steering

TIME, BATCH, FEATURES, UNITS = 6, 3, 2, 4
STEP, UNIT = 7, 1.5
CELLS = {"lstm": (keras.layers.LSTMCell, lstm.run), "gru": (keras.layers.GRUCell, gru.run)}


def gate(states, change):
    """Identities whose gradients `change` makes into others."""

    @tf.custom_gradient
    def passed(*tensors):
        return [tf.identity(x) for x in tensors], lambda *upstream: list(change(list(upstream)))

    found = passed(*states)
    return list(found) if isinstance(found, list | tuple) else [found]


def make(kind, seed=0):
    keras.utils.set_random_seed(seed)
    cell = CELLS[kind][0](UNITS, bias_initializer="random_normal")
    cell.build((BATCH, FEATURES))
    random = np.random.default_rng(seed)
    inputs = tf.constant(random.normal(size=(TIME, BATCH, FEATURES)), tf.float32)
    states = [tf.constant(random.normal(size=(BATCH, UNITS)), tf.float32) for _ in range(2 if kind == "lstm" else 1)]
    arriving = tf.constant(random.normal(size=(TIME, BATCH, UNITS)), tf.float32)
    # Complete, padded, and one with gaps.
    mask = tf.constant(np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 0]], bool).T)
    return cell, inputs, states, arriving, mask


def unrolled(cell, inputs, states, arriving, given, mask=None, zeroed=False):
    """Gradients of (inputs, weights, initial states) with the actions at every time step.

    Goes through the valid time steps of one example after the other: padding cannot matter.
    """
    variables = cell.trainable_variables
    with tf.GradientTape() as tape:
        tape.watch([inputs, *states])
        loss = 0.0
        for row in range(BATCH):
            valid = [t for t in range(TIME) if mask is None or mask[t, row]]
            values, shown, last = [state[row : row + 1] for state in states], 0.0, None
            for t in range(TIME):
                if t in valid:
                    if last is not None:
                        values = gate(values, acting(given, True, last, t))
                    _, values = cell(inputs[t][row : row + 1], values)
                    values = gate(values, acting(given, False, t))
                    shown, last = values[0], t
                elif zeroed:
                    shown = 0.0
                loss += tf.reduce_sum(arriving[t][row] * shown)
            loss += tf.reduce_sum(values[-1])
    found = tape.gradient(loss, [inputs, *variables, *states])
    return [x.numpy() for x in found]


def acting(given, carried, t, sender=None):
    """A function of gradients: the actions of one kind."""

    def run(gradients):
        moment = Moment(tf.constant(t), tf.constant(STEP, tf.int64), UNIT, "layer", sender and tf.constant(sender))
        for action in given:
            if action.carried == carried:
                gradients = action(gradients, moment)
        return gradients

    return run


def generic(cell, inputs, states, arriving, given, mask=None, zeroed=False):
    """The same by the loop for any step."""
    steering = Steering(given)
    steering.set(tf.constant(STEP, tf.int64), UNIT)

    @tf.function
    def run(inputs, states):
        variables = cell.trainable_variables
        with tf.GradientTape() as tape:
            tape.watch([inputs, *states])
            outputs, final = recurrent_loop(
                lambda t, x, states: cell(x, states),
                tf.transpose(inputs, [1, 0, 2]),
                states,
                mask=None if mask is None else tf.transpose(mask),
                zero_output_for_mask=zeroed,
                act=steering.act_for("layer"),
            )
            loss = tf.reduce_sum(tf.transpose(arriving, [1, 0, 2]) * outputs) + tf.reduce_sum(final[-1])
        return tape.gradient(loss, [inputs, *[v.value for v in variables], *states])

    return [x.numpy() for x in run(inputs, states)]


def ours(kind, cell, inputs, states, arriving, given, mask=None, zeroed=False, compiled=False):
    steering = Steering(given)
    steering.set(tf.constant(STEP, tf.int64), UNIT)

    def run(inputs, states):
        weights = [variable.value for variable in cell.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch([inputs, *weights, *states])
            act = steering.act_for("layer")
            outputs, final, _ = CELLS[kind][1](
                inputs, states, weights, mask, zero_output_for_mask=zeroed, act=act, compiled=compiled
            )
            loss = tf.reduce_sum(arriving * outputs) + tf.reduce_sum(final[-1])
        return tape.gradient(loss, [inputs, *weights, *states])

    return [x.numpy() for x in tf.function(run, jit_compile=compiled)(inputs, states)]


GIVEN = {
    "clip": [ClipNorm(0.7)],
    "clip the cell": [ClipNorm(0.3, state=-1)],
    "scale": [Scale(0.5)],
    "schedule": [Scale(lambda step: 1.0 / (1.0 + tf.cast(step, tf.float32)))],
    "every": [Cut(every=2)],
    "at": [Cut(at=[0, 3])],
    "detach": [Detach(0.5, seed=3)],
    "normalise": [Normalize(0.5)],
    "a list": [Cut(at=[1]), ClipNorm(0.5), Scale(0.9)],
}


CASES = [("lstm", name, True, False) for name in GIVEN] + [("gru", name, False, False) for name in GIVEN]
CASES += [("gru", name, True, True) for name in ("every", "at", "detach")]


@pytest.mark.parametrize(
    ("kind", "name", "masked", "zeroed"),
    [pytest.param(*case, marks=[] if case[2] else [pytest.mark.long]) for case in CASES],  # those without a mask
)
def test_an_action_does_what_it_does_in_an_unrolled_loop(kind, name, masked, zeroed):
    cell, inputs, states, arriving, mask = make(kind)
    mask = mask if masked else None
    expected = unrolled(cell, inputs, states, arriving, GIVEN[name], mask, zeroed)
    found = ours(kind, cell, inputs, states, arriving, GIVEN[name], mask, zeroed)
    plain = ours(kind, cell, inputs, states, arriving, (), mask, zeroed)
    by_any_step = generic(cell, inputs, states, arriving, GIVEN[name], mask, zeroed)
    for one, other in zip(found + by_any_step, expected + expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6 * max(1.0, np.abs(other).max()))
    assert any(np.abs(one - other).max() > 1e-3 for one, other in zip(found, plain, strict=True)), "nothing acted"


@pytest.mark.parametrize("given", [[ClipNorm(float("inf"))], [ClipNorm(1e9)], [Cut(at=[TIME])], [Detach(0.0)]], ids=str)
def test_an_action_that_never_acts_leaves_every_bit(given):
    cell, inputs, states, arriving, mask = make("lstm")
    plain = ours("lstm", cell, inputs, states, arriving, (), mask)
    for one, other in zip(ours("lstm", cell, inputs, states, arriving, given, mask), plain, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_cut_everywhere_equals_stop_gradient_in_the_cell():
    cell, inputs, states, arriving, _ = make("gru")
    with tf.GradientTape() as tape:
        values, loss = states, 0.0
        for t in range(TIME):
            output, values = cell(inputs[t], [tf.stop_gradient(value) for value in values])
            loss += tf.reduce_sum(arriving[t] * output)
        loss += tf.reduce_sum(values[-1])
    expected = tape.gradient(loss, cell.trainable_variables)
    found = ours("gru", cell, inputs, states, arriving, [Cut(every=1)])[1:4]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_compiled_by_xla():
    cell, inputs, states, arriving, mask = make("lstm")
    given = [Detach(0.5, seed=3), ClipNorm(0.5)]
    expected = ours("lstm", cell, inputs, states, arriving, given, mask)
    compiled = ours("lstm", cell, inputs, states, arriving, given, mask, compiled=True)
    for one, other in zip(compiled, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_detach_draws_anew_for_every_layer_step_and_time_step_and_as_often_as_it_says():
    def drawn(layer, step):
        moments = [Moment(tf.constant(t), tf.constant(step, tf.int64), 1.0, layer) for t in range(400)]
        return np.array([float(Detach(0.25)([tf.ones([1, 1])], moment)[0][0, 0]) for moment in moments])

    first = drawn("a", 1)
    np.testing.assert_array_equal(first, drawn("a", 1))
    assert 0.17 < 1.0 - first.mean() < 0.33  # four standard deviations of 0.022
    assert (first != drawn("b", 1)).mean() > 0.2 and (first != drawn("a", 2)).mean() > 0.2


def test_limits_are_in_the_units_of_the_logs():
    moment = Moment(tf.constant(0), tf.constant(0, tf.int64), 4.0, "layer")
    (found,) = ClipNorm(1.0)([tf.constant([[0.3, 0.4], [0.03, 0.04]])], moment)
    np.testing.assert_allclose(found, [[0.15, 0.2], [0.03, 0.04]], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_the_type_stays(dtype):
    moment = Moment(tf.constant(0), tf.constant(0, tf.int64), 1.0, "layer")
    for action in (ClipNorm(0.1), Scale(0.5), Cut(every=1), Detach(1.0), Normalize()):
        (found,) = action([tf.ones([2, 3], dtype)], moment)
        assert found.dtype == dtype


@pytest.mark.parametrize(
    ("make_action", "message"),
    [
        (lambda: ClipNorm(float("nan")), "`limit` of ClipNorm is nan; it must be a number above 0"),
        (lambda: ClipNorm(0), "`limit` of ClipNorm is 0"),
        (lambda: Scale(-1.0), "`factor` of Scale is -1.0 at step 0; it must be finite and not negative"),
        (lambda: Scale(lambda step: -2.0), "`factor` of Scale is -2.0"),
        (lambda: Scale(lambda step: 1.0 - 0.01 * float(step)), "`factor` of Scale is -9.0 at step 1000; it must be"),
        (lambda: Cut(), "Cut has every=None and at=None; it needs one of the two"),
        (lambda: Cut(every=0), "`every` must be an integer of at least 1"),
        (lambda: Cut(at=[-1]), "a list of time steps from 0 on"),
        (lambda: Cut(at=3), "every=None and at=3; .* a list of time steps from 0 on"),
        (lambda: Detach(1.5), "`probability` of Detach is 1.5"),
        (lambda: Normalize(0), "`norm` of Normalize is 0"),
        (lambda: ClipNorm(1.0, state="cel"), "`state` is 'cel'; it must be 'hidden', 'cell'"),
    ],
)
def test_bad_arguments(make_action, message):
    with pytest.raises(ValueError, match=message):
        make_action()


def test_bad_results_and_layers():
    class Shrinks(actions.Action):
        def change(self, gradients, moment):
            return [g[:, :1] for g in gradients]

    moment = Moment(tf.constant(0), tf.constant(0, tf.int64), 1.0, "gru")
    with pytest.raises(ValueError, match=r"returned \(2, 1\) float32 for a gradient \(2, 3\) float32"):
        Shrinks()([tf.ones([2, 3])], moment)
    with pytest.raises(ValueError, match="for state 'cell' of layer 'gru', which has 1 state"):
        ClipNorm(1.0, state="cell")([tf.ones([2, 3])], moment)
    with pytest.raises(ValueError, match="layer 'lstn'; the recurrent layers are .*Did you mean 'lstm'"):
        Steering({"lstn": [ClipNorm(1.0)]}).check_layers(["lstm", "gru"])
    with pytest.raises(TypeError, match="`timestep_actions` has 3; each must be an action"):
        Steering([3])


@pytest.mark.parametrize("name", GIVEN)
def test_states_of_more_axes_are_acted_on_as_flat_ones(name):
    """ConvLSTM's are [batch, time or width, …, filters]; here the batch is as large as the width, and it is not."""
    random = np.random.default_rng(0)
    for shape in ([4, 4, 2], [3, 5, 2, 2]):
        wide = [tf.constant(random.normal(size=shape), tf.float32) for _ in range(2)]
        flat = [tf.reshape(state, [shape[0], -1]) for state in wide]
        for given in GIVEN[name]:
            senders = [None, tf.constant([[2]] * shape[0])] if given.carried else [None]
            for sender in senders:
                moment = Moment(tf.constant(1), tf.constant(STEP, tf.int64), 0.2, "layer", sender)
                for one, other in zip(given(wide, moment), given(flat, moment), strict=True):
                    np.testing.assert_array_equal(tf.reshape(one, other.shape), other)


@pytest.mark.parametrize("schedule", [lambda step: [1.0, 2.0], lambda step, other: 1.0, lambda step: 1 / 0])
def test_a_schedule_that_is_none(schedule):
    with pytest.raises(ValueError, match=r"`factor` of Scale (is array|failed at step 0: (Type|ZeroDivision)Error)"):
        Scale(schedule)


@pytest.mark.parametrize("seed", [1.5, -1, True])
def test_a_seed_that_is_none(seed):
    with pytest.raises(ValueError, match=f"`seed` of Detach is {seed}; it must be an integer from 0"):
        Detach(0.5, seed=seed)
