"""Combiners that compare a loss with its own past: DynamicWeightAverage and ReLoBRaLo."""

import tensorflow as tf

from losses.combiners.base import Combiner
from losses.combiners.random import uniform
from losses.function import require, whole


class DynamicWeightAverage(Combiner):
    """Dynamic weight average (Liu 2019): more weight for the losses that fell least between two windows.

    w = K softmax(r / T) with r the mean loss of the last complete window over that of the one before; all 1
    until there are two. One loss alone is the plain sum.

    Args:
        window: Updates in a window; those in which a loss is absent do not count for it. In the paper it is
            an epoch: pass the number of updates in one.
        temperature: T; larger is more even.

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
    """K softmax(r / T) over the present losses, K their number.

    >>> both = tf.constant([True, True])
    >>> dynamic_weight_average(tf.constant([0.5, 1.0]), 2.0, both).numpy().round(4).tolist()
    [0.8755999803543091, 1.124400019645691]
    """
    return softmax_sum(ratios / temperature, present)


class ReLoBRaLo(Combiner):
    """Relative loss balancing with random lookback (Bischof 2021).

    Weights follow K softmax(L(t) / (tau L(t-1))), with a memory `alpha` of the last weights, which now and
    then (when a coin of mean `expected_rho` falls to 0) is replaced by the progress since the first update.
    All losses start at 1.

    Args:
        alpha: Share of the memory in the new weights, in [0, 1].
        expected_rho: Chance per update that the memory is the last weights, in [0, 1].
        temperature: tau; larger is more even.
        seed: Of the coin, which depends on it and the update counter alone.

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


def softmax_sum(logits, present):
    """Softmax over the present losses times their number; 0 for the absent."""
    count = tf.reduce_sum(tf.cast(present, tf.float32))
    return count * tf.nn.softmax(tf.where(present, logits, -1e30))


def safe_ratio(numerator, denominator, known):
    """numerator / denominator where known and the denominator is not 0, else 1; at most 1e6 in size."""
    usable = known & (tf.abs(denominator) > 0)
    ratio = numerator / tf.where(usable, denominator, 1.0)
    return tf.where(usable, tf.clip_by_value(ratio, -1e6, 1e6), 1.0)
