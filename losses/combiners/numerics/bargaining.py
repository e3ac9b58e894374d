"""Solves matrix y = sizes y^(-1/alpha) by damped Newton steps: with these weights every loss gains the same share."""

import tensorflow as tf

from looptape.losses.combiners.numerics.complementarity import RIDGE

ITERATIONS = 250
LONGEST = 3.0  # rise of log y in one step
LEAST = 1e-12  # square of the shortest vector in the hull of the unit gradients, below which they oppose each other
FLOOR = -500.0  # of log y
BACKWARD = 1e-8  # largest backward error of a solution


def equal_shares(matrix, log_sizes, alpha, alive):
    """Returns [K] y > 0 with (matrix y)_i = sizes_i y_i^(-1/alpha), and whether it exists.

    It is the only minimum of a convex function. With alpha 1 and equal sizes Newton's method finds it in five to
    fifteen steps, or a convex combination of the gradients that vanishes: then there is none for any alpha. For other
    alphas and sizes the search starts from there, in log y, since y may span hundreds of powers of ten. If it does
    not end, y is the solution for alpha 1, with which every loss gains, too.

    The equation holds up to the rounding of sum_j |matrix_ij| y_j.

    Args:
        matrix: [K, K] float64, the cosines of the gradients.
        log_sizes: [K] float64 logarithms of the sizes; None for equal sizes.
        alpha: number above 0.
        alive: [K] bool; other entries are ignored.

    >>> square = tf.constant([[1.0, -0.5], [-0.5, 1.0]], tf.float64)
    >>> equal_shares(square, None, 1.0, tf.constant([True, True]))[0].numpy().round(5)
    array([1.41421, 1.41421])
    """
    unit = tf.eye(matrix.shape[0], dtype=tf.float64)
    matrix = tf.where(alive[:, None] & alive[None, :], matrix, unit)
    equal = tf.zeros([matrix.shape[0]], tf.float64)
    first, exists = newton(matrix, equal, 1.0, equal, alive, additive=True)
    if log_sizes is None and alpha == 1:
        return tf.exp(first), exists
    log_sizes = equal if log_sizes is None else tf.where(alive, log_sizes, 0.0)
    second, found = newton(matrix, log_sizes, alpha, first, alive & exists)
    return tf.exp(tf.where(found, second, first)), exists


def newton(matrix, log_sizes, alpha, begin, alive, additive=False):
    """Returns [K] log y, from `begin` on, and whether it solves the equation.

    Steps that are additive in y run away quickly where there is no solution; others are additive in log y.
    """
    count = matrix.shape[0]
    ridge = RIDGE * tf.eye(count, dtype=tf.float64)
    fall = LONGEST * max(alpha, 1.0)  # a y that falls changes its own y^(-1/alpha) alone

    def errors(y, shares):
        gained, size = tf.linalg.matvec(matrix, y), tf.linalg.matvec(tf.abs(matrix), y) + shares
        return tf.abs(gained - shares) / size

    def vanishes(y):
        y = tf.where(alive, y, 0.0)
        return tf.tensordot(y, tf.linalg.matvec(matrix, y), 1) < LEAST * tf.square(tf.reduce_sum(y))

    def body(logs, left):
        y, shares = tf.exp(logs), tf.exp(log_sizes - logs / alpha)
        # The last steps do without the ridge.
        slope = shares - tf.linalg.matvec(tf.where(left < 3, matrix, matrix + ridge), y)
        curvature = matrix + ridge + tf.linalg.diag(shares / (alpha * y))
        # Scaled to a diagonal of 1: sizes may differ by many powers of ten.
        scale = 1.0 / tf.sqrt(tf.linalg.diag_part(curvature))
        scaled = curvature * scale[:, None] * scale[None, :]
        move = scale * tf.linalg.solve(scaled, (scale * slope)[:, None])[:, 0] / y
        move = tf.where((logs <= FLOOR) & (move < 0), tf.zeros_like(move), move)
        up, down = tf.reduce_max(move), tf.reduce_max(-move)
        change = move / tf.maximum(tf.maximum(up / LONGEST, down / fall), 1.0)
        if additive:
            change = tf.math.log1p(tf.maximum(change, -0.95))
        near = (tf.maximum(up, down) < 1e-3) | (tf.reduce_max(errors(y, shares)) < 1e-15 * count)
        left = tf.where(near, left - 1, left)
        return tf.maximum(logs + change, FLOOR), tf.where(vanishes(y), 0, left)

    loop = (begin, tf.where(tf.reduce_any(alive), 3, 0))
    logs, _ = tf.while_loop(lambda _, left: left > 0, body, loop, maximum_iterations=ITERATIONS)
    y = tf.exp(logs)
    met = (errors(y, tf.exp(log_sizes - logs / alpha)) < BACKWARD) | (logs <= FLOOR)
    return logs, tf.reduce_all(met | ~alive) & ~vanishes(y)
