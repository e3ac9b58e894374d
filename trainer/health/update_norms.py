"""Norms of every variable in one update: gradient, weight, what the optimizer really changed, exact zeros. Traced."""

import tensorflow as tf

from looptape.trainer.probing import taps

ROWS = ("gradient", "weight", "ratio", "zeros")


def copies(read, variables):
    """The values of the variables before they are written. TensorFlow copies a value only when it is overwritten."""
    return [read(variable) for variable in variables]


def measure(gradients, before, after):
    """[4, variables] in float32, in the order of `ROWS`.

    Args:
        gradients: of the whole update, before clipping; dense, or sparse with each index once.
        before: values of the variables before the update.
        after: values after it. Where the update was skipped they are the same, and the ratio is 0.
    """
    norms = taps.stack_norms([_values(gradient) for gradient in gradients])
    weights = taps.stack_norms(before)
    changes = taps.stack_norms([new - old for new, old in zip(after, before, strict=True)])
    zeros = tf.stack([zero_fraction(gradient, old) for gradient, old in zip(gradients, before, strict=True)])
    # A weight that is 0, such as a new bias, has no ratio yet.
    ratios = tf.where(weights > 0, changes / weights, tf.where(changes > 0, float("inf"), 0.0))
    return tf.stack([norms, weights, ratios, zeros])


def zero_fraction(gradient, weight):
    """The fraction of exact zeros in a gradient; rows that a sparse gradient does not name are zeros."""
    zeros = tf.reduce_sum(tf.cast(tf.equal(_values(gradient), 0), tf.float32))
    if not isinstance(gradient, tf.IndexedSlices):
        return zeros / tf.cast(tf.size(gradient), tf.float32)
    size = tf.cast(tf.size(weight), tf.float32)
    missing = size - tf.cast(tf.size(gradient.values), tf.float32)
    return (zeros + missing) / size


def _values(gradient):
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
