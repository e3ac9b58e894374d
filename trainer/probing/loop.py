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

import functools
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from trainer.probing import active, lists, stepping
from trainer.probing.stepping import index_of, pack, select, swap


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

    Returns:
        outputs [batch, time, ...] (or the last one, [batch, ...]) and the final states.
    """
    layout = Layout(go_backwards, unroll, return_sequences, zero_output_for_mask)
    session = active.session()
    record = session.open_loop(name, layout) if session is not None and name is not None else None
    last, outputs, states = run(_FunctionStep(step), inputs, states, mask, layout, record)
    return (outputs if return_sequences else last), states


def run(step, inputs, states, mask, layout, record):
    """`recurrent_loop` for the inside of this package: returns `(last output, outputs, final states)` as
    Keras does.

    Args:
        step: has `first`, `__call__` and `finish`, see `_FunctionStep`.
        record: the `LoopRecord` that this run is to be probed by, or None.
    """
    inputs = swap(tf.convert_to_tensor(inputs))
    states = keras.tree.map_structure(tf.convert_to_tensor, states)  # those of a stateful layer are variables
    if record is not None:
        inputs = record.tap_inputs(inputs)
    if mask is not None:
        mask = tf.cast(mask, tf.bool)
        mask = swap(mask[..., tf.newaxis] if mask.shape.rank == 2 else mask)
    run_steps = stepping.run_steps if is_stepped(layout) else _looped
    last, outputs, states = run_steps(step, inputs, states, mask, layout, record)
    if record is not None:
        states = record.finish(states, mask)
    if outputs is None:
        outputs = last[tf.newaxis]
    if last is None:
        last = outputs[-1]
    return last, swap(outputs), states


def is_stepped(layout):
    """Whether Python goes through the time steps one by one: unrolled, or eager."""
    return layout.unroll or tf.executing_eagerly()


class _FunctionStep:
    """A user's step function as `run` wants it. A step over a Keras cell is in `trainer.probing.cells`."""

    def __init__(self, function):
        self._function = function

    def first(self, inputs, states, record):
        """Called before the loop; only the look of the result counts. Returns output, states, and what
        moves.
        """
        t = tf.constant(0)
        with active.discovering(record, t):
            output, states = self._function(t, inputs, states)
        return output, states, ()

    def __call__(self, t, inputs, states, ports, moving, record):
        """One time step. `moving` are tensors that the loop carries along for the step's own use.

        Where Python goes through the time steps `ports` and `moving` are None.
        """
        if ports is None:
            call = functools.partial(self._function, t)
            return *(call(inputs, states) if record is None else record.observe(0, call, inputs, states)), None
        with active.time_step(record, t, ports):
            output, states = self._function(t, inputs, states)
        return output, states, moving

    def finish(self, moving):
        """Called after the loop with the last of `moving`."""


class _Carried(NamedTuple):
    time: Any
    inputs: Any  # list of what is still to come
    ports: Any  # {key: list} of zeros; their gradients are the report
    moving: Any
    states: Any  # flat
    previous: Any  # the output before, where it is needed
    outputs: Any  # list of what was computed, where all are wanted


def _looped(step, inputs, states, mask, layout, record):
    static_length = inputs.shape[0]
    length = tf.shape(inputs)[0] if static_length is None else static_length
    output, new_states, moving = step.first(inputs[0], states, record)
    ports, specs = ({}, {}) if record is None else record.start(length, states, output, new_states, mask is not None)
    alias = index_of(output, keras.tree.flatten(new_states))
    spec = lists.Spec(output.shape, output.dtype)
    # An output that is a state need not be carried a second time, unless masks make the two differ.
    keep = (mask is not None and not layout.zero_output_for_mask) or (
        not layout.return_sequences and (mask is not None or alias is None)
    )
    items, item_spec = lists.unstack(inputs if layout.go_backwards else tf.reverse(inputs, [0]))
    ordered_mask = tf.reverse(mask, [0]) if mask is not None and layout.go_backwards else mask
    zeros = tf.zeros_like(output) if mask is not None or keep else ()

    def body(*carried):
        time, items, ports, moving, flat, previous, outputs = carried
        items, now = lists.pop(items, item_spec)
        # Says in the graph what Python knows. Grappler sums in another order where it knows no shapes.
        now = tf.ensure_shape(now, item_spec.shape)
        ports, popped = _pop_all(ports, specs)
        if record is not None:
            flat = record.tap_states(flat, popped)
        output, new, moving = step(time, now, pack(states, flat), popped, moving, record)
        new = keras.tree.flatten(new)
        if mask is not None:
            output = record.tap_output(output, popped) if record is not None else output
            valid = tf.gather(ordered_mask, time)
            output = select(valid, output, zeros if layout.zero_output_for_mask else previous)
            new = [select(valid, after, before) for after, before in zip(new, flat, strict=True)]
        if layout.return_sequences:
            outputs = lists.push(outputs, output)
        return _Carried(time + 1, items, ports, moving, new, output if keep else (), outputs)

    final = tf.while_loop(
        lambda time, *_: time < length,
        body,
        _Carried(
            tf.constant(0),
            items,
            ports,
            moving,
            keras.tree.flatten(states),
            zeros if keep else (),
            lists.empty(spec, length) if layout.return_sequences else (),
        ),
        maximum_iterations=length,
    )
    step.finish(final.moving)
    outputs = lists.stack(final.outputs, spec, static_length) if layout.return_sequences else None
    last = None
    if not layout.return_sequences:
        last = tf.identity(final.previous if keep else final.states[alias])
    if record is not None and mask is None:
        record.note_outputs(last if outputs is None else outputs)
    return last, outputs, pack(states, final.states)


def _pop_all(ports, specs):
    pairs = {key: lists.pop(items, specs[key]) for key, items in ports.items()}
    return {key: items for key, (items, _) in pairs.items()}, {key: port for key, (_, port) in pairs.items()}
