"""Solves the linear complementarity problem, the form of every quadratic programme in non-negative weights.

Block principal pivoting (Júdice and Pires 1994): in each round, all entries that violate a condition change sides at
once, and one masked system is solved. If that makes no progress, entries change one at a time, which always ends. A few
rounds are enough, where an active-set method takes one per loss. All shapes are static, as XLA requires.
"""

import tensorflow as tf

RIDGE = 1e-14  # on a diagonal of 1: above the rounding of a Gramian, and taken out again by `refined`
PATIENCE = 3  # rounds of block pivots without progress before single ones


def complementary(matrix, linear, allowed):
    """Returns [B, K] x >= 0 that minimises x.M.x / 2 + linear.x: M x + linear >= 0, and one of the two is 0.

    Args:
        matrix: [K, K] float64, positive semi-definite, its diagonal around 1 (0 where not allowed).
        linear: [B, K] float64.
        allowed: [K] bool; other entries of x are 0.

    >>> square = tf.constant([[1.0, -0.5], [-0.5, 1.0]], tf.float64)
    >>> complementary(square, tf.constant([[-1.0, 1.0], [-2.0, 1.0]], tf.float64), tf.constant([True, True])).numpy()
    array([[1., 0.],
           [2., 0.]])
    """
    count = matrix.shape[0]
    violated = (linear < 0) & allowed  # at 0
    size = tf.reduce_max(tf.abs(linear), axis=1, keepdims=True)

    def body(pivots, chosen, *_):
        solution = masked_solve(matrix, -linear[..., None], chosen)[..., 0]
        slack = tf.matmul(solution, matrix) + RIDGE * solution + linear
        length = tf.reduce_max(tf.abs(solution), axis=1, keepdims=True)
        negative = solution < -1e-13 * length
        short = (slack < -1e-15 * count * (size + length)) & allowed
        pivots, changed, going = exchange(pivots, chosen, tf.where(chosen, negative, short))
        return pivots, changed, solution, tf.reduce_any(going)

    loop = (start(linear), violated, tf.zeros_like(linear), tf.constant(True))
    _, chosen, solution, _ = tf.while_loop(lambda *state: state[-1], body, loop, maximum_iterations=50 + 10 * count)
    return refined(matrix, linear, chosen, tf.maximum(solution, 0.0))


def start(linear):
    """Returns the number of violations to beat and the remaining patience, for each problem."""
    shape = tf.shape(linear)
    return tf.fill(shape[:1], shape[1] + 1), tf.fill(shape[:1], PATIENCE)


def exchange(pivots, chosen, bad):
    """Runs one round of pivots. Returns (counts, new chosen entries, [B] whether anything changed)."""
    least, patience = pivots
    number = tf.reduce_sum(tf.cast(bad, tf.int32), axis=1)
    better = number < least
    patience = tf.where(better, PATIENCE, patience - 1)
    # The last violation alone: the cumulative sum from the right is 1 only there.
    order = tf.cumsum(tf.cast(bad, tf.int32), axis=1, reverse=True)
    change = bad & ((patience >= 0)[:, None] | (order == 1))
    return (tf.minimum(number, least), patience), chosen ^ change, number > 0


def masked_solve(matrix, sides, chosen):
    """Returns [B, K, r] solutions of the system of the chosen rows and columns, 0 elsewhere. `sides` [B or 1, K, r]."""
    unit = tf.eye(matrix.shape[0], dtype=tf.float64)
    both = chosen[:, :, None] & chosen[:, None, :]
    return tf.linalg.solve(tf.where(both, matrix + RIDGE * unit, unit), tf.where(chosen[:, :, None], sides, 0.0))


def refined(matrix, linear, chosen, solution):
    """Removes the effect of the ridge for the chosen entries by one proximal step, unless an entry becomes negative.

    If gradients oppose each other within an angle of 1e-4, the error is 1e-6 with the ridge and 1e-12 after the step.
    """
    rest = -linear - tf.matmul(solution, matrix)
    moved = solution + masked_solve(matrix, rest[..., None], chosen)[..., 0]
    length = tf.reduce_max(tf.abs(moved), axis=1, keepdims=True)
    fine = tf.reduce_all(moved >= -1e-13 * length, axis=1, keepdims=True)
    return tf.where(fine, tf.maximum(moved, 0.0), solution)
