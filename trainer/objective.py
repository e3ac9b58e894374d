"""Named losses, their weights, and what they amount to in one micro-batch."""

import math

import keras
import numpy as np
import tensorflow as tf

from losses import reduction
from losses.reduction import Summed, Term
from trainer import batches

REGULARIZATION = "regularization"


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


def check_pair(name, loss, target, output):
    """Complains about a target that cannot belong to an output, where that can be known when tracing.

    Returns the target; labels out of range are an error when the update runs, which costs a comparison.
    """
    if not tf.is_tensor(output) or not tf.is_tensor(target):
        return target
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        classes = output.shape[-1]
        return target if classes is None else _in_range(name, target, classes)
    known = isinstance(loss, keras.losses.Loss) and target.shape.rank == output.shape.rank and target.shape.rank
    if known and type(loss).__module__.startswith("keras.") and not _broadcast(target.shape, output.shape):
        raise ValueError(
            f"The loss {name!r} has a target of shape {target.shape} and an output of shape {output.shape}; they must "
            "agree. Check the model's last layer, or the order of the parts of a batch: (inputs, targets)."
        )
    return target


def _broadcast(first, second):
    return all(a is None or b is None or a == b or 1 in (a, b) for a, b in zip(first, second, strict=True)) and not (
        first[-1] is not None and second[-1] is not None and first[-1] != second[-1]
    )


def _in_range(name, labels, classes):
    lowest, highest = tf.reduce_min(labels), tf.reduce_max(labels)
    worst = tf.where(lowest < 0, lowest, highest)
    message = tf.strings.format(
        f"A label of loss {name!r} is {{}}; the output has {classes} classes, so labels must lie between 0 and "
        f"{classes - 1}. Check how the labels are made.",
        worst,
    )
    fits = (tf.size(labels) == 0) | ((lowest >= 0) & (highest < tf.cast(classes, labels.dtype)))
    with tf.control_dependencies([tf.debugging.Assert(fits, [message])]):
        return tf.identity(labels)


def unreduced(loss, targets, outputs):
    """The values of a loss before any reduction. A Keras loss's own reduction is set aside."""
    if isinstance(loss, keras.losses.Loss):
        dtype = loss.dtype

        def convert(x):
            return keras.ops.convert_to_tensor(x, dtype=dtype)

        return loss.call(tf.nest.map_structure(convert, targets), tf.nest.map_structure(convert, outputs))
    return loss(targets, outputs)


def apply_losses(losses, model, targets, outputs, sample_weight):
    """Each named loss on its output and target, weighted by mask × sample weight: {name: values or pair}."""
    outputs = batches.named_outputs(model, outputs)
    names = list(outputs) if isinstance(outputs, dict) else None
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
        result = unreduced(loss, check_pair(name, loss, target, output), output)
        values, own = result if isinstance(result, tuple) else (result, None)
        mask = keras_mask(output)
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


class LossWeights:
    """The weight of each loss: a number in a variable, so that it changes without a retrace, or a schedule.

    Behaves like a dict: `trainer.loss_weights["penalty"] = 0.1` takes effect at the next update.
    """

    def __init__(self, weights, make_variable):
        self._make_variable = make_variable
        weights = dict(weights or {})
        for name, weight in weights.items():
            self._check(name, weight)
        self._given = weights
        self._schedules = {name: weight for name, weight in weights.items() if callable(weight)}
        self._variables = {}
        self.names = None

    @staticmethod
    def _check(name, weight):
        if callable(weight):
            return
        try:
            number = float(weight)
        except (TypeError, ValueError):
            raise TypeError(
                f"The weight of loss {name!r} is {weight!r}; it must be a number or a schedule: a callable that "
                "takes the step and returns a number."
            ) from None
        if not math.isfinite(number) or number < 0:
            raise ValueError(
                f"The weight of loss {name!r} is {number}; it must be finite and not negative. "
                "To maximise a quantity, return its negative from the loss."
            )

    def build(self, names):
        """Fixes the order of the losses. If any weight was given, every loss but the regularization needs one."""
        if self.names is not None:
            if list(names) != self.names:
                raise ValueError(
                    f"The losses were {self.names} and are now {list(names)}; a trainer's losses cannot change "
                    "their names. Return the same names from `compute_losses` every time."
                )
            return
        unknown = [name for name in self._given if name not in names]
        missing = [name for name in names if name not in self._given and name != REGULARIZATION]
        if unknown or (self._given and missing):
            raise ValueError(
                "Every loss needs exactly one weight. "
                f"Losses without a weight: {missing}; weights without a loss: {unknown}."
            )
        self.names = list(names)
        for name in names:
            if name not in self._schedules:
                number = np.float32(self._given.get(name, 1.0))
                self._variables[name] = self._make_variable(number, f"loss_weight_{len(self._variables)}")

    @property
    def variables(self):
        return list(self._variables.values())

    def at(self, step):
        """The weights at a step, a list of K scalars in the order of the names. Traced or eager."""
        return [
            tf.cast(tf.reshape(self._schedules[name](step), []), tf.float32)
            if name in self._schedules
            else tf.convert_to_tensor(self._variables[name])
            for name in self.names
        ]

    def scalars(self, names, step):
        """As `at`, for losses whose order is not fixed yet."""
        if self.names is not None:
            return self.at(tf.convert_to_tensor(step))
        given = [self._given.get(name, 1.0) for name in names]
        return [tf.cast(w(tf.convert_to_tensor(step)) if callable(w) else w, tf.float32) for w in given]

    def static(self):
        """{name: number} that never changes with the step: a schedule counts with the value it settles at."""
        values = {}
        for name in self.names or self._given:
            if name in self._schedules:
                schedule = self._schedules[name]
                final = getattr(schedule, "final", None)
                values[name] = float(schedule(tf.constant(10**9, tf.int64)) if final is None else final)
            else:
                values[name] = self[name]
        return values

    def replaced(self):
        """{name: (number as given, number now)} of the weights that a checkpoint or an assignment has replaced."""
        present = {name: float(variable.numpy()) for name, variable in self._variables.items()}
        given = {name: float(np.float32(self._given.get(name, 1.0))) for name in present}
        return {name: (given[name], present[name]) for name in present if given[name] != present[name]}

    def __getitem__(self, name):
        if name in self._schedules:
            return self._schedules[name]
        if self.names is None:
            return float(self._given[name]) if self._given else 1.0
        if name not in self.names:
            raise KeyError(f"There is no loss {name!r}; the losses are {self.names}.")
        return float(self._variables[name].numpy())

    def __setitem__(self, name, weight):
        self._check(name, weight)
        if callable(weight) or name in self._schedules:
            raise ValueError(
                f"The weight of loss {name!r} would change between a number and a schedule; that needs a new trace. "
                "Make a new trainer, or use a schedule that reads a variable."
            )
        if self.names is None:
            self._given[name] = float(weight)
            return
        if name not in self.names:
            raise KeyError(f"There is no loss {name!r}; the losses are {self.names}.")
        self._variables[name].assign(float(weight))

    def __iter__(self):
        return iter(self.names or self._given)

    def __len__(self):
        return len(self.names or self._given)

    def keys(self):
        return list(self)

    def __repr__(self):
        return f"LossWeights({ {name: self[name] for name in self} })"


def make_terms(losses, examples):
    """{name: Term} from what `compute_losses` returned."""
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
    for name, loss in losses.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"A loss is named {name!r}; names must be non-empty strings.")
        if loss is None:
            raise ValueError(f"Loss {name!r} is None; it must be a tensor. Did the function forget its return?")
        terms[name] = reduction.reduce_term(name, loss, examples)
    return terms


def group_by_divisor(terms):
    """[[index, …], …]: losses whose gradients can share an accumulator, and [ratio, …] of each loss."""
    groups = {}
    for index, term in enumerate(terms.values()):
        groups.setdefault(term.divisor_key, []).append(index)
    return list(groups.values()), [term.ratio for term in terms.values()]
