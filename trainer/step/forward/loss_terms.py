"""Named losses and their weighted sums in one micro-batch."""

import functools
import math
import re

import keras
import tensorflow as tf

from looptape.losses import reduction
from looptape.losses.convention import LossFunction
from looptape.losses.reduction import Summed, Term
from looptape.trainer.data import batches
from looptape.trainer.step.forward.broadcasting import check_broadcasts, expanded
from looptape.trainer.step.forward.loss_weights import REGULARIZATION

# Losses of Keras whose targets are class numbers or labels: they have another shape than the outputs.
_LABELS = (
    *("SparseCategoricalCrossentropy", "sparse_categorical_crossentropy", "CTC", "ctc", "Circle", "circle"),
    *("CategoricalGeneralizedCrossEntropy", "categorical_generalized_cross_entropy"),
)


def keras_mask(tensor):
    """The mask Keras attached to a layer's output, or None. (Keras has no public accessor.)"""
    return getattr(tensor, "_keras_mask", None)


class WeightCache:
    """mask × sample weight, made once per pair so that losses which share it also share a divisor."""

    def __init__(self):
        self._products = {}

    def get(self, mask, sample_weight):
        if mask is None or sample_weight is None:
            return sample_weight if mask is None else mask
        key = (id(mask), id(sample_weight))
        if key not in self._products:
            mask_value, weight = reduction.as_weight(mask), reduction.as_weight(sample_weight)
            while mask_value.shape.rank < weight.shape.rank:
                mask_value = mask_value[..., tf.newaxis]
            while weight.shape.rank < mask_value.shape.rank:
                weight = weight[..., tf.newaxis]
            # The pair is kept alive with the product: an id is unique only as long as its object lives.
            self._products[key] = (mask_value * weight, mask, sample_weight)
        return self._products[key][0]


def check_pair(name, loss, target, output, weight=None, running=True):
    """Complains about a target that cannot belong to an output, where that can be known when tracing.

    Returns the target; labels out of range are an error when the update runs, which costs a comparison. Those that do
    not count, by `ignore_class` or a weight of 0, may be anything. Not `running`: XLA compiles this, and cannot raise.
    """
    if not tf.is_tensor(output) or not tf.is_tensor(target):
        return target
    rows = (target.shape[0], output.shape[0]) if target.shape.rank and output.shape.rank else (None, None)
    if None not in rows and rows[0] != rows[1] and rows[0] == 1:
        raise ValueError(
            f"The loss {name!r} has a target of one row, shape {target.shape}, for an output of {rows[1]} rows, shape "
            f"{output.shape}; there must be a target for each example. Batch the targets with the inputs, or repeat it."
        )
    sparse = keras.losses.SparseCategoricalCrossentropy, keras.losses.sparse_categorical_crossentropy
    if isinstance(loss, sparse[0]) or loss is sparse[1]:
        classes, target = output.shape[-1], _where_weighted(target, weight)
        if classes is None or not running:
            return target
        ignored = getattr(loss, "ignore_class", getattr(loss, "_fn_kwargs", {}).get("ignore_class"))
        return _in_range(name, target, classes, ignored)
    known = target.shape.rank and output.shape.rank
    if known and _compares_elements(loss) and not _fit(target.shape, output.shape):
        raise ValueError(
            f"The loss {name!r} has a target of shape {target.shape} and an output of shape {output.shape}; they must "
            "agree. Check the model's last layer, or the order of the parts of a batch: (inputs, targets)."
        )
    return target


def check_metric(name, metric, target, output):
    """Complains about a target that a metric of Keras would broadcast against the output, as `check_pair` does."""
    function = getattr(metric, "_fn", None)  # of a metric that is the mean of a function
    function = keras.losses.mean_squared_error if isinstance(metric, keras.metrics.RootMeanSquaredError) else function
    if function is None or not tf.is_tensor(output) or not tf.is_tensor(target):
        return
    known, sparse = target.shape.rank and output.shape.rank, "sparse" in getattr(function, "__name__", "")
    if known and not sparse and _compares_elements(function) and not _fit(target.shape, output.shape):
        raise ValueError(
            f"The metric {name!r} has a target of shape {target.shape} and an output of shape {output.shape}; they "
            "must agree. Give the target the shape of the output, or use another metric."
        )


def _innermost(loss):
    """The loss that `summed`, `over_time` and `functools.partial` were given."""
    while True:
        inner = loss.func if isinstance(loss, functools.partial) else getattr(loss, "summed_function", None)
        if inner is None:
            return loss
        loss = inner


def _compares_elements(loss):
    """Whether it is a class or a function of Keras that wants targets like the outputs."""
    loss = _innermost(loss)
    described = type(loss) if isinstance(loss, keras.losses.Loss) else loss
    ours = str(getattr(described, "__module__", "")).startswith("keras.")
    return ours and getattr(described, "__name__", "") not in _LABELS


def _fit(first, second):
    """Whether Keras compares tensors of these shapes element by element, after it has made their ranks equal."""
    if first.rank == second.rank:
        return _broadcast(first, second)
    lower, higher = sorted((first, second), key=lambda shape: shape.rank)
    return higher.rank == lower.rank + 1 and higher[-1] in (1, None)  # else [n] meets [n, n] in a batch of n


def _broadcast(first, second):
    return all(a is None or b is None or a == b or 1 in (a, b) for a, b in zip(first, second, strict=True)) and not (
        first[-1] is not None and second[-1] is not None and first[-1] != second[-1]
    )


def _where_weighted(labels, weight):
    """The labels, 0 where the weight is 0: what stands there may be no label, of which the loss would be NaN."""
    if weight is None:
        return labels
    weight = tf.convert_to_tensor(weight)
    while weight.shape.rank < labels.shape.rank:
        weight = weight[..., tf.newaxis]
    same = weight.shape.rank == labels.shape.rank
    return tf.where(weight > 0, labels, tf.zeros_like(labels)) if same else labels


def _in_range(name, labels, classes, ignored):
    counted = labels
    if ignored is not None:
        counted = tf.where(labels == tf.cast(ignored, labels.dtype), tf.zeros_like(labels), labels)
    lowest, highest = tf.reduce_min(counted), tf.reduce_max(counted)
    worst = tf.where(lowest < 0, lowest, highest)
    message = tf.strings.format(
        f"A label of loss {name!r} is {{}}; the output has {classes} classes, so labels must lie between 0 and "
        f"{classes - 1}. Check how the labels are made.",
        worst,
    )
    fits = (tf.size(labels) == 0) | ((lowest >= 0) & (highest < tf.cast(classes, labels.dtype)))
    with tf.control_dependencies([tf.debugging.Assert(fits, [message])]):
        return tf.identity(labels)


def _not_negative(weight, running):
    """The weights of a loss; one below 0 is an error when the update runs, or NaN under XLA, which skips the update."""
    weight = tf.convert_to_tensor(weight)
    if weight.dtype == tf.bool or weight.dtype.is_unsigned:
        return weight
    if not running:
        return tf.where(weight < 0, math.nan, tf.cast(weight, tf.float32))
    lowest = tf.reduce_min(weight)
    message = tf.strings.format(
        "A sample weight is {}; weights must be 0 or more, because a loss is divided by their sum. Check how they are "
        "made; to maximise a loss, return it with a minus from `compute_losses`.",
        lowest,
    )
    with tf.control_dependencies([tf.debugging.Assert((tf.size(weight) == 0) | (lowest >= 0), [message])]):
        return tf.identity(weight)


def without_uncounted(target, weight):
    """The target with 0 for what is not finite where the weight is 0: it does not count, but 0 · NaN is NaN."""
    if weight is None or not tf.is_tensor(target) or not target.dtype.is_floating:
        return target
    counts = tf.cast(weight, tf.float32) > 0
    while counts.shape.rank is not None and target.shape.rank is not None and counts.shape.rank < target.shape.rank:
        counts = counts[..., tf.newaxis]
    if counts.shape.rank == (target.shape.rank or 0) + 1 and counts.shape[-1] == 1:
        counts = counts[..., 0]
    if counts.shape.rank is None or counts.shape.rank != target.shape.rank:
        return target
    return tf.where(tf.math.is_finite(target) | counts, target, tf.zeros_like(target))


def explain_assertion(error):
    """Raises a `ValueError` with the sentence about labels, weights or ragged inputs that belongs to an assertion."""
    found = re.search(r"(A (label of loss|loss, |sample weight is)|The weight of loss)[^\]]*", error.message)
    if found:
        raise ValueError(found[0].replace("\\", "")) from None
    batches.explain_inputs(error)


def unreduced(loss, targets, outputs):
    """The values of a loss before any reduction. A Keras loss's own reduction is set aside."""
    if isinstance(loss, keras.losses.Loss):
        dtype = loss.dtype

        def convert(x):
            return keras.ops.convert_to_tensor(x, dtype=dtype)

        return loss.call(tf.nest.map_structure(convert, targets), tf.nest.map_structure(convert, outputs))
    return loss(*same_rank(loss, targets, outputs))


def same_rank(loss, targets, outputs):
    """Targets and outputs for a plain function, aligned as Keras does it: [n] and [n, 1] are both [n, 1].

    Of tensors whose ranks differ by one, the higher with a last axis of 1, [n] gets that axis; from a tensor of
    rank 3 or more it is removed. The losses of this package align by themselves.
    """
    function = getattr(loss, "summed_function", loss)
    aligns = isinstance(function, LossFunction | keras.losses.Loss)
    if aligns or not tf.is_tensor(targets) or not tf.is_tensor(outputs):
        return targets, outputs
    if targets.shape.rank is None or outputs.shape.rank is None:
        return targets, outputs
    if targets.shape.rank == outputs.shape.rank + 1 and targets.shape[-1] == 1:
        return (targets, expanded(outputs)) if outputs.shape.rank == 1 else (targets[..., 0], outputs)
    if outputs.shape.rank == targets.shape.rank + 1 and outputs.shape[-1] == 1:
        return (expanded(targets), outputs) if targets.shape.rank == 1 else (targets, outputs[..., 0])
    return targets, outputs


def apply_losses(losses, model, targets, outputs, sample_weight, running=True):
    """Each named loss on its output and target, weighted by mask × sample weight: {name: values or pair}.

    Not `running`: XLA compiles this, where labels cannot be checked.
    """
    outputs = batches.named_outputs(model, outputs)
    names = list(outputs) if isinstance(outputs, dict) else None
    if names and len(losses) > 1 and tf.is_tensor(targets):
        raise ValueError(
            f"The batch has one target of shape {targets.shape} for the losses {list(losses)} on the outputs {names}; "
            f"each needs a target of its own. Give {{{', '.join(f'{name!r}: …' for name in losses)}}}, with the same "
            "array twice if it is meant for both; or override `compute_losses`."
        )
    cache, results = WeightCache(), {}
    for name, loss in losses.items():
        output = batches.select(outputs, name, names, "loss", "output")
        target = batches.select(targets, name, names, "loss", "target")
        weight = batches.select(sample_weight, name, names, "loss", "sample weight")
        if target is None:
            raise ValueError(
                f"The batches have no targets, but the loss {name!r} needs some. Give batches (inputs, targets), or "
                "override `compute_losses`."
            )
        mask = keras_mask(output)
        target = check_pair(name, loss, target, output, weight, running)
        target = without_uncounted(without_uncounted(target, weight), mask)
        result = reduction.padded(reduction.check_result(name, unreduced(loss, target, output)))
        values, own = result if isinstance(result, tuple) else (result, None)
        if mask is None and tf.is_tensor(values):
            mask = keras_mask(values)
        if mask is not None and tf.is_tensor(values) and values.shape.rank < mask.shape.rank:
            mask = None  # the loss has already summed the masked dimension away
        weight = cache.get(mask, weight)
        weight = cache.get(own, weight)
        if isinstance(result, Summed):
            results[name] = Summed(values, weight)
        else:
            results[name] = values if weight is None else (values, weight)
    return results


def make_terms(losses, examples, running=True):
    """{name: Term} from what `compute_losses` returned. Not `running`: XLA compiles this, and cannot raise."""
    if not isinstance(losses, dict):
        raise TypeError(
            f"`compute_losses` returned {type(losses).__name__}; it must return a dict of named losses. "
            "For a single loss return {'loss_name': tensor}."
        )
    if not losses:
        raise ValueError(
            "There are no losses: `compute_losses` returned an empty dict and the model has no losses of its own. "
            "Pass `losses={'name': loss}` to the trainer or override `compute_losses`."
        )
    terms: dict[str, Term] = {}
    checked: dict[int, tf.Tensor] = {}  # losses with the same weights share a divisor
    for name, loss in losses.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"A loss is named {name!r}; names must be non-empty strings.")
        if loss is None:
            raise ValueError(f"Loss {name!r} is None; it must be a tensor. Did the function forget its return?")
        loss = reduction.padded(reduction.check_result(name, loss))
        if isinstance(loss, tuple):
            values, weights = loss
            if weights is not None and id(weights) not in checked:
                checked[id(weights)] = _not_negative(weights, running)
            weights = checked.get(id(weights))
            loss = Summed(values, weights) if isinstance(loss, Summed) else (values, weights)
        check_broadcasts(name, loss[0] if isinstance(loss, tuple) else loss)
        terms[name] = reduction.reduce_term(name, loss, examples)
    return terms


def which_are_sums(terms):
    """[bool] of {name: `Term`}: whether it is a sum over the update, not a mean."""
    return [term.divisor_key == ("one",) for term in terms.values()]


def group_by_divisor(terms):
    """[[index, …], …]: losses whose gradients can share an accumulator, and [ratio, …] of each loss."""
    groups = {}
    for index, term in enumerate(terms.values()):
        groups.setdefault(term.divisor_key, []).append(index)
    return list(groups.values()), [term.ratio for term in terms.values()]


def safe_mean(term):
    """Σ w·l / Σ w of one loss; 0 where it has no element. Traced or eager."""
    # A divisor that is a number of elements is never 0; one that is a sum of weights may be.
    if term.divisor_key[0] in ("examples", "one"):
        return term.sum / term.divisor
    return tf.math.divide_no_nan(term.sum, term.divisor)


def with_regularization(losses, model_losses):
    """The losses of the hook, and the sum of the model's own as one more."""
    if not model_losses or not isinstance(losses, dict):
        return losses
    if REGULARIZATION in losses:
        raise ValueError(
            f"`compute_losses` returned a loss named {REGULARIZATION!r}, and the model has losses of its "
            "own (regularizers or `add_loss`), which take that name. Rename yours."
        )
    total = tf.add_n([tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in model_losses])
    return {**losses, REGULARIZATION: total}
