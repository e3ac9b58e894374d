"""From the values of one loss to its share of an update: a weighted sum and the divisor that belongs to it.

The value of a loss over an update is Σ w·l / Σ w over *all* elements of the update, whatever the number of
micro-batches or replicas it was computed in. Sums and divisors add up over those parts; means do not. So a part
reports the two apart, and the division happens once, at the end.
"""

import math
from typing import Any, NamedTuple

import tensorflow as tf


class Summed(NamedTuple):
    """Marks a loss as a plain sum over the update's elements instead of a weighted mean.

    Return `summed(values)` from `compute_losses`, or pass `summed(loss)` in `losses`.
    """

    values: Any
    weights: Any = None


def summed(loss, weights=None):
    """Asks for Σ w·l instead of Σ w·l / Σ w.

    Args:
        loss: values of a loss (a tensor), or a loss function `callable(targets, outputs)`.
        weights: weights of the elements, only with values.

    Example:

    >>> summed(tf.constant([1.0, 2.0])).values.numpy().tolist()
    [1.0, 2.0]
    """
    if not callable(loss) or isinstance(loss, tf.Tensor | tf.Variable):
        return Summed(loss, weights)

    def summed_loss(targets, outputs):
        result = loss.call(targets, outputs) if hasattr(loss, "call") else loss(targets, outputs)
        return Summed(*result) if isinstance(result, tuple) else Summed(result)

    summed_loss.__name__ = getattr(loss, "__name__", type(loss).__name__)
    return summed_loss


class Term(NamedTuple):
    """One loss in one micro-batch.

    `divisor_key` is equal for terms whose divisors are proportional to each other in every micro-batch;
    `ratio` is the factor: divisor = ratio · (the divisor of the group). Terms of one group can share one gradient
    accumulator; others cannot, if accumulation is to equal the large batch.
    """

    sum: Any
    divisor: Any
    divisor_key: tuple
    ratio: float


def as_weight(weights):
    """Weights are data: float32, and no gradient flows through them."""
    return tf.stop_gradient(tf.cast(weights, tf.float32))


def _expand_to(weights, values, name):
    """Weights [batch] or [batch, time] against values of a higher rank: missing dimensions are added at the end."""
    while weights.shape.rank < values.shape.rank:
        weights = weights[..., tf.newaxis]
    if weights.shape.rank > values.shape.rank:
        squeezable = weights.shape.rank == values.shape.rank + 1 and weights.shape[-1] == 1
        if not squeezable:
            raise ValueError(
                f"The weights of loss {name!r} have shape {weights.shape}, its values {values.shape}; weights can "
                "have at most as many dimensions as the values. Reduce the weights, or return the loss unreduced."
            )
        weights = weights[..., 0]
    for have, want in zip(weights.shape, values.shape, strict=True):
        if have not in (None, 1) and want is not None and have != want:
            raise ValueError(
                f"The weights of loss {name!r} have shape {weights.shape}, which does not broadcast to its values' "
                f"shape {values.shape}. Give one weight per example, per time step or per element."
            )
    return weights


def _broadcast_divisor(weights, values):
    """(Σ w over the values' elements, ratio, whether it is ratio · Σ w of any other values with these weights).

    Elements that share a weight because it was broadcast count each. An axis of which only the run knows whether the
    weights are 1 there is looked at when it runs; if it is the first, the batch, it is as long for all values.
    """
    pairs = list(zip(weights.shape, values.shape, strict=True))
    unknown = [axis for axis, (w, v) in enumerate(pairs) if (w is None and v != 1) or (w == 1 and v is None)]
    ratio = math.prod((v for w, v in pairs if w == 1 and v is not None), start=1.0)
    total = tf.reduce_sum(weights)
    if not unknown:
        return total * ratio, ratio, True
    repeats = tf.reduce_prod(tf.where(tf.equal(tf.shape(weights), 1), tf.shape(values), 1))
    alike = unknown == [0] and pairs[0][0] is None
    return total * tf.cast(repeats, tf.float32), ratio if alike else 1.0, alike


def reduce_term(name, loss, examples):
    """Turns what a loss returned into a `Term`.

    Args:
        name: the loss's name, for errors.
        loss: a tensor of any shape whose first dimension is the batch, a scalar (weighs by examples), a pair
            `(values, weights)`, or `Summed`.
        examples: float32 scalar, the number of examples of this micro-batch.
    """
    is_sum = isinstance(loss, Summed)
    values, weights = loss if isinstance(loss, tuple) else (loss, None)
    values = tf.convert_to_tensor(values)
    if not values.dtype.is_floating:
        raise TypeError(
            f"Loss {name!r} has dtype {values.dtype.name}; a loss must be a floating-point tensor. "
            "Cast the quantities it is made of, not the loss: an integer has no gradient."
        )
    values = tf.cast(values, tf.float32)
    if values.shape.rank is None:
        raise ValueError(
            f"Loss {name!r} has an unknown number of dimensions; at least its rank must be known. "
            "Use `tf.ensure_shape` on it."
        )
    if values.shape.rank == 0:
        if weights is not None:
            raise ValueError(
                f"Loss {name!r} is a scalar with weights; weights need one value per example or element. "
                "Return the loss before its reduction."
            )
        if is_sum:
            return Term(values, tf.ones([]), ("one",), 1.0)
        return Term(values * examples, examples, ("examples",), 1.0)
    if weights is None:
        total, divisor = tf.reduce_sum(values), tf.cast(tf.size(values), tf.float32)
        per_example = values.shape[1:].num_elements()
        known = per_example is not None and per_example > 0
        key, ratio = (("examples",), float(per_example)) if known else (("own", name), 1.0)
    else:
        original = weights
        weights = as_weight(weights)
        if weights.shape.rank is None:
            raise ValueError(
                f"The weights of loss {name!r} have an unknown number of dimensions. Use `tf.ensure_shape` on them."
            )
        expanded = _expand_to(weights, values, name)
        total = tf.reduce_sum(values * expanded)
        divisor, ratio, alike = _broadcast_divisor(expanded, values)
        key = ("weights", id(original)) if alike else ("own", name)
    if is_sum:
        return Term(total, tf.ones([]), ("one",), 1.0)
    return Term(total, divisor, key, ratio)
