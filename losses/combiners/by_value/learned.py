"""Combiners that learn one number per loss from the loss values: Uncertainty and FAMO."""

import math
import numbers

import tensorflow as tf

from looptape.losses.combiners.base import Combiner
from looptape.losses.combiners.by_value.adam import Learned
from looptape.losses.convention import require

LARGEST = 20.0  # of |s|: a loss that is negative or 0 drives s without end, and e^-s must stay finite


class Uncertainty(Learned, Combiner):
    """Homoscedastic uncertainty (Kendall 2018): the sum of L e^-s / 2 + s / 2 with one learned s per loss.

    The fixed point is s = ln L, with coefficient 1 / (2 L). The total may become negative; that is not an error. A
    separate Adam without weight decay learns s from its closed-form gradient (1 - e^-s L) / 2. The coefficients depend
    only on s, so one backward pass is enough.

    Args:
        learning_rate: Learning rate of s.
        classification: One name, or several, of losses in the classification form e^-s L + s / 2, whose fixed point is
            s = ln 2L.

    >>> combiner = Uncertainty()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, None).numpy().tolist()
    [0.5, 0.5]
    """

    name = "uncertainty"
    minimum_losses = 2  # one loss alone would only have its learning rate changed
    requires_positive = True  # at the fixed point s = ln L; below zero s falls, and the coefficient grows, without end

    def __init__(self, learning_rate=1e-3, classification=(), **guards):
        super().__init__(**guards)
        require(learning_rate > 0, f"`learning_rate` is {learning_rate}", "above 0", "The default is 1e-3.")
        self.learning_rate = learning_rate
        # A string is one name, not its letters.
        self.classification = (classification,) if isinstance(classification, str) else tuple(classification)

    def create(self, count):
        unknown = [name for name in self.classification if name not in self.names]
        require(
            not unknown,
            f"`classification` names {unknown}",
            f"among the losses {list(self.names)}",
            "Correct the names.",
        )
        self.add("log_variance", tf.zeros([count]))
        self.create_adam(count)

    def above(self, losses):
        """Returns the losses, with 0 allowed: hinge losses reach it."""
        return tf.where(losses == 0.0, tf.ones_like(losses), losses)

    def bound(self):
        return "zero, or zero itself"

    def propose(self, losses, present, measured):
        return self._factor() * tf.exp(-self.log_variance)

    def total(self, losses, coefficients, static=None, present=None):
        terms = tf.where(self._mask(present), 0.5 * self.log_variance, 0.0)
        return super().total(losses, coefficients, static, present) + tf.reduce_sum(terms)

    def learn(self, losses, present, measured):
        _, gradient = uncertainty(losses, self.log_variance, self._factor())
        moved = self.log_variance + self.adam_step(gradient, self.moving(present))
        self.log_variance.assign(tf.clip_by_value(moved, -LARGEST, LARGEST))

    def _factor(self):
        return tf.constant([1.0 if name in self.classification else 0.5 for name in self.names])


def uncertainty(losses, log_variance, factor=0.5):
    """The weighted loss sum(factor e^-s L + s / 2), and its gradient with respect to s.

    >>> value, gradient = uncertainty(tf.constant([4.0, 1.0]), tf.constant([0.0, 0.0]))
    >>> float(value), gradient.numpy().tolist()
    (2.5, [-1.5, 0.0])
    """
    data = factor * tf.exp(-log_variance) * losses
    return tf.reduce_sum(data + 0.5 * log_variance), 0.5 - data


class FAMO(Learned, Combiner):
    """Fast adaptive multitask optimization (Liu 2023): all losses decrease at a similar relative rate.

    The objective is c * sum(z log(L - b)) with z = softmax(xi) and c = 1 / sum(z / (L - b)). After the update the
    trainer evaluates the losses again on the same data (same dropout, BatchNorm unchanged), and `advance_after` moves
    xi by the change of the logarithms. With one loss it is the plain sum.

    Args:
        learning_rate: Learning rate of xi (the paper's beta).
        decay: Decay of xi towards 0 (the paper's gamma), added to its gradient.
        minimum: Lower bound b of the losses: one number, or a dict by loss name (0 for missing names). Each loss must
            stay above its bound.
        epsilon: Added to L - b before the logarithm.

    >>> combiner = FAMO()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(tf.constant([4.0, 1.0]), None, None).numpy().round(4).tolist()
    [0.20000000298023224, 0.800000011920929]
    """

    name = "famo"
    needs = "losses"
    needs_losses_after = True
    requires_positive = True

    def __init__(self, learning_rate=0.025, decay=1e-3, minimum=0.0, epsilon=1e-8, **guards):
        super().__init__(**guards)
        require(learning_rate > 0, f"`learning_rate` is {learning_rate}", "above 0", "The default is 0.025.")
        require(decay >= 0, f"`decay` is {decay}", "at least 0", "The default is 1e-3.")
        require(epsilon > 0, f"`epsilon` is {epsilon}", "above 0", "The default is 1e-8.")
        self.learning_rate = learning_rate
        self.decay = decay
        bounds = minimum.values() if isinstance(minimum, dict) else [minimum]
        require(
            all(map(is_finite, bounds)),
            f"`minimum` is {minimum!r}",
            "a finite number, or a dict of them by loss",
            "The default is 0.",
        )
        self.minimum = dict(minimum) if isinstance(minimum, dict) else minimum
        self.epsilon = epsilon

    def create(self, count):
        if isinstance(self.minimum, dict):
            unknown = [name for name in self.minimum if name not in self.names]
            require(
                not unknown,
                f"`minimum` names {unknown}",
                f"among the losses {list(self.names)}",
                "Correct the names.",
            )
        self.add("logits", tf.zeros([count]))
        self.create_adam(count)

    def propose(self, losses, present, measured):
        return famo(self._distance(losses), self.logits, present)

    def total(self, losses, coefficients, static=None, present=None):
        distance = self._distance(self._clean(losses, self._mask(present)))
        # coefficient * distance is c z: with the guards off this is the paper's objective.
        return tf.reduce_sum(self._static(static, present) * coefficients * distance * tf.math.log(distance))

    def advance_after(self, losses_before, losses_after, present):
        present = self._mask(present)
        before = self._distance(self._clean(losses_before, present))
        after = self._distance(self._clean(losses_after, present))
        past = self.updates > self.warmup_steps  # `advance` has counted this update already
        gradient = famo_gradient(before, after, self.logits, present) + self.decay * self.logits
        self.logits.assign_add(self.adam_step(gradient, present & past & ~self.frozen))

    def above(self, losses):
        return losses - tf.constant(self._minimum())

    def bound(self):
        return f"`minimum`, which is {self.minimum}" if self.minimum else super().bound()

    def _minimum(self):
        if isinstance(self.minimum, dict):
            return [float(self.minimum.get(name, 0.0)) for name in self.names]
        return [float(self.minimum)] * len(self.names)

    def _distance(self, losses):
        return tf.maximum(self.above(losses), 0.0) + self.epsilon


def is_finite(value):
    """Whether something is a number, and neither NaN nor infinite."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def famo(distance, logits, present):
    """Returns the gradient of c sum(z log D) with respect to the present losses, with D = L - b and constant c."""
    share = tf.nn.softmax(tf.where(present, logits, -1e30)) / distance
    return tf.math.divide_no_nan(share, tf.reduce_sum(tf.where(present, share, 0.0)))


def famo_gradient(before, after, logits, present):
    """Returns (dz/dxi)^T [log D_before - log D_after], the gradient for the logits, over the present losses."""
    z = tf.nn.softmax(tf.where(present, logits, -1e30))
    z = tf.where(present, z, 0.0)
    change = tf.where(present, tf.math.log(before) - tf.math.log(after), 0.0)
    return z * (change - tf.reduce_sum(z * change))
