"""A recurrent loop that TensorFlow differentiates by itself, linear in time forwards and backwards.

For steps that must not run twice: with random numbers of `tf.random`, assignments, or Python calls inside.

Inputs and outputs are tensor lists that the loop carries along. The gradient of a pop is a push and the gradient of a
push is a pop, O(1) a time step; a `tf.TensorArray` that a loop body captures costs a whole list per time step in the
backward pass.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from looptape.trainer.recurrent.loops.python_steps import index_of, pack, select


class _Carried(NamedTuple):
    time: Any
    inputs: Any  # list of what is still to come
    moving: Any
    states: Any  # flat
    previous: Any  # the output before, where it is needed
    outputs: Any  # list of what was computed, where all are wanted


def run_loop(step, first, inputs, states, mask, layout, taps=None):
    """(last output or None, outputs or None, final states, moving); the arguments are those of `AdjointLoop`.

    `taps`: {`recurrent/<j>`: [time, ...]} to be added to the states that enter the time steps, or None.
    """
    static_length = inputs.shape[0]
    length = tf.shape(inputs)[0] if static_length is None else static_length
    output, new_states, moving, _ = first
    alias = index_of(output, keras.tree.flatten(new_states))
    spec = _Spec(output.shape, output.dtype)
    # An output that is a state need not be carried a second time, unless masks make the two differ.
    keep = (mask is not None and not layout.zero_output_for_mask) or (
        not layout.return_sequences and (mask is not None or alias is None)
    )
    items, item_spec = _unstack(inputs if layout.go_backwards else tf.reverse(inputs, [0]))
    ordered_mask = tf.reverse(mask, [0]) if mask is not None and layout.go_backwards else mask
    zeros = tf.zeros_like(output) if mask is not None or keep else ()

    def body(time, items, moving, flat, previous, outputs):
        items, now = _pop(items, item_spec)
        # Says in the graph what Python knows. Grappler sums in another order where it knows no shapes.
        now = tf.ensure_shape(now, item_spec.shape)
        for key, tap in (taps or {}).items():
            j = int(key.split("/")[1])
            flat = [*flat[:j], flat[j] + tf.gather(tap, time), *flat[j + 1 :]]
        output, new, moving = step(time, now, pack(states, flat), {}, moving, None)
        new = keras.tree.flatten(new)
        if mask is not None:
            valid = tf.gather(ordered_mask, time)
            output = select(valid, output, zeros if layout.zero_output_for_mask else previous)
            new = [select(valid, after, before) for after, before in zip(new, flat, strict=True)]
        if layout.return_sequences:
            outputs = tf.raw_ops.TensorListPushBack(input_handle=outputs, tensor=output)
        return _Carried(time + 1, items, moving, new, output if keep else (), outputs)

    final = tf.while_loop(
        lambda time, *_: time < length,
        body,
        _Carried(
            tf.constant(0),
            items,
            moving,
            keras.tree.flatten(states),
            zeros if keep else (),
            _empty(spec, length) if layout.return_sequences else (),
        ),
        maximum_iterations=length,
    )
    states = pack(states, final.states)
    if layout.return_sequences:
        return None, _stack(final.outputs, spec, static_length), states, final.moving
    return tf.identity(final.previous if keep else final.states[alias]), None, states, final.moving


class _Spec(NamedTuple):
    """Shape and dtype of the elements of a list."""

    shape: tf.TensorShape
    dtype: Any

    @property
    def tensor(self):
        if self.shape.rank is None:
            return tf.constant(-1, tf.int32)
        return tf.constant([-1 if size is None else size for size in self.shape.as_list()], tf.int32, [self.shape.rank])


def _unstack(tensor):
    """A list of the slices of `tensor` along its first axis, and the `Spec` of one."""
    spec = _Spec(tensor.shape[1:], tensor.dtype)
    return tf.raw_ops.TensorListFromTensor(tensor=tensor, element_shape=spec.tensor), spec


def _pop(items, spec):
    """The list without its last element, and that element."""
    items, element = tf.raw_ops.TensorListPopBack(
        input_handle=items, element_shape=spec.tensor, element_dtype=spec.dtype
    )
    element.set_shape(spec.shape)
    return items, element


def _empty(spec, capacity):
    """A list to push to. XLA needs the capacity; elsewhere it is only a limit."""
    return tf.raw_ops.EmptyTensorList(element_shape=spec.tensor, max_num_elements=capacity, element_dtype=spec.dtype)


def _stack(items, spec, length=None):
    """The elements along a new first axis, the first one pushed first. `length` if it is known statically."""
    stacked = tf.raw_ops.TensorListStack(
        input_handle=items,
        element_shape=spec.tensor,
        element_dtype=spec.dtype,
        num_elements=-1 if length is None else length,
    )
    stacked.set_shape(tf.TensorShape([length]).concatenate(spec.shape))
    return stacked
