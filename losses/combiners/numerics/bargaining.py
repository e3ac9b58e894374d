"""Solves matrix w = w^(-1/alpha) by a damped Newton method: with these weights every loss gains the same share."""

import numpy as np
import tensorflow as tf

from looptape.losses.combiners.numerics.complementarity import RIDGE

ITERATIONS = 200
STEPS = 0.5 ** np.arange(12)  # tried at once
NEAR = 1e-8  # of the Newton decrement, relative to what is shared: from there on whole steps, five


def equal_shares(matrix, sizes, alpha, alive):
    """Returns [K] y > 0 with (matrix y)_i = sizes_i y_i^(-1/alpha), the only minimum of a convex function.

    That function is y.matrix.y / 2 - sum sizes y^(1 - 1/alpha) / (1 - 1/alpha), with a logarithm for alpha 1. It has no
    minimum if a positive combination of the gradients vanishes; the ridge then stops y at about 1e7.

    >>> square = tf.constant([[1.0, -0.5], [-0.5, 1.0]], tf.float64)
    >>> both = tf.constant([True, True])
    >>> equal_shares(square, tf.ones([2], tf.float64), 1.0, both).numpy().round(5)
    array([1.41421, 1.41421])
    """
    unit = tf.eye(matrix.shape[0], dtype=tf.float64)
    exact = tf.where(alive[:, None] & alive[None, :], matrix, unit)
    matrix = exact + RIDGE * unit
    sizes = tf.where(alive, sizes, 1.0)
    steps = tf.constant(STEPS)[:, None]
    power = 1.0 - 1.0 / alpha

    def objective(y):
        gain = tf.math.log(y) if power == 0 else tf.pow(y, tf.constant(power, tf.float64)) / power
        return 0.5 * tf.reduce_sum(y * tf.matmul(y, matrix), 1) - tf.reduce_sum(sizes * gain, 1)

    def body(y, left):
        shares = sizes * tf.pow(y, tf.constant(-1.0 / alpha, tf.float64))
        # The last steps do without the ridge.
        slope = tf.linalg.matvec(tf.where(left < 5, exact, matrix), y) - shares
        curvature = matrix + tf.linalg.diag(shares / (alpha * y))
        # Scaled to a diagonal of 1: sizes may differ by many powers of ten.
        scale = 1.0 / tf.sqrt(tf.linalg.diag_part(curvature))
        scaled = curvature * scale[:, None] * scale[None, :]
        move = -scale * tf.linalg.solve(scaled, (scale * slope)[:, None])[:, 0]
        decrement = -tf.tensordot(slope, move, 1)
        # At most to a tenth of the way to the boundary, where the objective is infinite.
        longest = 0.9 / tf.maximum(tf.reduce_max(-move / y), 0.9)
        candidates = y + longest * steps * move
        near = decrement <= NEAR * tf.tensordot(shares, y, 1)
        best = tf.where(near, tf.constant(0, tf.int64), tf.argmin(objective(candidates)))
        return tf.gather(candidates, best), tf.where(near, left - 1, left)

    begin = tf.pow(sizes, tf.constant(alpha / (1.0 + alpha), tf.float64))
    y, _ = tf.while_loop(lambda _, left: left > 0, body, (begin, tf.constant(5)), maximum_iterations=ITERATIONS)
    return y
