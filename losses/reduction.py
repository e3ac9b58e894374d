"""Reduces the values of one loss to a weighted sum and its divisor.

The value of a loss over an update is Σ w·l / Σ w over *all* elements of the update, however many micro-batches or
replicas computed it. Sums and divisors add up over those parts; means do not. So each part reports the sum and the
divisor separately, and the division happens once, at the end.
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
    """Makes a loss a weighted sum, Σ w·l, instead of a weighted mean, Σ w·l / Σ w.

    Args:
        loss: the loss's values (a tensor), or a loss function `callable(targets, outputs)`.
        weights: one weight per element; only if `loss` is a tensor of values.

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
    summed_loss.summed_function = loss  # type: ignore[attr-defined]
    return summed_loss


class Term(NamedTuple):
    """One loss in one micro-batch.

    Terms whose divisors are proportional to each other in every micro-batch form a group and have the same
    `divisor_key`; `ratio` is the factor: divisor = ratio · (the divisor of the group). Terms of one group can share
    one gradient accumulator. Terms of different groups cannot, or accumulation would differ from the large batch.
    """

    sum: Any
    divisor: Any
    divisor_key: tuple
    ratio: float


def as_weight(weights):
    """Returns weights as float32 data, through which no gradient flows."""
    return tf.stop_gradient(tf.cast(weights, tf.float32))


def _expand_to(weights, values, name):
    """Appends axes to weights [batch] or [batch, time] until they have the rank of the values."""
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
    """Returns (Σ w over the values' elements, ratio, whether the divisor is ratio · Σ w for any values).

    A broadcast weight counts once for every element that shares it. If tracing does not show whether the weights
    have size 1 on an axis, the run checks it. If that axis is the batch, it has the same length for all values.
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


def _lacks_examples(values, examples):
    """Whether the first axis of a loss's values is known not to be the batch: its length is fixed, unlike the batch's.

    [1] is always taken for a scalar. A multiple of a batch size that is known may be a flattened [batch, time].
    """
    rows, known = values.shape[0] if values.shape.rank else None, tf.get_static_value(examples)
    if rows is None or values.shape.as_list() == [1]:
        return rows is not None
    return known is None or (rows > 0 and rows % max(int(known), 1) != 0)


def _values_per_example(values, examples):
    """How many values each example has in any micro-batch; None if that is not known."""
    rows, known, rest = values.shape[0], tf.get_static_value(examples), values.shape[1:].num_elements()
    if not rest or (rows is None) != (known is None):
        return None
    if known is None:  # taken for the batch; `sums_of_group` makes sure
        return float(rest)
    return rest * rows / float(known) if known and rows else None


def check_result(name, loss):
    """Splits the result of a loss: one tensor, or a pair (values, weights)."""
    tuple_of_parts = isinstance(loss, tuple) and (len(loss) != 2 or isinstance(loss[0], list | tuple | dict))
    if isinstance(loss, list | dict) or tuple_of_parts:
        raise TypeError(
            f"Loss {name!r} is a {type(loss).__name__} of {len(loss)}; it must be one tensor, or a pair "
            "(values, weights). Add the parts up, or return each under its own name."
        )
    return loss


def padded(loss):
    """A ragged loss as a dense one, with weights of 0 for the padding; any other loss as it is."""
    values, weights = loss if isinstance(loss, tuple) else (loss, None)
    if not isinstance(values, tf.RaggedTensor):
        return loss
    counted = tf.ones_like(values, tf.float32).to_tensor()
    if weights is not None:
        weights = as_weight(weights.to_tensor() if isinstance(weights, tf.RaggedTensor) else weights)
        while weights.shape.rank < counted.shape.rank:
            weights = weights[..., tf.newaxis]
        counted *= weights
    return Summed(values.to_tensor(), counted) if isinstance(loss, Summed) else (values.to_tensor(), counted)


def reduce_term(name, loss, examples):
    """Turns the return value of a loss into a `Term`.

    Args:
        name: the loss's name, for errors.
        loss: a tensor whose first dimension is the batch, a scalar or a tensor without a batch axis, such as [1]
            (its mean is weighted by the number of examples), a pair `(values, weights)`, or `Summed`.
        examples: float32 scalar, the number of examples in this micro-batch.
    """
    is_sum = isinstance(check_result(name, loss), Summed)
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
    if weights is None and not is_sum and _lacks_examples(values, examples):
        values = tf.reduce_mean(values)  # a scalar with axes of its own, such as [1], or one value per time step
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
        ratio = _values_per_example(values, examples)
        key, ratio = (("own", name), 1.0) if ratio is None else (("examples",), ratio)
    else:
        original = weights
        weights = as_weight(weights)
        if weights.shape.rank is None:
            raise ValueError(
                f"The weights of loss {name!r} have an unknown number of dimensions. Use `tf.ensure_shape` on them."
            )
        expanded = _expand_to(weights, values, name)
        total = tf.reduce_sum(tf.math.multiply_no_nan(values, expanded))  # at weight 0 it may be anything
        divisor, ratio, alike = _broadcast_divisor(expanded, values)
        key = ("weights", id(original)) if alike else ("own", name)
    if is_sum:
        return Term(total, tf.ones([]), ("one",), 1.0)
    return Term(total, divisor, key, ratio)


def sums_of_group(names, terms, ratios, raising=True):
    """[sum / ratio] of the losses of one group, which have the divisor of the first, up to their ratios.

    Tracing takes a first axis of unknown length for the batch. A loss with another number of values, such as a
    flattened [batch · time], would be divided by the wrong number: it raises when it runs, or gives NaN under XLA.

    Args:
        names: the names of the losses, for the error.
        terms: their `Term`s.
        ratios: their ratios in the plan of the update.
        raising: whether assertions run.
    """
    first, *others = terms
    unit, sums = first.divisor / ratios[0], [term.sum / ratio for term, ratio in zip(terms, ratios, strict=True)]
    for index, term in enumerate(others, 1):
        if term.divisor_key != ("examples",) or tf.get_static_value(term.divisor) is not None:
            continue  # the same weights, or shapes that are known
        same = tf.abs(term.divisor / ratios[index] - unit) <= 1e-3 * unit
        if not raising:
            sums[index] *= tf.where(same, 1.0, math.nan)  # the gradient is NaN, too: the update is skipped
            continue
        message = tf.strings.format(
            f"A loss, {names[index]!r}, has {{}} values where {names[0]!r} has {{}}; with accumulation the first axis "
            "of both must be the batch. Return it as [batch, …], without flattening or selecting; or, if some elements "
            "do not count, as a pair (values, weights).",
            (term.divisor, first.divisor),
        )
        with tf.control_dependencies([tf.debugging.Assert(same, [message])]):
            sums[index] = tf.identity(sums[index])
    return sums
