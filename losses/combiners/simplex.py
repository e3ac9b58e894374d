"""One small convex problem on the simplex, which both MGDA and CAGrad are."""

import itertools

import numpy as np
import tensorflow as tf

EXACT = 8  # up to so many losses all faces of the simplex are tried; there are 2^K - 1
ROUNDING = 1e-7  # of the matrix, relative to its diagonal
ITERATIONS = 500
SMOOTHING = 1e-6
TOLERANCE = 1e-5


def simplex_minimum(matrix, linear, radius, allowed):
    """[K] weights w >= 0, sum 1, that minimise linear.w + radius * sqrt(w.matrix.w).

    Only `allowed` entries get weight, and their diagonal entries must be above 0. `matrix` is positive semi-
    definite with a largest diagonal entry near 1. Pure; traced, also by XLA. Up to eight losses exact, beyond
    that iterative.

    >>> matrix = tf.constant([[18.0, -22.0], [-22.0, 38.0]]) / 38.0
    >>> simplex_minimum(matrix, tf.zeros([2]), 1.0, tf.constant([True, True])).numpy().round(4)
    array([0.6, 0.4], dtype=float32)
    """
    method = best_face if matrix.shape[0] <= EXACT else pairwise_frank_wolfe
    return method(matrix, linear, tf.convert_to_tensor(radius), allowed)


def best_face(matrix, linear, radius, allowed):
    """Solves the problem on every face of the simplex in closed form, and takes the best inside its face.

    On a face, w = -(Q + n P) / sqrt(D) with P and Q the solutions for right-hand sides 1 and `linear`, n the
    multiplier of sum(w) = 1, and D the discriminant of its quadratic equation. Float64, without loops: for a
    few losses this is quicker than any iteration, and has no accuracy to choose.
    """
    count = matrix.shape[0]
    subsets = np.array(list(itertools.product([False, True], repeat=count))[1:])
    faces, corners = tf.constant(subsets), tf.constant(subsets.sum(1) == 1)
    matrix, linear, radius = (tf.cast(x, tf.float64) for x in (matrix, linear, radius))
    matrix += tf.linalg.diag(ROUNDING * tf.linalg.diag_part(matrix))
    both = faces[:, :, None] & faces[:, None, :]
    sides = tf.where(faces[:, :, None], tf.stack([tf.ones_like(linear), linear], axis=-1), 0.0)
    solved = gauss_jordan(tf.where(both, matrix, tf.eye(count, dtype=tf.float64)), sides)
    ones, tilted = solved[..., 0], solved[..., 1]
    a, b = tf.reduce_sum(ones, 1), tf.linalg.matvec(ones, linear)
    discriminant = b * b - a * (tf.linalg.matvec(tilted, linear) - radius * radius)
    usable = (discriminant > 0) & (a > 0)
    root = tf.sqrt(tf.where(usable, discriminant, 1.0))
    multiplier = -(b + root) / tf.where(usable, a, 1.0)
    inside = -(tilted + multiplier[:, None] * ones) / root[:, None]
    weights = tf.where(corners[:, None], tf.cast(faces, tf.float64), inside)
    feasible = (usable | corners) & tf.reduce_all(weights >= -1e-9, 1) & tf.reduce_all(allowed | ~faces, 1)
    weights = tf.where(feasible[:, None], tf.maximum(weights, 0.0), tf.cast(faces, tf.float64))
    weights /= tf.reduce_sum(weights, 1, keepdims=True)
    square = tf.reduce_sum(weights * tf.matmul(weights, matrix), 1)
    value = tf.linalg.matvec(weights, linear) + radius * tf.sqrt(tf.maximum(square, 0.0))
    best = tf.argmin(tf.where(feasible, value, np.inf))
    # `weights[best]` would make the matrix a compile-time constant of XLA: a compilation per update.
    return tf.where(allowed, tf.cast(tf.gather(weights, best), tf.float32), 0.0)


def gauss_jordan(matrices, sides):
    """Solutions of positive definite systems [n, K, K] with right-hand sides [n, K, r], without pivoting.

    Unlike `tf.linalg.solve` it does not raise where a matrix is singular: that face's solution is then of no
    use, and is not taken.
    """
    for k in range(matrices.shape[1]):
        pivot = matrices[:, k, k]
        pivot = tf.where(tf.abs(pivot) > 1e-300, pivot, 1.0)[:, None]
        row, side = matrices[:, k] / pivot, sides[:, k] / pivot
        others = tf.constant(np.arange(matrices.shape[1]) != k)[None, :, None]
        factor = matrices[:, :, k, None]
        matrices = tf.where(others, matrices - factor * row[:, None], row[:, None])
        sides = tf.where(others, sides - factor * side[:, None], side[:, None])
    return sides


def pairwise_frank_wolfe(matrix, linear, radius, allowed):
    """Moves mass from the worst weighted entry to the best one, by an exact line search, until none gains.

    A constant added to the matrix smooths the root at 0, where the search would otherwise get stuck.
    """
    count = matrix.shape[0]
    matrix = matrix + SMOOTHING
    mask = tf.cast(allowed, tf.float32)
    start = tf.math.divide_no_nan(mask, tf.reduce_sum(mask))

    def body(weights, _):
        product = tf.linalg.matvec(matrix, weights)
        square = tf.tensordot(weights, product, 1)
        slope = linear + radius * product / tf.sqrt(tf.maximum(square, SMOOTHING))
        best = tf.argmin(tf.where(allowed, slope, np.inf), output_type=tf.int32)
        weighted = allowed & (weights > 0)
        worst = tf.argmax(tf.where(weighted, slope, -np.inf), output_type=tf.int32)
        move = tf.one_hot(best, count) - tf.one_hot(worst, count)
        curvature = tf.tensordot(move, tf.linalg.matvec(matrix, move), 1)
        cross = tf.tensordot(move, product, 1)
        tilt, mass = tf.tensordot(linear, move, 1), tf.gather(weights, worst)
        length = line_minimum(tilt, square, cross, curvature, radius, mass)
        going = -tf.tensordot(slope, move, 1) > TOLERANCE * tf.reduce_max(tf.abs(slope))
        return tf.maximum(weights + length * move, 0.0), going & (length > 0)

    begin = (start, tf.reduce_any(allowed))
    weights, _ = tf.while_loop(lambda _, going: going, body, begin, maximum_iterations=ITERATIONS)
    return tf.math.divide_no_nan(weights, tf.reduce_sum(weights))


def line_minimum(slope, square, cross, curvature, radius, longest):
    """The t in [0, longest] that minimises slope t + radius sqrt(square + 2 cross t + curvature t^2).

    Given that it falls at t = 0. Where the derivative has no root, the whole way is best.
    """
    excess = radius * radius * curvature - slope * slope
    inner = (excess > 0) & (curvature > 0)
    determinant = tf.maximum(square * curvature - cross * cross, 0.0)
    root = -slope * tf.sqrt(determinant / tf.where(inner, excess, 1.0))
    step = (root - cross) / tf.where(inner, curvature, 1.0)
    return tf.where(inner, tf.clip_by_value(step, 0.0, longest), longest)
