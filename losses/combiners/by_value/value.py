"""Combiners without learned state: the plain sum, random weights, and two that take logarithms."""

import tensorflow as tf

from looptape.losses.combiners.base import Combiner
from looptape.losses.combiners.numerics.random import normal
from looptape.losses.convention import require, whole


class WeightedSum(Combiner):
    """The plain sum of the statically weighted losses: every coefficient is 1. The default, and the baseline.

    It has no state and no guards.

    >>> combiner = WeightedSum()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, None).numpy().tolist()
    [1.0, 1.0]
    """

    name = "weighted_sum"

    def __init__(self):
        super().__init__()

    def coefficients(self, losses, present, measured):
        return tf.ones([len(self.names)])

    def advance(self, losses, present, measured, used=None) -> None:
        """Nothing to move."""
        return

    def freeze(self) -> None:
        """Nothing to hold."""
        return

    unfreeze = freeze

    def _build_state(self):
        """No variables."""
        return


class RandomWeights(Combiner):
    """Draws new weights softmax(N(0, I)) for each update (Lin 2021). They sum to 1, or to K with `normalize=True`.

    The draw depends only on `seed` and the update counter, so it is the same on all replicas and after a restart.

    >>> combiner = RandomWeights(seed=7)
    >>> combiner.build(["error", "penalty"])
    >>> weights = combiner.coefficients(None, None, None)
    >>> round(float(tf.reduce_sum(weights)), 5)
    1.0
    """

    name = "random_weights"

    def __init__(self, seed=0, **guards):
        super().__init__(**guards)
        self.seed = whole("seed", seed, 0, "Any non-negative integer will do.")

    def propose(self, losses, present, measured):
        return random_weights(normal(self.seed, self.updates, [len(self.names)]))


def random_weights(draw):
    """The softmax of standard normal draws."""
    return tf.nn.softmax(draw)


class LogSum(Combiner):
    """The sum of the logarithms of the losses: the coefficients are 1 / L, so the scale of a loss does not matter.

    A loss at or below `epsilon` counts as `epsilon`; its coefficient is 0, the gradient of log(max(L, epsilon)).
    Losses that are not positive raise an error.

    >>> combiner = LogSum()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(tf.constant([4.0, 1.0]), None, None).numpy().tolist()
    [0.25, 1.0]
    """

    name = "log_sum"
    needs = "losses"
    minimum_losses = 2  # a single logarithm would only rescale the learning rate
    requires_positive = True

    def __init__(self, epsilon=1e-12, **guards):
        super().__init__(**guards)
        require(epsilon > 0, f"`epsilon` is {epsilon}", "above 0", "The default is 1e-12.")
        self.epsilon = epsilon

    def propose(self, losses, present, measured):
        return log_sum(losses, self.epsilon)

    def total(self, losses, coefficients, static=None, present=None):
        logs = tf.math.log(tf.maximum(self._clean(losses, self._mask(present)), self.epsilon))
        return tf.reduce_sum(self._static(static, present) * logs)


def log_sum(losses, epsilon):
    """The gradient of sum(log(max(L, epsilon))) with respect to the losses."""
    return tf.where(losses > epsilon, 1.0 / tf.maximum(losses, epsilon), 0.0)


class GeometricMean(LogSum):
    """The geometric mean of the losses: the coefficients are GM / (K L). With one loss it is the plain sum.

    Losses that are not positive raise an error, as in `LogSum`. Static weights scale the gradients; their mean scales
    the logged total.

    >>> combiner = GeometricMean()
    >>> combiner.build(["error", "penalty"])
    >>> losses = tf.constant([4.0, 1.0])
    >>> weights = combiner.coefficients(losses, None, None)
    >>> weights.numpy().round(5).tolist(), round(float(combiner.total(losses, weights)), 5)
    ([0.25, 1.0], 2.0)
    """

    name = "geometric_mean"
    minimum_losses = 1

    def propose(self, losses, present, measured):
        return geometric_mean(losses, present, self.epsilon)[1]

    def total(self, losses, coefficients, static=None, present=None):
        present = self._mask(present)
        mean = geometric_mean(self._clean(losses, present), present, self.epsilon)[0]
        # Each loss contributes coefficient · loss = mean / K, times its static weight.
        count = tf.reduce_sum(tf.cast(present, tf.float32))
        return mean * tf.math.divide_no_nan(tf.reduce_sum(self._static(static, present)), count)


def geometric_mean(losses, present, epsilon):
    """The geometric mean of the present losses, and its gradient with respect to each."""
    count = tf.maximum(tf.reduce_sum(tf.cast(present, tf.float32)), 1.0)
    logs = tf.where(present, tf.math.log(tf.maximum(losses, epsilon)), 0.0)
    mean = tf.exp(tf.reduce_sum(logs) / count)
    return mean, mean / count * log_sum(losses, epsilon)
