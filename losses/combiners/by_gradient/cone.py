"""Combiners that project onto the cone of directions that increase no loss: UPGrad, DualProj and PCD."""

import tensorflow as tf

from looptape.losses.combiners.by_gradient.direction import DirectionCombiner
from looptape.losses.combiners.numerics.complementarity import complementary
from looptape.losses.combiners.numerics.gramian import directions, mean_weights
from looptape.losses.convention import require


class UPGrad(DirectionCombiner):
    """Unconflicting projection (Quinton 2024): the mean of the gradients, each projected onto the dual cone.

    It increases no loss to first order, and a loss's share of the update grows with its gradient.

    >>> combiner = UPGrad()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]])).numpy().round(4)
    array([1.1111, 0.7895])
    """

    name = "upgrad"

    def propose(self, losses, present, measured):
        return upgrad(measured, present)


def upgrad(matrix, present):
    """[K] float64 coefficients: for each i the shortest vector with weights of at least those of gradient i alone."""
    norms, cosines, alive, _ = directions(matrix, present)
    mean = mean_weights(present)
    # Row i: what the projection of u_i adds to it. All K problems have the same matrix.
    added = complementary(cosines, cosines, alive)
    sums = norms * mean + tf.linalg.matvec(added, tf.where(alive, norms * mean, 0.0), transpose_a=True)
    return tf.where(alive, sums / norms, mean)


class DualProj(DirectionCombiner):
    """Projects the mean gradient onto the dual cone (Lopez-Paz 2017, GEM). Increases no loss to first order.

    >>> combiner = DualProj()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]])).numpy().round(4)
    array([0.6111, 0.5   ])
    """

    name = "dualproj"

    def propose(self, losses, present, measured):
        return dualproj(measured, present)


def dualproj(matrix, present):
    """[K] float64 coefficients of at least 1 / K each, of the shortest vector with such coefficients."""
    norms, cosines, alive, _ = directions(matrix, present)
    mean = mean_weights(present)
    parts = tf.where(alive, norms * mean, 0.0)
    added = complementary(cosines, tf.linalg.matvec(cosines, parts)[None], alive)[0]
    return tf.where(alive, (parts + added) / norms, mean)


class PCD(DirectionCombiner):
    """Priority-constrained descent (Varam 2026): one loss is the goal, the others constrain it.

    The update is the vector closest to the gradient of the goal along which every other loss still falls by at least
    `tau` times what its own gradient would achieve. Gradients are first divided by moving averages of their norms, so
    that their scale does not matter. The coefficient of the goal is 1; a loss that already falls fast enough gets 0.
    If the other losses contradict each other, `tau` is 0 for that update.

    Args:
        goal: Name of the goal loss; the first loss by default.
        tau: Progress guaranteed to the other losses, in [0, 1]; with 0 they merely do not rise.
        memory: Share of the old norms in the moving averages, in [0, 1); 0 uses the norms of this update.

    >>> combiner = PCD(tau=0.5)
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[4.0, 0.0], [0.0, 1.0]])).numpy()
    array([1., 1.])
    """

    name = "pcd"

    def __init__(self, goal=None, tau=0.1, memory=0.9, **guards):
        super().__init__(**guards)
        require(0 <= tau <= 1, f"`tau` is {tau}", "in [0, 1]", "The default is 0.1.")
        require(0 <= memory < 1, f"`memory` is {memory}", "in [0, 1)", "Use 0 for the norms of each update.")
        self.goal = goal
        self.tau = tau
        self.memory = memory

    def create(self, count):
        known = self.goal is None or self.goal in self.names
        require(known, f"`goal` is {self.goal!r}", f"one of the losses {list(self.names)}", "Correct the name.")
        super().create(count)
        self.add("norms", tf.zeros([count]))

    def propose(self, losses, present, measured):
        index = 0 if self.goal is None else self.names.index(self.goal)
        return pcd(measured, self._norms(measured, present), index, self.tau, present)

    def learn(self, losses, present, measured):
        super().learn(losses, present, measured)
        norms = tf.cast(self._norms(measured, present), tf.float32)
        self.norms.assign(tf.where(self.moving(present) & tf.math.is_finite(norms), norms, self.norms))

    def _norms(self, measured, present):
        """Roots of the averages of the squared norms; the first is the norm of the gradient itself."""
        now = tf.maximum(tf.cast(tf.linalg.diag_part(measured), tf.float64), 0.0)
        old = tf.square(tf.cast(self.norms, tf.float64))
        new = tf.where(old > 0, self.memory * old + (1.0 - self.memory) * now, now)
        return tf.sqrt(tf.where(present, new, old))


def pcd(matrix, averages, goal, tau, present):
    """[K] float64 coefficients; the goal's is 1. `averages` [K] are the norms by which gradients are divided."""
    norms, cosines, alive, largest = directions(matrix, present)
    sizes = tf.where(alive & (averages > 0), norms * largest / tf.where(averages > 0, averages, 1.0), 1.0)
    is_goal = tf.one_hot(goal, matrix.shape[0], on_value=True, off_value=False)
    others = alive & ~is_goal
    centre = tf.where(is_goal & alive, sizes, 0.0)
    along = tf.linalg.matvec(cosines, centre)
    owed = tf.where(others, tau * sizes, 0.0)
    square = tf.where(others[:, None] & others[None, :], cosines, 0.0)
    added = complementary(square, tf.stack([along - owed, along]), others)
    # Where no direction serves them all, the solution runs away and still misses.
    missed = owed - along - tf.linalg.matvec(square, added[0])
    feasible = tf.reduce_max(tf.where(others, missed, 0.0)) <= 1e-6
    added = tf.where(feasible, added[0], added[1])
    unit = tf.where(averages[goal] > 0, averages[goal], largest)
    return tf.where(is_goal, tf.ones_like(norms), tf.where(others, unit * added / (norms * largest), 0.0))
