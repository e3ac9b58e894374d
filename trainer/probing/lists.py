"""Tensor lists that a loop carries along: popped in the forward pass, pushed in the backward pass, O(1) a
time step.

A `tf.TensorArray` that a loop body captures costs a whole list per time step in the backward pass. The
gradient of a
pop is a push and the gradient of a push is a pop: with lists as loop variables a backward pass is linear in
    time.
"""

from typing import Any, NamedTuple

import tensorflow as tf


class Spec(NamedTuple):
    """What the elements of a list look like."""

    shape: tf.TensorShape
    dtype: Any

    @property
    def tensor(self):
        if self.shape.rank is None:
            return tf.constant(-1, tf.int32)
        return tf.constant([-1 if size is None else size for size in self.shape.as_list()], tf.int32, [self.shape.rank])


def unstack(tensor):
    """A list of the slices of `tensor` along its first axis, and the `Spec` of one."""
    spec = Spec(tensor.shape[1:], tensor.dtype)
    return tf.raw_ops.TensorListFromTensor(tensor=tensor, element_shape=spec.tensor), spec


def pop(items, spec):
    """The list without its last element, and that element."""
    items, element = tf.raw_ops.TensorListPopBack(
        input_handle=items, element_shape=spec.tensor, element_dtype=spec.dtype
    )
    element.set_shape(spec.shape)
    return items, element


def empty(spec, capacity):
    """A list to push to. XLA needs the capacity; elsewhere it is only a limit."""
    return tf.raw_ops.EmptyTensorList(element_shape=spec.tensor, max_num_elements=capacity, element_dtype=spec.dtype)


def push(items, element):
    return tf.raw_ops.TensorListPushBack(input_handle=items, tensor=element)


def stack(items, spec, length=None):
    """The elements along a new first axis, the first one pushed first. `length` if it is known statically."""
    stacked = tf.raw_ops.TensorListStack(
        input_handle=items,
        element_shape=spec.tensor,
        element_dtype=spec.dtype,
        num_elements=-1 if length is None else length,
    )
    stacked.set_shape(tf.TensorShape([length]).concatenate(spec.shape))
    return stacked
