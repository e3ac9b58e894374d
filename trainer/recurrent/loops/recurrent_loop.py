"""The recurrent loop: `recurrent_loop(step, inputs, states)`, linear in time forwards and backwards, also
under XLA.

Keras layers run on it while they are probed, `models.LoopRNN` always does, and a step function of your own
can:

    def step(t, x, states):
        hidden = tf.tanh(x @ kernel + states[0] @ recurrent_kernel)
        return hidden, [hidden]

    outputs, states = recurrent_loop(step, inputs, [tf.zeros([batch, units])], name="mine")

It does what `keras.layers.RNN` does with masks, directions and unrolling, and computes the same bits.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from looptape.trainer.recurrent import active, internals
from looptape.trainer.recurrent.loops import python_steps, taped_loop
from looptape.trainer.recurrent.loops.adjoint_loop import AdjointLoop
from looptape.trainer.recurrent.loops.memory import check_memory, stride_of
from looptape.trainer.recurrent.loops.python_steps import swap
from looptape.trainer.recurrent.loops.state_loop import First
from looptape.trainer.recurrent.loops.steps import FunctionStep
from looptape.trainer.recurrent.steering import act_on_loop


class Layout(NamedTuple):
    """How a loop goes over its inputs; the words are those of `keras.layers.RNN`."""

    go_backwards: bool = False
    unroll: bool = False
    return_sequences: bool = True
    zero_output_for_mask: bool = False


def recurrent_loop(
    step,
    inputs,
    states,
    *,
    mask=None,
    go_backwards=False,
    unroll=False,
    return_sequences=True,
    zero_output_for_mask=False,
    name=None,
    memory=None,
    act=None,
):
    """Runs `step(t, inputs at t, states) -> (output, new states)` over time. Eager or traced.

    Args:
        step: called with the index of the iteration (an int32 tensor that counts up, whatever the direction).
            Called once more, before the loop, to learn what an output looks like.
        inputs: [batch, time, ...].
        states: the initial states, any nesting of [batch, ...] tensors.
        mask: [batch, time], False where a time step is to be skipped: states stay, the output is repeated (or
            zero).
        go_backwards: start at the last time step; outputs come in the order in which they were computed.
        unroll: a Python loop; the number of time steps must be known.
        return_sequences: all outputs, or only the last.
        name: report the gradients of the states under this name when a `ProbeSession` is active.
        memory: keep fewer states for the backward pass and compute the others again: "sqrt" for the fewest; a number of
            bytes, or "500MB", beyond which the fewest are kept; "every 16" for every 16th; None for all.
        act: an action of `looptape.timesteps` or a list of them; or `act(t, gradients, valid) -> gradients`, which
            changes the gradient of the states on its way back, a list of [batch, ...] tensors; see `AdjointLoop`. By
            default what the `Trainer` that trains does to a layer of this name.

    Returns:
        outputs [batch, time, ...] (or the last one, [batch, ...]) and the final states.
    """
    layout = Layout(go_backwards, unroll, return_sequences, zero_output_for_mask)
    session = active.session()
    record = session.open_loop(name, layout) if session is not None and name is not None else None
    act = active.action(name) if act is None else act_on_loop(act, name)
    options = Options(act, check_memory(memory))
    last, outputs, states = run(FunctionStep(step), inputs, states, mask, layout, record, options)
    return (outputs if return_sequences else last), states


class Options(NamedTuple):
    """How a loop goes back; for the arguments see `AdjointLoop`."""

    act: Any = None
    memory: Any = None  # see `trainer.recurrent.loops.memory.check_memory`
    tracked: Any = None
    note: Any = None  # function that receives the reason if the loop did not run on `AdjointLoop`
    taped: bool = False  # leave the gradient to TensorFlow, as an exported graph needs: a SavedModel takes no other


def run(step, inputs, states, mask, layout, record=None, options=None):
    """`recurrent_loop` for the inside of this package: returns `(last output, outputs, final states)` as
    Keras does.

    Args:
        step: a `steps.Step`.
        record: the `LoopRecord` that this run is to be probed by, or None.
        options: `Options`.
    """
    options = options or Options()
    inputs = swap(tf.convert_to_tensor(inputs))
    states = keras.tree.map_structure(tf.convert_to_tensor, states)  # those of a stateful layer are variables
    if record is not None:
        inputs = record.tap_inputs(inputs)
    if mask is not None:
        mask = tf.cast(mask, tf.bool)
        mask = swap(mask[..., tf.newaxis] if mask.shape.rank == 2 else mask)
    if is_stepped(layout, options):
        last, outputs, states = python_steps.run_steps(step, inputs, states, mask, layout, record)
    else:
        loop = _loop
        if tf.executing_eagerly():
            _refuse_record(record)
            loop = tf.function(_loop, autograph=False)
        last, outputs, states, moving = loop(step, inputs, states, mask, layout, record, options)
        step.finish(moving)
    if record is not None:
        states = record.finish(states, mask)
    if outputs is None:
        outputs = last[tf.newaxis]
    if last is None:
        last = outputs[-1]
    return last, swap(outputs), states


def _worth_keeping(operations, trial, inputs, states):
    """{position: result} of the costly operations of a step whose results are kept, see `First`."""
    targets = [x for x in (trial[0], *keras.tree.flatten(trial[1])) if x.dtype.is_floating]
    sources = [x for x in (inputs, *keras.tree.flatten(states)) if x.dtype.is_floating]
    results = internals.costly_results(operations)
    return {position: results[position] for position in internals.needed_results(operations, targets, sources)}


def _refuse(reason, record, options):
    """Tells why TensorFlow has to differentiate the loop, or raises an error if it must not."""
    if options.note is not None:
        options.note(reason)
    if record is not None or options.act is not None or options.memory is not None:
        raise RuntimeError(
            f"A recurrent loop cannot be probed, steered or bounded in memory: {reason}. Draw random numbers by "
            "`keras.random` with a `keras.random.SeedGenerator`, return what the step changes as a state, and give "
            "weights to a Keras layer, or read them before the loop: `tf.convert_to_tensor(variable)`."
        )


def _refuse_record(record):
    if record is not None:
        raise RuntimeError(
            "A recurrent loop was probed in eager mode while its gradient is changed or its memory is bounded; "
            "eager mode supports only one of these at a time. Trace the update (`run_eagerly=False`)."
        )


def _loop(step, inputs, states, mask, layout, record, options):
    """(last output or None, outputs or None, final states, moving). Traced."""
    start = internals.operations_since()
    now = inputs[0]
    with internals.watch_variables() as watcher:
        trial = step.first(now, states, record)
    operations = internals.operations_since(start)
    first = First(*trial, _worth_keeping(operations, trial, now, states))
    types = sorted(internals.unrepeatable(operations))
    raw = step.reads_by_itself(watcher.watched_variables())
    reason = None
    if types:
        reason = f"its time step has the operations {types}, which give something else when they are computed again"
    elif internals.in_loop() and raw:
        # The backward loop would be inside the backward loop of the other, where TensorFlow loses track of variables.
        names = [variable.name for variable in raw]
        reason = f"its time step reads the `tf.Variable`s {names} inside the loop over updates, or another one"
    if reason is not None:
        _refuse(reason, record, options)
    # Probes of a loop without a name have tables of their own, which only a tape finds.
    if options.taped or reason is not None or (record is None and active.session() is not None):
        return taped_loop.run_loop(step, first, inputs, states, mask, layout)
    step.fix_values()
    length = tf.shape(inputs)[0] if inputs.shape[0] is None else inputs.shape[0]
    stride = stride_of(options.memory, length, [*keras.tree.flatten(states), *first.moving])
    loop = AdjointLoop(
        step,
        first,
        inputs,
        states,
        mask,
        layout,
        act=options.act,
        stride=stride,
        record=record,
        tracked=options.tracked,
    )
    return loop.run()


def is_stepped(layout, options=None):
    """Whether Python goes through the time steps one by one: unrolled or eager, and nothing asks for a loop."""
    asked = options is not None and (options.act is not None or options.memory is not None)
    return (tf.executing_eagerly() or layout.unroll) and not asked
