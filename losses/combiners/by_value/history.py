"""Combiners that compare a loss with its own past: DynamicWeightAverage, ReLoBRaLo and SoftAdapt."""

import tensorflow as tf

from looptape.losses.combiners.base import Combiner
from looptape.losses.combiners.numerics.random import uniform
from looptape.losses.convention import require, whole

VARIANTS = ("plain", "normalized", "loss_weighted")


class DynamicWeightAverage(Combiner):
    """Dynamic weight average (Liu 2019): gives more weight to the losses that fell least between two windows.

    w = K softmax(r / T), where r is the mean loss of the last complete window divided by the mean loss of the window
    before it. All weights are 1 until there are two windows. With one loss it is the plain sum.

    Args:
        window: Number of updates in a window; updates in which a loss is absent do not count for it. The paper uses
            an epoch: pass the number of updates in one.
        temperature: T; larger values give more even weights.

    >>> combiner = DynamicWeightAverage(window=1)
    >>> combiner.build(["error", "penalty"])
    >>> combiner.advance(tf.constant([2.0, 3.0]), None, None)
    >>> combiner.advance(tf.constant([1.0, 3.0]), None, None)
    >>> combiner.coefficients(None, None, None).numpy().round(4).tolist()
    [0.8755999803543091, 1.124400019645691]
    """

    name = "dynamic_weight_average"

    def __init__(self, window=100, temperature=2.0, **guards):
        super().__init__(**guards)
        require(temperature > 0, f"`temperature` is {temperature}", "above 0", "The paper's is 2.")
        self.window = whole("window", window, 1, "Use the number of updates in an epoch.")
        self.temperature = temperature

    def create(self, count):
        for name in ("window_sum", "window_count", "last_mean", "earlier_mean", "means_seen"):
            self.add(name, tf.zeros([count]))

    def propose(self, losses, present, measured):
        ratios = safe_ratio(self.last_mean, self.earlier_mean, self.means_seen >= 2)
        return dynamic_weight_average(ratios, self.temperature, present)

    def learn(self, losses, present, measured):
        seen = self.observing(present)
        total = self.window_sum + tf.where(seen, losses, 0.0)
        count = self.window_count + tf.cast(seen, tf.float32)
        closes = count >= self.window
        self.earlier_mean.assign(tf.where(closes, self.last_mean, self.earlier_mean))
        self.last_mean.assign(tf.where(closes, total / count, self.last_mean))
        self.means_seen.assign(tf.where(closes, tf.minimum(self.means_seen + 1.0, 2.0), self.means_seen))
        self.window_sum.assign(tf.where(closes, 0.0, total))
        self.window_count.assign(tf.where(closes, 0.0, count))


def dynamic_weight_average(ratios, temperature, present):
    """Returns K softmax(r / T) over the K present losses.

    >>> both = tf.constant([True, True])
    >>> dynamic_weight_average(tf.constant([0.5, 1.0]), 2.0, both).numpy().round(4).tolist()
    [0.8755999803543091, 1.124400019645691]
    """
    return softmax_sum(ratios / temperature, present)


class ReLoBRaLo(Combiner):
    """Relative loss balancing with random lookback (Bischof 2021).

    The weights follow K softmax(L(t) / (tau L(t-1))), averaged with a memory that has the share `alpha`. The memory is
    the last weights with probability `expected_rho`, and the progress since the first update otherwise. All weights
    start at 1.

    Args:
        alpha: Share of the memory in the new weights, in [0, 1].
        expected_rho: Probability per update that the memory is the last weights, in [0, 1].
        temperature: tau; larger values give more even weights.
        seed: Seed of the draws, which depend only on it and the update counter.

    >>> combiner = ReLoBRaLo()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(tf.constant([4.0, 1.0]), None, None).numpy().tolist()
    [1.0, 1.0]
    """

    name = "relobralo"
    needs = "losses"

    def __init__(self, alpha=0.95, expected_rho=0.99, temperature=1.0, seed=0, **guards):
        super().__init__(**guards)
        require(0 <= alpha <= 1, f"`alpha` is {alpha}", "in [0, 1]", "The paper's is 0.95.")
        require(0 <= expected_rho <= 1, f"`expected_rho` is {expected_rho}", "in [0, 1]", "The paper's is 0.99.")
        require(temperature > 0, f"`temperature` is {temperature}", "above 0", "The default is 1.")
        self.alpha = alpha
        self.expected_rho = expected_rho
        self.temperature = temperature
        self.seed = whole("seed", seed, 0, "Any non-negative integer will do.")

    def create(self, count):
        self.add("balance", tf.ones([count]))
        self.add("last_losses", tf.ones([count]))
        self.add("first_losses", tf.ones([count]))
        self.add("seen", tf.zeros([count], tf.bool), tf.bool)

    def propose(self, losses, present, measured):
        rho = tf.cast(uniform(self.seed, self.updates, []) < self.expected_rho, tf.float32)
        recent = safe_ratio(losses, self.last_losses, self.seen)
        lifetime = safe_ratio(losses, self.first_losses, self.seen)
        return relobralo(recent, lifetime, self.balance, rho, self.alpha, self.temperature, present)

    def learn(self, losses, present, measured):
        balance = self.propose(losses, present, measured)
        moving, observed = self.moving(present), self.observing(present)
        self.balance.assign(tf.where(moving, balance, self.balance))
        self.first_losses.assign(tf.where(observed & ~self.seen, losses, self.first_losses))
        self.last_losses.assign(tf.where(observed, losses, self.last_losses))
        self.seen.assign(self.seen | observed)


def relobralo(recent, lifetime, balance, rho, alpha, temperature, present):
    """alpha (rho lambda + (1 - rho) w0) + (1 - alpha) w, the softmaxes over the present losses.

    `recent` is L(t) / L(t-1), `lifetime` L(t) / L(0), `balance` the last lambda.

    >>> recent, lifetime = tf.constant([0.5, 1.0, 0.25]), tf.constant([0.1, 0.1, 0.5])
    >>> relobralo(recent, lifetime, tf.ones([3]), 1.0, 0.95, 1.0, tf.ones([3], tf.bool)).numpy().round(4)
    array([0.9938, 1.0222, 0.9841], dtype=float32)
    """
    memory = rho * balance + (1.0 - rho) * softmax_sum(lifetime / temperature, present)
    return alpha * memory + (1.0 - alpha) * softmax_sum(recent / temperature, present)


class SoftAdapt(Combiner):
    """SoftAdapt (Heydari 2019): gives more weight to losses that fall least, or rise, from one update to the next.

    The weights are softmax(beta s), where s is the change of each loss. They sum to 1, or to K with `normalize=True`.
    All are 1 / K until a loss has been seen twice. Changes between updates are noisy: use `update_every` and
    `moving_average`.

    Args:
        beta: Above 0 to favour the worst losses, below 0 to favour the best.
        variant: "plain"; "normalized" divides the changes by the sum of their sizes; "loss_weighted" also multiplies
            the weights by the losses.

    >>> combiner = SoftAdapt(beta=1.0)
    >>> combiner.build(["error", "penalty"])
    >>> combiner.advance(tf.constant([2.0, 3.0]), None, None)
    >>> combiner.coefficients(tf.constant([1.0, 3.0]), None, None).numpy().round(4)
    array([0.2689, 0.7311], dtype=float32)
    """

    name = "softadapt"
    needs = "losses"

    def __init__(self, beta=0.1, variant="plain", **guards):
        super().__init__(**guards)
        require(beta != 0, f"`beta` is {beta}", "other than 0", "The paper's is 0.1.")
        require(variant in VARIANTS, f"`variant` is {variant!r}", f"one of {list(VARIANTS)}", "Choose one.")
        self.beta = beta
        self.variant = variant

    def create(self, count):
        self.add("last_losses", tf.zeros([count]))
        self.add("seen", tf.zeros([count], tf.bool), tf.bool)

    def propose(self, losses, present, measured):
        changes = tf.where(self.seen, losses - self.last_losses, 0.0)
        return softadapt(changes, losses, self.beta, self.variant, present)

    def learn(self, losses, present, measured):
        observed = self.observing(present)
        self.last_losses.assign(tf.where(observed, losses, self.last_losses))
        self.seen.assign(self.seen | observed)


def softadapt(changes, losses, beta, variant, present):
    """Returns softmax(beta s) over the present losses; the sum is 1.

    >>> changes, losses = tf.constant([-1.0, 0.0]), tf.constant([1.0, 3.0])
    >>> softadapt(changes, losses, 1.0, "loss_weighted", tf.ones([2], tf.bool)).numpy().round(4)
    array([0.1092, 0.8908], dtype=float32)
    """
    changes = tf.where(present, changes, 0.0)
    if variant != "plain":
        changes = tf.math.divide_no_nan(changes, tf.reduce_sum(tf.abs(changes)))
    changes = tf.clip_by_value(beta * changes, -1e6, 1e6)
    weights = tf.nn.softmax(tf.where(present, changes, -1e30))
    weights = tf.where(present, weights, 0.0)
    if variant == "loss_weighted":
        weighted = weights * tf.maximum(losses, 0.0)
        total = tf.reduce_sum(weighted)
        weights = tf.where(total > 0, weighted / tf.where(total > 0, total, 1.0), weights)
    return weights


def softmax_sum(logits, present):
    """Softmax over the present losses times their number; 0 for the absent."""
    count = tf.reduce_sum(tf.cast(present, tf.float32))
    return count * tf.nn.softmax(tf.where(present, logits, -1e30))


def safe_ratio(numerator, denominator, known):
    """Returns numerator / denominator, at most 1e6 in size; 1 where not `known` or the denominator is 0."""
    usable = known & (tf.abs(denominator) > 0)
    ratio = numerator / tf.where(usable, denominator, 1.0)
    return tf.where(usable, tf.clip_by_value(ratio, -1e6, 1e6), 1.0)
