"""How many states a loop keeps for its backward pass, and how many it computes again.

With a stride K the states of every K-th time step are kept. The backward pass takes one stretch of K time steps after
the other: it runs the stretch again from its first state, keeps the K states, and goes back through them. That is
T/K + K states in place of T, the fewest at K = √T, for one forward pass more.
"""

import math
import numbers
import re

import tensorflow as tf

_UNITS = {"KB": 2**10, "MB": 2**20, "GB": 2**30}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)")
_STRIDE = re.compile(r"every ([1-9]\d*)")


def check_memory(value, name="memory"):
    """`value` if it is None, "sqrt", a number of bytes, "500MB" or a stride such as "every 16"; else an error."""
    if value is None or value == "sqrt":
        return value
    if isinstance(value, str) and (_BYTES.fullmatch(value) or _STRIDE.fullmatch(value)):
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 1:
        return int(value)
    raise ValueError(
        f'`{name}` is {value!r}; it must be None (keep every state), "sqrt", a number of bytes, an amount '
        'such as "500MB" in KB, MB or GB, or "every 16" to keep every 16th state. Use "sqrt" for the least memory.'
    )


def stride_of(memory, length, states):
    """The stride for one run of a loop, None to keep every state. An integer where the sizes are known, else a tensor.

    Args:
        memory: see `check_memory`. An amount of memory is for the states of one layer: if all of them fit, all are
            kept, else every √T-th.
        length: number of time steps, an integer or a tensor.
        states: flat list of the tensors that are kept of each time step.
    """
    if memory is None:
        return None
    if memory == "sqrt":
        return _root(length)
    stride = isinstance(memory, str) and _STRIDE.fullmatch(memory)
    if stride:
        return int(stride[1])
    limit = memory if isinstance(memory, int) else _bytes(memory)
    sizes = [state.shape.num_elements() for state in states]
    if isinstance(length, int) and None not in sizes:
        needed = length * sum(n * state.dtype.size for n, state in zip(sizes, states, strict=True))
        return None if needed <= limit else _root(length)
    needed = tf.add_n([tf.size(state, tf.int64) * state.dtype.size for state in states]) * tf.cast(length, tf.int64)
    return tf.where(needed <= limit, length, _root(length))


def _bytes(amount):
    number, unit = _BYTES.fullmatch(amount).groups()
    return int(float(number) * _UNITS[unit])


def _root(length):
    if isinstance(length, int):
        return max(1, math.isqrt(length - 1) + 1) if length else 1
    return tf.maximum(tf.cast(tf.math.ceil(tf.sqrt(tf.cast(length, tf.float32))), tf.int32), 1)
