"""Combiners on the convex hull of the gradients: MGDA and CAGrad."""

import tensorflow as tf

from looptape.losses.combiners.by_gradient.direction import DirectionCombiner
from looptape.losses.combiners.numerics.ball import quadratic, worst_off
from looptape.losses.combiners.numerics.complementarity import complementary
from looptape.losses.combiners.numerics.gramian import directions, mean_weights
from looptape.losses.convention import require

NORMALIZERS = (None, "l2", "loss", "loss+")
RESCALES = (None, "square", "linear")


class MGDA(DirectionCombiner):
    """Multiple gradient descent (Désidéri 2012, Sener 2018): the shortest vector of the convex hull.

    It increases no loss to first order. The weights sum to 1. A loss whose gradient is 0 gets all the weight: the point
    is then Pareto-stationary and the update is 0. Without `normalize`, the loss with the smallest gradient gets nearly
    all the weight.

    Args:
        normalize: Divides each gradient first: "l2" by its norm, "loss" by its loss, "loss+" by both, None by nothing.
            The update is the shortest vector of the divided gradients, scaled so that the weights of the original
            gradients sum to 1. For "loss" and "loss+" all losses must be above 0.

    >>> combiner = MGDA()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]])).numpy().round(4)
    array([0.6, 0.4])
    """

    name = "mgda"
    positive_because = "divides gradients by the losses"

    def __init__(self, normalize=None, **guards):
        super().__init__(**guards)
        known = f"one of {list(NORMALIZERS)}"
        require(normalize in NORMALIZERS, f"`normalize` is {normalize!r}", known, "Use None to leave gradients alone.")
        self.normalize = normalize
        self.requires_positive = self.weighs_losses = normalize in ("loss", "loss+")

    def propose(self, losses, present, measured):
        return mgda(measured, present, self.normalize, losses)


def mgda(matrix, present, normalize=None, losses=None):
    """[K] float64 weights, with sum 1, of the shortest vector in the hull of the (normalized) gradients.

    With b_i = 1 / |g_i|, the y >= 0 that minimise |sum y_i u_i|^2 + (b.y - 1)^2 are those weights times |g_i|, up to
    a factor: a complementarity problem without the simplex.
    """
    norms, cosines, alive, _ = directions(matrix, present)
    sizes = tf.ones_like(norms) if normalize in ("l2", "loss+") else norms
    if normalize in ("loss", "loss+"):
        sizes /= tf.maximum(tf.cast(losses, tf.float64), 1e-300)
    inverse = tf.where(alive, tf.reduce_min(tf.where(alive, sizes, float("inf"))) / sizes, 0.0)
    inverse = tf.where(tf.math.is_finite(inverse), inverse, 0.0)
    lengths = complementary(cosines + inverse[:, None] * inverse[None, :], -inverse[None], alive)[0]
    weights = tf.where(alive, lengths / norms, 0.0)
    shortest = tf.math.divide_no_nan(weights, tf.reduce_sum(weights))
    still = tf.cast(present & ~alive, tf.float64)  # losses without gradient: their corner is the minimum
    count = tf.reduce_sum(still)
    return tf.where(count > 0, still / tf.maximum(count, 1.0), shortest)


class CAGrad(DirectionCombiner):
    """Conflict-averse gradient (Liu 2021): the direction near the mean gradient that is best for the worst-off loss.

    `d = g0 + (c |g0| / |g_w|) g_w`, where g0 is the mean of the gradients, not their sum. `rescale="square"` divides d
    by 1 + c^2, the default of the authors' code; "linear" divides it by 1 + c; None leaves it. c = 0 gives the mean
    gradient, and so does every c if a combination of the gradients vanishes.

    Args:
        c: Radius of the neighbourhood relative to `|g0|`; the paper's guarantee holds in [0, 1).
        rescale: None, "square" or "linear".

    >>> combiner = CAGrad()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]])).numpy().round(4)
    array([0.7041, 0.5   ])
    """

    name = "cagrad"

    def __init__(self, c=0.5, rescale=None, **guards):
        super().__init__(**guards)
        require(
            c >= 0,
            f"`c` is {c}",
            "at least 0",
            "The paper uses 0.5; below 1 it converges to a minimum of the mean.",
        )
        require(rescale in RESCALES, f"`rescale` is {rescale!r}", f"one of {list(RESCALES)}", "Choose one.")
        self.c = c
        self.rescale = rescale

    def propose(self, losses, present, measured):
        divisor = {None: 1.0, "square": 1.0 + self.c**2, "linear": 1.0 + self.c}[self.rescale]
        return cagrad(measured, self.c, present) / divisor


def cagrad(matrix, c, present):
    """[K] float64 coefficients of `g0 + (c |g0| / |g_w|) g_w`; of g0 alone where g_w vanishes."""
    mean = mean_weights(present)
    if not c:
        return mean
    norms, cosines, alive, _ = directions(matrix, present)
    parts = tf.where(alive, mean * norms, 0.0)
    square = quadratic(cosines, parts, parts)
    # A mean whose terms cancel to rounding has no direction, and no neighbourhood.
    known = square > 1e-28 * tf.square(tf.reduce_sum(parts))
    length = tf.sqrt(tf.where(known, square, 1.0))
    inner = tf.linalg.matvec(cosines, parts) / length
    inverse = tf.where(alive, tf.reduce_min(norms) / norms, 0.0)
    lengths, level = worst_off(cosines, inner, inverse, tf.constant(c, tf.float64), alive)
    reached = quadratic(cosines, lengths, lengths) > 0.99 * c * c
    # No direction does more than nothing for a loss without gradient: then what is best is not unique.
    real = known & reached & ((level < 0) | ~tf.reduce_any(present & ~alive))
    return mean + tf.where(real & alive, length * lengths / norms, 0.0)
