"""Combiners based on bargaining between the losses: FairGrad and NashMTL."""

import tensorflow as tf

from looptape.losses.combiners.by_gradient.direction import DirectionCombiner
from looptape.losses.combiners.numerics.bargaining import equal_shares
from looptape.losses.combiners.numerics.gramian import directions, mean_weights
from looptape.losses.convention import require, whole


class FairGrad(DirectionCombiner):
    """Fair resource allocation (Ban 2024): the direction that maximises the alpha-fair utility of the losses' gains.

    The weights solve G w = w^(-1/alpha), so every loss falls. With alpha 1 the update always has the length sqrt(K),
    whatever the gradients are; to train more slowly, lower the learning rate. If a convex combination of the unit
    gradients is shorter than 1e-6, no such direction exists, and the weights are computed as if all gradients were
    orthogonal.

    Args:
        alpha: 1 is Nash bargaining; small values approach the sum, large ones favour the worst-off loss.

    >>> combiner = FairGrad()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]])).numpy().round(4)
    array([0.5915, 0.4071])
    """

    name = "fairgrad"

    def __init__(self, alpha=1.0, **guards):
        super().__init__(**guards)
        require(alpha > 0, f"`alpha` is {alpha}", "above 0", "The default is 1; the paper uses 0.5 to 10.")
        self.alpha = alpha

    def propose(self, losses, present, measured):
        return fairgrad(measured, self.alpha, present)


def fairgrad(matrix, alpha, present):
    """[K] float64 weights w > 0 with G w = w^(-1/alpha) over the gradients that are not 0.

    In unit gradients, w = y / |g| and C y = |g|^(1/alpha - 1) y^(-1/alpha); the size of all gradients together comes
    in at the end, as a power.
    """
    norms, cosines, alive, largest = directions(matrix, present)
    alpha = float(alpha)
    logs = None if alpha == 1 else (1.0 / alpha - 1.0) * tf.math.log(norms)
    lengths, exists = equal_shares(cosines, logs, alpha, alive)
    orthogonal = tf.ones_like(norms) if logs is None else tf.exp(alpha / (1.0 + alpha) * logs)
    lengths = tf.where(exists, lengths, orthogonal)
    scale = tf.pow(largest, tf.constant(-2.0 * alpha / (1.0 + alpha), tf.float64))
    return tf.where(alive, scale * lengths / norms, mean_weights(present))


class NashMTL(FairGrad):
    """Nash bargaining (Navon 2022): the weights solve G w = 1 / w.

    Any other update would cost some losses more, relatively, than it gives the others. It is FairGrad with alpha 1,
    with the two options of the paper's code.

    Args:
        max_norm: Largest length of the update, which is sqrt(K) if None.
        update_every: Number of updates between new weights.

    >>> combiner = NashMTL()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[18.0, -22.0], [-22.0, 38.0]])).numpy().round(4)
    array([0.5915, 0.4071])
    """

    name = "nash_mtl"

    def __init__(self, max_norm=None, warmup_steps=0, moving_average=0.0, update_every=1):
        super().__init__(warmup_steps=warmup_steps, moving_average=moving_average)
        self.update_every = whole("update_every", update_every, 1, "Use 1 for each update.")
        bounded = max_norm is None or max_norm > 0
        require(bounded, f"`max_norm` is {max_norm}", "above 0", "The paper's is 1; use None for no bound.")
        self.max_norm = max_norm

    def propose(self, losses, present, measured):
        weights = super().propose(losses, present, measured)
        if self.max_norm is None:
            return weights
        square = tf.tensordot(weights, tf.linalg.matvec(tf.cast(measured, tf.float64), weights), 1)
        norm = tf.sqrt(tf.maximum(square, 0.0))
        return weights * self.max_norm / tf.maximum(norm, self.max_norm)
