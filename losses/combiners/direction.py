"""Combiners that change the direction of the update, from the Gramian of the per-loss gradients alone."""

import tensorflow as tf

from losses.combiners.base import Combiner
from losses.combiners.gramian import directions
from losses.combiners.random import permutations
from losses.combiners.simplex import simplex_minimum
from losses.function import require, whole

RESCALES = (None, "square", "linear")


class DirectionCombiner(Combiner):
    """Needs the gradients of every loss in every update, of shared variables or a shared feature tensor.

    The only guards are `warmup_steps` (a plain sum until then) and `freeze` (the last coefficients are held).
    A loss that is absent does not take part.
    """

    needs = "gradients"
    minimum_losses = 2

    def __init__(self, warmup_steps=0):
        super().__init__(warmup_steps=warmup_steps)


class PCGrad(DirectionCombiner):
    """Gradient surgery (Yu 2020): gradients lose their projections on those they conflict with; the sum.

    The order in which a gradient meets the others is random, a pure function of `seed` and the update
    counter.

    >>> combiner = PCGrad()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]])).numpy().round(4)
    array([2.2222, 1.5789], dtype=float32)
    """

    name = "pcgrad"

    def __init__(self, seed=0, warmup_steps=0):
        super().__init__(warmup_steps)
        self.seed = whole("seed", seed, 0, "Any non-negative integer will do.")

    def propose(self, losses, present, measured):
        return pcgrad(measured, permutations(self.seed, self.updates, len(self.names)), present)


def pcgrad(matrix, orders, present):
    """Coefficients of the sum of the projected gradients.

    `orders` [K, K]: row i is the order in which gradient i meets the others. Works in unit gradients:
    `rows[i]` holds gradient i / its norm in terms of all of them.
    """
    norms, cosines, alive = directions(matrix, present)
    count = matrix.shape[0]
    rows = tf.eye(count)
    for turn in range(count):
        other = tf.one_hot(orders[:, turn], count)
        overlap = tf.reduce_sum(tf.matmul(rows, cosines) * other, axis=1)
        conflict = (overlap < 0) & (orders[:, turn] != tf.range(count))
        rows -= tf.where(conflict, overlap, 0.0)[:, None] * other
    sums = tf.reduce_sum(tf.where(alive, norms, 0.0)[:, None] * rows, axis=0)
    return tf.where(alive, sums / norms, 1.0)


class MGDA(DirectionCombiner):
    """Multiple gradient descent (Désidéri 2012, Sener 2018): the shortest vector of the convex hull.

    It increases no loss to first order. The weights sum to 1, and a loss whose gradient is 0 takes all of
    it: the point is then Pareto-stationary and the update 0.

    >>> combiner = MGDA()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]])).numpy().round(4)
    array([0.6, 0.4], dtype=float32)
    """

    name = "mgda"

    def propose(self, losses, present, measured):
        return mgda(measured, present)


def mgda(matrix, present):
    """Weights on the simplex that minimise the norm of the combined gradient."""
    norms, cosines, alive = directions(matrix, present)
    scaled = norms[:, None] * cosines * norms[None, :]
    shortest = simplex_minimum(scaled, tf.zeros_like(norms), 1.0, alive)
    still = tf.cast(present & ~alive, tf.float32)  # losses without gradient: their corner is the minimum
    count = tf.reduce_sum(still)
    return tf.where(count > 0, still / tf.maximum(count, 1.0), shortest)


class CAGrad(DirectionCombiner):
    """Conflict-averse gradient (Liu 2021): near the mean gradient, the direction best for the worst-off loss.

    `d = g0 + (c |g0| / |g_w|) g_w` with g0 the mean of the gradients (not the sum). `rescale=None` leaves it
    so; "square" divides by 1 + c^2, the default of the authors' code; "linear" by 1 + c. c = 0 is the mean
    gradient.

    Args:
        c: Radius of the neighbourhood relative to `|g0|`, in [0, 1) for the paper's guarantee.
        rescale: None, "square" or "linear".

    >>> combiner = CAGrad()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]])).numpy().round(4)
    array([0.7041, 0.5   ], dtype=float32)
    """

    name = "cagrad"

    def __init__(self, c=0.5, rescale=None, warmup_steps=0):
        super().__init__(warmup_steps)
        require(
            c >= 0,
            f"`c` is {c}",
            "at least 0",
            "The paper's is 0.5; below 1 it converges to a minimum of the mean.",
        )
        require(rescale in RESCALES, f"`rescale` is {rescale!r}", f"one of {list(RESCALES)}", "Choose one.")
        self.c = c
        self.rescale = rescale

    def propose(self, losses, present, measured):
        divisor = {None: 1.0, "square": 1.0 + self.c**2, "linear": 1.0 + self.c}[self.rescale]
        return cagrad(measured, self.c, present) / divisor


def cagrad(matrix, c, present):
    """Coefficients of `g0 + (c |g0| / |g_w|) g_w`; of g0 alone where g_w vanishes."""
    norms, cosines, alive = directions(matrix, present)
    scaled = norms[:, None] * cosines * norms[None, :]
    mask = tf.cast(present, tf.float32)
    mean = tf.math.divide_no_nan(mask, tf.reduce_sum(mask))
    inner = tf.linalg.matvec(scaled, mean)
    radius = c * tf.sqrt(tf.maximum(tf.tensordot(mean, inner, 1), 0.0))
    weights = simplex_minimum(scaled, inner, radius, alive)
    square = tf.tensordot(weights, tf.linalg.matvec(scaled, weights), 1)
    # Where the terms cancel to rounding, g_w has no direction.
    real = square > 1e-6 * tf.square(tf.tensordot(weights, norms, 1))
    # The corner of a loss without gradient is worth 0: better than any sum above it.
    value = tf.tensordot(inner, weights, 1) + radius * tf.sqrt(tf.maximum(square, 0.0))
    real &= (value < 0) | ~tf.reduce_any(present & ~alive)
    return mean + tf.where(real, radius / tf.sqrt(tf.where(real, square, 1.0)), 0.0) * weights


class ConFIG(DirectionCombiner):
    """Conflict-free inverse gradients (Liu 2024): equal angles to all gradients, as long as all projections.

    d = (sum g_i.u) u, with u the normalised U^+ 1 over the unit gradients U. Where the gradients oppose
    each other to rounding there is no such direction; u is then that of their sum, which makes d the plain
    sum. A loss without gradient does not take part.

    >>> combiner = ConFIG()
    >>> combiner.build(["error", "penalty"])
    >>> weights = combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]]))
    >>> tf.linalg.matvec(tf.constant([[-4.0, 6.0], [1.0, 1.0], [1.0, 1.0]]), weights).numpy().round(4)
    array([0.1588, 2.0706, 2.0706], dtype=float32)
    """

    name = "config"

    def propose(self, losses, present, measured):
        return config(measured, present)


def config(matrix, present):
    """Coefficients of (sum g_i.u) u, by the pseudo-inverse of the matrix of cosines."""
    norms, cosines, alive = directions(matrix, present)
    values, vectors = tf.linalg.eigh(cosines)
    kept = values > 1e-6 * matrix.shape[0] * tf.reduce_max(values)
    inverse = tf.where(kept, 1.0 / tf.where(kept, values, 1.0), 0.0)
    ones = tf.cast(alive, tf.float32)
    solution = tf.linalg.matvec(vectors, inverse * tf.linalg.matvec(vectors, ones, transpose_a=True))
    product = tf.linalg.matvec(cosines, solution)
    length = tf.reduce_sum(tf.where(alive, norms, 0.0) * product)
    square = tf.tensordot(solution, product, 1)
    exists = square > 1e-6
    return tf.where(alive & exists, length / tf.where(exists, square, 1.0) * solution / norms, 1.0)
