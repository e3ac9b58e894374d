"""A smooth maximum of the losses: STCH."""

import tensorflow as tf

from looptape.losses.combiners.base import Combiner
from looptape.losses.combiners.by_value.learned import is_finite
from looptape.losses.convention import require


class STCH(Combiner):
    """Smooth Tchebycheff scalarization (Lin 2024): mu log sum exp(w (L - z) / mu), a smooth maximum of the losses.

    Unlike a weighted sum, it can reach every point of a non-convex Pareto front by a choice of weights. The
    coefficients are its gradient, w softmax(w (L - z) / mu); they sum to less than 1. L are the statically weighted
    losses. If losses differ in scale, set static weights or `preferences`; otherwise the same loss always dominates.

    Args:
        mu: Smoothness; as it approaches 0, the largest loss gets all the weight.
        preferences: {name: weight}; 1 / K for missing names.
        reference: Best possible values z of the weighted losses: one number, or a dict by loss name (0 for missing
            names).

    >>> combiner = STCH(mu=1.0)
    >>> combiner.build(["a", "b", "c"])
    >>> combiner.coefficients(tf.constant([1.0, 2.0, 4.0]), None, None).numpy().round(4)
    array([0.0652, 0.091 , 0.1772], dtype=float32)
    """

    name = "stch"
    needs = "losses"
    minimum_losses = 2
    weighs_losses = True

    def __init__(self, mu=0.1, preferences=None, reference=0.0, **guards):
        super().__init__(**guards)
        require(mu > 0, f"`mu` is {mu}", "above 0", "The default is 0.1.")
        given = dict(preferences or {})
        positive = all(is_finite(value) and value > 0 for value in given.values())
        require(positive, f"`preferences` is {preferences}", "numbers above 0, by loss", "Leave it out for equal ones.")
        bounds = reference.values() if isinstance(reference, dict) else [reference]
        advice = "The default is 0."
        require(all(map(is_finite, bounds)), f"`reference` is {reference!r}", "finite, one number or by loss", advice)
        self.mu = mu
        self.preferences = given
        self.reference = dict(reference) if isinstance(reference, dict) else reference

    def create(self, count):
        named = {
            "preferences": self.preferences,
            "reference": self.reference if isinstance(self.reference, dict) else {},
        }
        for argument, values in named.items():
            unknown = [name for name in values if name not in self.names]
            wanted = f"among the losses {list(self.names)}"
            require(not unknown, f"`{argument}` names {unknown}", wanted, "Correct the names.")

    def propose(self, losses, present, measured):
        return stch(losses - self._reference(), self._preferences(present), self.mu, present)[1]

    def total(self, losses, coefficients, static=None, present=None):
        present = self._mask(present)
        heights = self._static(static, present) * self._clean(losses, present) - self._reference()
        return stch(heights, self._preferences(present), self.mu, present)[0]

    def _preferences(self, present):
        count = tf.maximum(tf.reduce_sum(tf.cast(present, tf.float32)), 1.0)
        given = tf.constant([float(self.preferences.get(name, 0.0)) for name in self.names])
        return tf.where(given > 0, given, 1.0 / count)

    def _reference(self):
        if isinstance(self.reference, dict):
            return tf.constant([float(self.reference.get(name, 0.0)) for name in self.names])
        return tf.constant(float(self.reference))


def stch(heights, weights, mu, present):
    """mu log sum exp(w h / mu) over the present losses, and its gradient with respect to each.

    >>> value, gradient = stch(tf.constant([1.0, 2.0, 4.0]), tf.fill([3], 1 / 3), 1.0, tf.ones([3], tf.bool))
    >>> round(float(value), 4), gradient.numpy().round(4)
    (1.9653, array([0.0652, 0.091 , 0.1772], dtype=float32))
    """
    logits = tf.where(present, weights * heights / mu, -1e30)
    value = tf.where(tf.reduce_any(present), mu * tf.reduce_logsumexp(logits), 0.0)
    return value, tf.where(present, weights * tf.nn.softmax(logits), 0.0)
