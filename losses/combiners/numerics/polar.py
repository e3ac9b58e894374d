"""Finds the orthogonal rows nearest to the rows of a matrix, even if the rows differ by many orders of magnitude."""

import numpy as np
import tensorflow as tf

GRADED = 1e-9  # singular values that differ more than this are left to Jacobi's method
SWEEPS = 30


def sum_of_aligned(rows, weights, rank, scale):
    """Returns [K] weights.(s U V): the weighted sum of the rows after all singular values of U S V are set to s.

    The error of a singular value decomposition is relative to the largest value. One-sided Jacobi rotations are
    accurate for each value, but slower; they run if the values differ by nine orders of magnitude.

    Args:
        rows: [K, K] float64.
        weights: [K] weights of the rows.
        rank: int32 scalar; smaller singular values count as 0.
        scale: function of the singular values in descending order, a mask and the rank; returns s.
    """
    count = rows.shape[0]
    order = tf.argsort(tf.reduce_sum(tf.square(rows), 1), direction="DESCENDING")
    rows, weights = tf.gather(rows, order), tf.gather(weights, order)
    singular, left, right = tf.linalg.svd(rows)
    kept = tf.range(count) < rank
    least = tf.reduce_min(tf.where(kept, singular, float("inf")))

    def by_svd():
        parts = tf.linalg.matvec(left, weights, transpose_a=True)
        return tf.linalg.matvec(right, tf.where(kept, scale(singular, kept, rank) * parts, 0.0))

    def by_jacobi():
        turned, parts = orthogonal_rows(rows, weights)
        lengths = tf.linalg.norm(turned, axis=1)
        places = tf.argsort(lengths, direction="DESCENDING")
        turned, parts, lengths = (tf.gather(x, places)[:count] for x in (turned, parts, lengths))
        factors = scale(lengths, kept, rank) * parts / tf.where(lengths > 0, lengths, 1.0)
        return tf.linalg.matvec(turned, tf.where(kept, factors, 0.0), transpose_a=True)

    return tf.cond(least > GRADED * singular[0], by_svd, by_jacobi)


def orthogonal_rows(rows, weights):
    """Rotates the rows until they are orthogonal, and the weights with them. Both have an even number of rows.

    One-sided Jacobi: each round rotates half as many pairs as there are rows at once; then rows change partners as in
    a round-robin tournament.
    """
    count, columns = rows.shape
    half = (count + 1) // 2
    table = tf.concat([rows, weights[:, None]], axis=1)
    table = tf.pad(table, [[0, 2 * half - count], [0, 0]])
    seats = np.arange(2 * half)  # the first stays; the others move by one, around the table
    circle = np.concatenate([np.arange(1, half), np.arange(2 * half - 1, half - 1, -1)])
    moved = seats.copy()
    moved[circle] = np.roll(circle, 1)
    rounds = max(2 * half - 1, 1)

    def body(index, table, largest, _):
        first, second = table[:half], table[half:]
        squares = (tf.reduce_sum(tf.square(x[:, :columns]), 1) for x in (first, second))
        a, b = squares
        c = tf.reduce_sum(first[:, :columns] * second[:, :columns], 1)
        size = tf.sqrt(a) * tf.sqrt(b)
        share = tf.math.divide_no_nan(tf.abs(c), size)
        turning = share > 1e-16
        ratio = (b - a) / tf.where(turning, 2.0 * c, 1.0)
        sign = tf.where(ratio < 0, -tf.ones_like(ratio), tf.ones_like(ratio))
        tangent = tf.where(turning, sign / (tf.abs(ratio) + tf.sqrt(1.0 + ratio * ratio)), 0.0)
        cosine = (1.0 / tf.sqrt(1.0 + tangent * tangent))[:, None]
        sine = cosine * tangent[:, None]
        table = tf.concat([cosine * first - sine * second, sine * first + cosine * second], axis=0)
        largest = tf.maximum(largest, tf.reduce_max(share))
        ends = tf.equal(index % rounds, rounds - 1)
        going = ~ends | (largest > 1e-15)
        return index + 1, tf.gather(table, moved), tf.where(ends, tf.zeros_like(largest), largest), going

    loop = (tf.constant(0), table, tf.constant(0.0, tf.float64), tf.constant(True))
    _, table, _, _ = tf.while_loop(lambda *state: state[-1], body, loop, maximum_iterations=SWEEPS * rounds)
    return table[:, :columns], table[:, columns]
