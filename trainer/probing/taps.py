"""Identities whose gradient function tells what passes through: the values and training gradients are
untouched.

A tap takes a zero `port` beside its tensor. What it has to tell leaves the backward pass as the "gradient" of
the port.
"""

import threading

import tensorflow as tf

from looptape.trainer.recurrent import internals

# Up to this many elements the norm of a weight's gradient is taken in float64 at once; a cast of a larger one
# costs.
_SMALL = 4_096
# Squares below this are not trusted in float32: the smallest normal number is 1.2e-38.
_TINY = 1e-30
_LIFT = 2.0**63  # brings the squares of smaller numbers into the range
_ZERO: list = []


@tf.custom_gradient
def tap(tensor, port):
    """Returns `tensor`. Its gradient passes through and is also sent to `port`, which has the same shape."""

    def gradient(upstream):
        return upstream, upstream

    return tf.identity(tensor), gradient


def stack_norms(tensors, dtype=tf.float32):
    """[len(tensors)]: the norm of each tensor. Squares of tiny and of huge numbers do not leave the range of
    float32.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    is_large = [(tensor.shape.num_elements() or 0) > _SMALL for tensor in tensors]
    large = iter(_large_energies([tensor for tensor, big in zip(tensors, is_large, strict=True) if big]))
    energies = [next(large) if big else _energy(tensor) for tensor, big in zip(tensors, is_large, strict=True)]
    return tf.cast(tf.sqrt(2.0 * tf.stack(energies)), dtype)


def _energy(tensor):
    return tf.nn.l2_loss(tf.cast(tensor, tf.float64))


def _large_energies(tensors):
    if not tensors:
        return []
    quick = tf.stack([tf.nn.l2_loss(tf.cast(tensor, tf.float32)) for tensor in tensors])
    trusted = tf.reduce_min(quick) > _TINY
    energies = tf.cond(
        trusted,
        lambda: tf.cast(quick, tf.float64),
        lambda: tf.stack([_energy(tensor) for tensor in tensors]),
    )
    return tf.unstack(energies, num=len(tensors))


def row_norms(tensor, axis):
    """The norm over all axes from `axis` on, in float32, of squares taken in float64."""
    return tf.cast(tf.sqrt(_row_squares64(tensor, axis)), tf.float32)


def row_squares(tensor, axis):
    """Sums of squares over all axes from `axis` on, in float64. For large tensors, outside of loops."""
    if tensor.dtype.size != 4 or axis == tensor.shape.rank or internals.in_xla():
        return _row_squares64(tensor, axis)  # XLA fuses the cast
    axes = list(range(axis, tensor.shape.rank))
    quick = tf.math.reduce_euclidean_norm(tensor, axis=axes)
    small = quick < _TINY**0.5

    def lifted():
        larger = tf.math.reduce_euclidean_norm(tensor * _LIFT, axis=axes)
        return tf.where(small, tf.cast(larger, tf.float64) / _LIFT, tf.cast(quick, tf.float64))

    return tf.square(tf.cond(tf.reduce_any(small), lifted, lambda: tf.cast(quick, tf.float64)))


def row_zeros(tensor, axis):
    """Number of exact zeros over all axes from `axis` on, in float32. For large tensors, outside of loops."""
    axes = list(range(axis, tensor.shape.rank))
    zero = tf.equal(tensor, 0)

    def count():
        return tf.reduce_sum(tf.cast(zero, tf.float32), axis=axes)

    if internals.in_xla():
        return count()
    # As a rule there is none, and that is cheaper to find out.
    return tf.cond(tf.reduce_any(zero), count, lambda: tf.zeros(tf.shape(tensor)[:axis]))


def _row_squares64(tensor, axis):
    squares = tf.square(tf.cast(tensor, tf.float64))
    return tf.reduce_sum(squares, axis=list(range(axis, tensor.shape.rank)))


def watched_zero():
    """A variable, because tapes watch variables by themselves. It is never assigned."""
    if not _ZERO:
        # In a thread of its own, where no `tf.function` is being traced and no strategy is in force: a
        # function may create variables only in its first trace.
        thread = threading.Thread(target=lambda: _ZERO.append(tf.Variable(0.0, name="probe_root")))
        thread.start()
        thread.join()
    return _ZERO[0]
