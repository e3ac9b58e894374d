"""One small convex problem on the simplex, which both MGDA and CAGrad are."""

import tensorflow as tf

TOLERANCE = 1e-6
ITERATIONS = 200


def simplex_minimum(matrix, linear, radius, allowed, iterations=ITERATIONS):
    """[K] weights w >= 0, sum 1, that minimise linear.w + radius * sqrt(w.matrix.w).

    Pairwise Frank-Wolfe: mass moves from the worst weighted entry to the best entry, as far as an exact
    line search says (for two losses that is the closed form). Stops at a relative gap of 1e-6, or after
    `iterations`. Only `allowed` entries get weight. `matrix` is positive semi-definite with a largest
    diagonal entry near 1. Pure; XLA-safe.

    >>> matrix = tf.constant([[18.0, -22.0], [-22.0, 38.0]]) / 38.0
    >>> simplex_minimum(matrix, tf.zeros([2]), 1.0, tf.constant([True, True])).numpy().round(4)
    array([0.6, 0.4], dtype=float32)
    """
    count = matrix.shape[0]
    mask = tf.cast(allowed, tf.float32)
    start = tf.math.divide_no_nan(mask, tf.reduce_sum(mask))

    def body(weights, _):
        product = tf.linalg.matvec(matrix, weights)
        square = tf.maximum(tf.tensordot(weights, product, 1), 0.0)
        slope = linear + radius * tf.math.divide_no_nan(product, tf.sqrt(square))
        best = tf.argmin(tf.where(allowed, slope, float("inf")), output_type=tf.int32)
        worst = tf.argmax(tf.where(allowed & (weights > 0), slope, float("-inf")), output_type=tf.int32)
        move = tf.one_hot(best, count) - tf.one_hot(worst, count)
        moved = tf.linalg.matvec(matrix, move)
        length = line_minimum(
            tf.tensordot(linear, move, 1),
            square,
            tf.tensordot(move, product, 1),
            tf.maximum(tf.tensordot(move, moved, 1), 0.0),
            radius,
            weights[worst],
        )
        gap = slope[worst] - slope[best]
        scale = tf.reduce_max(tf.where(allowed & (weights > 0), tf.abs(slope), 0.0))
        return tf.maximum(weights + length * move, 0.0), (gap > TOLERANCE * scale) & (length > 0)

    weights, _ = tf.while_loop(
        lambda _, going: going, body, (start, tf.reduce_any(allowed)), maximum_iterations=iterations
    )
    return tf.math.divide_no_nan(weights, tf.reduce_sum(weights))


def line_minimum(slope, square, cross, curvature, radius, longest):
    """The t in [0, longest] that minimises slope t + radius sqrt(square + 2 cross t + curvature t^2).

    Given that it falls at t = 0. The closed form is the root of the derivative; where there is none the
    whole way is best.
    """
    excess = radius * radius * curvature - slope * slope
    inner = excess > 0
    determinant = tf.maximum(square * curvature - cross * cross, 0.0)
    root = -slope * tf.sqrt(determinant / tf.where(inner, excess, 1.0))
    step = (root - cross) / tf.where(inner & (curvature > 0), curvature, 1.0)
    return tf.where(inner & (curvature > 0), tf.clip_by_value(step, 0.0, longest), longest)
