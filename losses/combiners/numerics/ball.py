"""Finds the best direction for the worst-off loss within a ball, which is CAGrad's problem."""

import tensorflow as tf

from looptape.losses.combiners.numerics.complementarity import RIDGE, exchange, masked_solve, start


def worst_off(cosines, inner, inverse_norms, radius, alive):
    """Finds the d in a ball that maximises min_i g_i.d. Returns (y [K], the minimum t); d = centre + sum_i y_i u_i.

    For a given t, the shortest way from the centre to the points with all g_i.d >= t is a complementarity problem in y.
    Its length is convex and increasing in t, so Newton's method from above needs no bracket. The search ends when the y
    of the current pivots, at the t where its length is `radius`, satisfies all conditions. y is never NaN; its true
    length is below the radius if the origin is in the hull of the gradients.

    Args:
        cosines: [K, K] float64 of the unit gradients u.
        inner: [K] u_i.centre; the centre has length 1.
        inverse_norms: [K] 1 / |g_i|, the largest of them 1.
        radius: of the ball, above 0.
        alive: [K] bool; other entries are ignored.
    """
    count = cosines.shape[0]
    sides = tf.stack([inverse_norms, -inner], axis=-1)[None]

    def at(level, basis):
        """Returns y, and the entries that violate a condition, as pivots or not."""
        y = level * basis[:, 0] + basis[:, 1]
        slack = tf.linalg.matvec(cosines, y) + RIDGE * y - level * inverse_norms + inner
        size = tf.reduce_max(tf.abs(y))
        return y, y < -1e-13 * size, (slack < -1e-15 * count * (1.0 + radius + size)) & alive

    def body(pivots, chosen, level, *_):
        basis = masked_solve(cosines, sides, chosen)[0]
        root, exists = level_of(cosines, basis, radius, RIDGE)
        _, negative, short = at(root, basis)
        done = ~tf.reduce_any(tf.where(chosen[0], negative, short)) & exists
        y, negative, short = at(level, basis)
        bad = tf.where(chosen[0], negative, short)[None]
        after, changed, going = exchange(pivots, chosen, bad)
        length = tf.sqrt(quadratic(cosines, y, y, RIDGE))
        slope = tf.math.divide_no_nan(tf.tensordot(inverse_norms, y, 1), length)
        lower = level - tf.math.divide_no_nan(length - radius, slope)
        going = going[0]
        moved = going | (lower < level - 1e-15 * tf.abs(level))
        level = tf.where(done, root, tf.where(going, level, lower))
        # Solved for this t: the pivots stay, and the count of violations begins anew.
        after = tuple(tf.where(going, new, fresh) for new, fresh in zip(after, start(inner[None]), strict=True))
        return after, tf.where(done, chosen, changed), level, basis, ~done & moved

    level = tf.constant(1.0, tf.float64) + radius
    loop = (start(inner[None]), alive[None], level, tf.zeros_like(sides[0]), tf.reduce_any(alive))
    limit = 100 + 20 * count
    _, chosen, level, basis, _ = tf.while_loop(lambda *state: state[-1], body, loop, maximum_iterations=limit)
    return refined(cosines, sides, chosen, radius, level, basis[None])


def quadratic(matrix, left, right, ridge=0.0):
    """left.(matrix + ridge).right."""
    return tf.tensordot(left, tf.linalg.matvec(matrix, right) + ridge * right, 1)


def level_of(matrix, basis, radius, ridge):
    """Returns the larger t for which t basis_0 + basis_1 has the length `radius`, and whether one exists."""
    first, second = basis[:, 0], basis[:, 1]
    a, b, c = (quadratic(matrix, x, y, ridge) for x, y in ((first, first), (first, second), (second, second)))
    discriminant = b * b - a * (c - radius * radius)
    usable = (discriminant >= 0) & (a > 0)
    root = (tf.sqrt(tf.where(usable, discriminant, 0.0)) - b) / tf.where(usable, a, 1.0)
    return root, usable


def refined(matrix, sides, chosen, radius, level, basis):
    """Returns y and t for the chosen entries without the ridge, unless an entry becomes negative."""
    y = tf.maximum(level * basis[0, :, 0] + basis[0, :, 1], 0.0)
    rest = tf.where(chosen[:, :, None], sides - tf.matmul(matrix, basis), 0.0)
    basis += masked_solve(matrix, rest, chosen)
    better, exists = level_of(matrix, basis[0], radius, 0.0)
    moved = better * basis[0, :, 0] + basis[0, :, 1]
    fine = exists & tf.reduce_all(moved >= -1e-13 * tf.reduce_max(tf.abs(moved)))
    fine &= tf.abs(better - level) <= 1e-3 * tf.abs(level)
    return tf.where(fine, tf.maximum(moved, 0.0), y), tf.where(fine, better, level)
