"""Inner products of per-loss gradients in float64, the only input of the direction methods."""

from typing import Any, NamedTuple

import tensorflow as tf


def gramian(gradients):
    """The [K, K] float64 matrix of inner products of K lists of gradients.

    `gradients[k][v]` is the gradient of loss k for variable v: a dense tensor, `tf.IndexedSlices` (made
    dense), or None where the loss does not reach the variable. Float64 holds the squares of every float32
    number, and angles down to 1e-7. Pure, traced or eager.

    >>> rows = [[tf.constant([-4.0, 1.0, 1.0])], [tf.constant([6.0, 1.0, 1.0])]]
    >>> gramian(rows).numpy().tolist()
    [[18.0, -22.0], [-22.0, 38.0]]
    """
    count = len(gradients)
    total = tf.zeros([count, count], tf.float64)
    for column in zip(*gradients, strict=True):
        flat = [None if g is None else tf.reshape(dense(g), [-1]) for g in column]
        example = next((g for g in flat if g is not None), None)
        if example is None:
            continue
        total += products(tf.stack([tf.zeros_like(example) if g is None else g for g in flat]))
    return total


def products(rows):
    """[K, K] float64 inner products of the rows of a [K, n] tensor."""
    rows = tf.cast(rows, tf.float64)
    return tf.matmul(rows, rows, transpose_b=True)


def dense(gradient):
    """A float32 tensor from a dense or sparse gradient."""
    return tf.cast(tf.convert_to_tensor(gradient), tf.float32)


class Directions(NamedTuple):
    """Norms and cosines of K gradients from their Gramian, in float64."""

    norms: Any  # [K], divided by `largest`; 1 for the dead
    cosines: Any  # [K, K]; rows and columns of the dead are 0
    alive: Any  # [K] bool: present, with a gradient that is not 0
    largest: Any  # the largest norm; 1 if all are dead


def directions(matrix, present):
    """Makes `Directions` from a Gramian. A loss that is absent or has no gradient is not alive.

    All methods use unit gradients and relative norms, so the scale of the gradients does not matter. A Gramian that
    is not finite is replaced by the unit matrix, so that no factorization sees a NaN; the finite check skips such an
    update anyway.

    >>> norms, cosines, alive, _ = directions(tf.constant([[4.0, 0.0], [0.0, 0.0]]), tf.constant([True, True]))
    >>> norms.numpy().tolist(), cosines.numpy().tolist(), alive.numpy().tolist()
    ([1.0, 1.0], [[1.0, 0.0], [0.0, 0.0]], [True, False])
    """
    matrix = tf.cast(matrix, tf.float64)
    matrix = tf.where(present[:, None] & present[None, :], matrix, 0.0)
    finite = tf.reduce_all(tf.math.is_finite(matrix))
    matrix = tf.where(finite, matrix, tf.eye(matrix.shape[0], dtype=tf.float64))
    squares = tf.linalg.diag_part(matrix)
    alive = (squares > 0) & present
    norms = tf.sqrt(tf.where(alive, squares, 1.0))
    both = alive[:, None] & alive[None, :]
    cosines = tf.where(both, matrix / norms[:, None] / norms[None, :], 0.0)
    cosines = tf.linalg.set_diag(tf.clip_by_value(cosines, -1.0, 1.0), tf.cast(alive, tf.float64))
    largest = tf.reduce_max(tf.where(alive, norms, 0.0))
    largest = tf.where(largest > 0, largest, 1.0)
    return Directions(tf.where(alive, norms / largest, 1.0), cosines, alive, largest)


def mean_weights(present):
    """[K] float64: 1 / (number of present losses) for these, 0 for the others."""
    mask = tf.cast(present, tf.float64)
    return tf.math.divide_no_nan(mask, tf.reduce_sum(mask))
