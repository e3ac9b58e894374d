"""Combiners that invert the matrix of cosines: ConFIG, IMTLG and AlignedMTL."""

import functools

import tensorflow as tf

from looptape.losses.combiners.by_gradient.direction import DirectionCombiner
from looptape.losses.combiners.numerics.gramian import directions, mean_weights
from looptape.losses.combiners.numerics.polar import sum_of_aligned
from looptape.losses.convention import require

SMALLEST = 1e-14  # relative to the largest, per loss: an eigenvalue of cosines below it is rounding
SCALES = ("min", "median", "rmse")


class ConFIG(DirectionCombiner):
    """Conflict-free inverse gradients (Liu 2024): the update has equal angles to all gradients.

    d = (sum g_i.u) u, so its length is the sum of the projections; u is the normalised U^+ 1 of the unit gradients U.
    If the gradients oppose each other to within an angle of 1e-6, no such direction exists, and d is the plain sum. A
    loss without a gradient takes no part.

    >>> combiner = ConFIG()
    >>> combiner.build(["error", "penalty"])
    >>> weights = combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]]))
    >>> tf.linalg.matvec(tf.constant([[-4.0, 6.0], [1.0, 1.0], [1.0, 1.0]], tf.float64), weights).numpy().round(4)
    array([0.1588, 2.0706, 2.0706])
    """

    name = "config"

    def propose(self, losses, present, measured):
        return config(measured, present)


def config(matrix, present):
    """[K] float64 coefficients of (sum g_i.u) u, by the pseudo-inverse of the matrix of cosines."""
    norms, cosines, alive, _ = directions(matrix, present)
    solution, product, exists = equal_angles(cosines, alive)
    length = tf.reduce_sum(tf.where(alive, norms, 0.0) * product)
    square = tf.where(exists, tf.tensordot(solution, product, 1), 1.0)
    return tf.where(alive & exists, length / square * solution / norms, 1.0)


def equal_angles(cosines, alive):
    """y = cosines^+ 1 over the live gradients, cosines y, and whether these are 1 to some extent.

    Two gradients that are opposed up to rounding have no direction between them: cosines y is then 0.
    """
    values, vectors = tf.linalg.eigh(cosines)
    kept = values > SMALLEST * cosines.shape[0] * tf.reduce_max(values)
    inverse = tf.where(kept, 1.0 / tf.where(kept, values, 1.0), 0.0)
    ones = tf.cast(alive, tf.float64)
    solution = tf.linalg.matvec(vectors, inverse * tf.linalg.matvec(vectors, ones, transpose_a=True))
    product = tf.linalg.matvec(vectors, tf.cast(kept, tf.float64) * tf.linalg.matvec(vectors, ones, transpose_a=True))
    return solution, product, tf.tensordot(solution, product, 1) > 1e-12


class IMTLG(DirectionCombiner):
    """Impartial multi-task learning by gradients (Liu 2021): equal projections on all gradients, weights of sum 1.

    It has the direction of ConFIG and another length. Before the weights are divided by their sum, the sum may be
    negative, which would turn the update against all losses, so its absolute value is used. If the sum rounds to 0, or
    the gradients oppose each other, the update is the mean.

    >>> combiner = IMTLG()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]])).numpy().round(4)
    array([0.5923, 0.4077])
    """

    name = "imtl_g"

    def propose(self, losses, present, measured):
        return imtl_g(measured, present)


def imtl_g(matrix, present):
    """[K] float64 weights w with u_i.(sum w_j g_j) equal for all i, and |sum w| = 1."""
    norms, cosines, alive, _ = directions(matrix, present)
    solution, _, exists = equal_angles(cosines, alive)
    weights = tf.where(alive, solution * tf.reduce_min(norms) / norms, 0.0)
    total = tf.abs(tf.reduce_sum(weights))
    usable = exists & (total > 1e-10 * tf.reduce_sum(tf.abs(weights)))
    return tf.where(alive & usable, weights / tf.where(usable, total, 1.0), mean_weights(present))


class AlignedMTL(DirectionCombiner):
    """Aligned multi-task learning (Senushkin 2023): the closest orthogonal gradients of equal length.

    All singular values of the Jacobian are set to the same value; the update is the mean of its rows. It increases no
    loss to first order if the gradients are linearly independent.

    Args:
        scale: The common singular value: "min", "median" (the lower one) or "rmse" (root mean square).

    >>> combiner = AlignedMTL()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]])).numpy().round(4)
    array([0.5591, 0.4083])
    """

    name = "aligned_mtl"

    def __init__(self, scale="min", **guards):
        super().__init__(**guards)
        require(scale in SCALES, f"`scale` is {scale!r}", f"one of {list(SCALES)}", "The paper's is 'min'.")
        self.scale = scale

    def propose(self, losses, present, measured):
        return aligned_mtl(measured, self.scale, present)


def aligned_mtl(matrix, scale, present):
    """[K] float64 weights s G^(-1/2) 1 / K over the singular values that are not 0, s one of them.

    Rows may differ by many powers of ten, whose squares float64 does not hold side by side. So the singular values
    come from a root of the Gramian, the rank from the unit gradients, and the weights from the update in the root's
    coordinates, which is exact to its own size.
    """
    norms, cosines, alive, _ = directions(matrix, present)
    values, vectors = tf.linalg.eigh(cosines)
    real = values > SMALLEST * matrix.shape[0] * tf.reduce_max(values)
    roots = tf.sqrt(tf.where(real, values, 1.0))
    mean = mean_weights(present)
    rows = tf.where(alive, norms, 0.0)[:, None] * vectors * tf.where(real, roots, 0.0)
    rank = tf.reduce_sum(tf.cast(real, tf.int32))
    update = sum_of_aligned(rows, tf.where(alive, mean, 0.0), rank, functools.partial(common_size, scale=scale))
    weights = tf.linalg.matvec(vectors, tf.where(real, update / roots, 0.0)) / norms
    return tf.where(alive, weights, mean)


def common_size(singular, kept, rank, scale):
    """One number from the singular values, in descending order, that are kept."""
    if scale == "min":
        return tf.reduce_min(tf.where(kept, singular, float("inf")))
    if scale == "median":
        return tf.reduce_sum(tf.one_hot(rank // 2, singular.shape[0], dtype=tf.float64) * singular)
    squares = tf.reduce_sum(tf.where(kept, tf.square(singular), 0.0))
    return tf.sqrt(squares / tf.cast(tf.maximum(rank, 1), tf.float64))
