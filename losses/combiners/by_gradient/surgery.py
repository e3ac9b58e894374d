"""Combiners that rotate each gradient away from those it conflicts with: PCGrad and GradVac."""

import tensorflow as tf

from looptape.losses.combiners.by_gradient.direction import DirectionCombiner
from looptape.losses.combiners.numerics.gramian import directions
from looptape.losses.combiners.numerics.random import permutations
from looptape.losses.convention import require, whole

NEAREST = 1.0 - 1e-6  # a wanted cosine of 1 would be an infinite correction


class PCGrad(DirectionCombiner):
    """Gradient surgery (Yu 2020): removes from each gradient its projection onto those it conflicts with, and sums.

    Each gradient meets the others in a random order, which depends only on `seed` and the update counter.

    >>> combiner = PCGrad()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]])).numpy().round(4)
    array([2.2222, 1.5789])
    """

    name = "pcgrad"

    def __init__(self, seed=0, **guards):
        super().__init__(**guards)
        self.seed = whole("seed", seed, 0, "Any non-negative integer will do.")

    def propose(self, losses, present, measured):
        return pcgrad(measured, permutations(self.seed, self.updates, len(self.names)), present)


def pcgrad(matrix, orders, present):
    """Returns the [K] float64 coefficients of the sum of the projected gradients.

    `orders` [K, K]: row i is the order in which gradient i meets the others. Works in unit gradients:
    `rows[i]` holds gradient i / its norm in terms of all of them.
    """
    norms, cosines, alive, _ = directions(matrix, present)
    count = matrix.shape[0]
    rows = tf.eye(count, dtype=tf.float64)
    for turn in range(count):
        other = tf.one_hot(orders[:, turn], count, dtype=tf.float64)
        overlap = tf.reduce_sum(tf.matmul(rows, cosines) * other, axis=1)
        conflict = (overlap < 0) & (orders[:, turn] != tf.range(count))
        rows -= tf.where(conflict, overlap, 0.0)[:, None] * other
    return summed(rows, norms, alive)


def summed(rows, norms, alive):
    """Returns the coefficients of the sum of the rotated gradients; 1 for a loss without a gradient."""
    sums = tf.reduce_sum(tf.where(alive, norms, 0.0)[:, None] * rows, axis=0)
    return tf.where(alive, sums / norms, 1.0)


class GradVac(DirectionCombiner):
    """Gradient vaccine (Wang 2021): like PCGrad, but aims for the usual cosine between two losses.

    It rotates a gradient towards another one until their cosine equals the moving average of the cosines seen so far,
    which starts at 0. The orders are random, as in PCGrad.

    Args:
        beta: Share of a new cosine in the average, in (0, 1].
        seed: Seed of the orders.

    >>> combiner = GradVac()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]])).numpy().round(4)
    array([2.2222, 1.5789])
    """

    name = "gradvac"

    def __init__(self, beta=0.01, seed=0, **guards):
        super().__init__(**guards)
        require(0 < beta <= 1, f"`beta` is {beta}", "in (0, 1]", "The paper's is 0.01.")
        self.beta = beta
        self.seed = whole("seed", seed, 0, "Any non-negative integer will do.")

    def create(self, count):
        super().create(count)
        self.add("cosines", tf.zeros([count, count]))

    def propose(self, losses, present, measured):
        return self._solve(present, measured)[0]

    def learn(self, losses, present, measured):
        super().learn(losses, present, measured)
        moving = self.moving(present)
        both = moving[:, None] & moving[None, :]
        self.cosines.assign(tf.where(both, tf.cast(self._solve(present, measured)[1], tf.float32), self.cosines))

    def _solve(self, present, measured):
        orders = permutations(self.seed, self.updates, len(self.names))
        return gradvac(measured, orders, self.cosines, self.beta, present)


def gradvac(matrix, orders, goals, beta, present):
    """[K] float64 coefficients, and the new [K, K] averages of the cosines. `orders` as in `pcgrad`."""
    norms, cosines, alive, _ = directions(matrix, present)
    count = matrix.shape[0]
    goals = tf.cast(goals, tf.float64)
    rows = tf.eye(count, dtype=tf.float64)
    for turn in range(count):
        other = tf.one_hot(orders[:, turn], count, dtype=tf.float64)
        products = tf.matmul(rows, cosines)
        length = tf.sqrt(tf.maximum(tf.reduce_sum(products * rows, axis=1), 0.0))
        met = alive & tf.gather(alive, orders[:, turn]) & (orders[:, turn] != tf.range(count)) & (length > 0)
        cosine = tf.reduce_sum(products * other, axis=1) / tf.where(length > 0, length, 1.0)
        cosine = tf.clip_by_value(cosine, -1.0, 1.0)
        goal = tf.clip_by_value(tf.reduce_sum(goals * other, axis=1), -NEAREST, NEAREST)
        sine = tf.sqrt(1.0 - goal * goal)
        step = length * (goal * tf.sqrt(1.0 - cosine * cosine) - cosine * sine) / sine
        rows += tf.where(met & (cosine < goal), step, 0.0)[:, None] * other
        goals += tf.where(met, beta * (cosine - tf.reduce_sum(goals * other, axis=1)), 0.0)[:, None] * other
    return summed(rows, norms, alive), goals
