"""Losses for padded sequences. The masked ones give the pair (values, weights), weight 0 at padding.

The targets tell what is padding, by a value of their own, or come as the pair `(targets, mask)` with a
[batch, time] mask.
"""

import math

import keras
import tensorflow as tf

from losses.classification import check_smoothing, class_numbers, in_range, sparse
from losses.function import aligned, loss_function, require
from losses.regression import squared_error


@loss_function(check=check_smoothing)
def masked_cross_entropy(targets, outputs, *, padding=0, from_logits=True, label_smoothing=0.0):
    """Cross-entropy per token: class numbers [batch, time] against [batch, time, classes].

    Gives values and weights [batch, time]. Tokens equal to `padding` do not count; with `padding=None` all
    do, unless the targets are the pair `(targets, mask)`. What does not count may be any number on both
    sides, also none (NaN); what counts must be a class number.

    >>> values, weights = masked_cross_entropy(tf.constant([[1, 0]]), tf.zeros([1, 2, 2]))
    >>> values.numpy().round(4), weights.numpy()
    (array([[0.6931, 0.    ]], dtype=float32), array([[1., 0.]], dtype=float32))
    """
    targets, mask = with_mask(targets)
    targets = class_numbers(targets, outputs)
    if padding is not None:
        mask = mask & tf.not_equal(targets, tf.cast(padding, targets.dtype))
    targets = tf.where(mask, targets, tf.zeros_like(targets))
    values = sparse(targets, hidden(outputs, mask), from_logits, label_smoothing, "masked_cross_entropy")
    return masked(values, mask)


@loss_function
def masked_squared_error(targets, outputs, *, padding=math.nan):
    """Squared error per time step, mean over the features: both [batch, time, features], or [batch, time].

    Gives values and weights [batch, time]. A time step with a target equal to `padding` (NaN by default) in
    any feature does not count, whatever the output is there; with `padding=None` all do, unless the targets
    are the pair `(targets, mask)`.

    >>> nan = float("nan")
    >>> values, weights = masked_squared_error(tf.constant([[1.0, nan]]), tf.constant([[3.0, 5.0]]))
    >>> values.numpy(), weights.numpy()
    (array([[4., 0.]], dtype=float32), array([[1., 0.]], dtype=float32))
    """
    targets, mask = with_mask(targets)
    if targets.shape.rank == 2:
        targets = targets[..., tf.newaxis]
    if outputs.shape.rank == 2:
        outputs = outputs[..., tf.newaxis]
    targets, outputs = aligned(targets, outputs, "masked_squared_error")
    if padding is not None:
        is_padding = tf.math.is_nan(targets) if math.isnan(padding) else tf.equal(targets, padding)
        mask = mask & ~tf.reduce_any(is_padding, axis=-1)
    return masked(squared_error(hidden(targets, mask), hidden(outputs, mask)), mask)


def check_blank(blank):
    require(blank >= 0, f"`blank` is {blank}", "a class number, at least 0", "Keras uses 0.")


@loss_function(check=check_blank)
def ctc(targets, outputs, *, blank=0):
    """Connectionist temporal classification: [batch], -log p of the labels in any alignment.

    Targets are labels [batch, length], padded with `blank`; outputs are logits [batch, time, classes]. If
    the outputs are padded too, pass the targets as the pair `(labels, output_lengths)` with the [batch]
    number of valid time steps. A label that is no class number is an error.

    >>> logits = tf.math.log(tf.constant([[[0.3, 0.7], [0.6, 0.4]]]))
    >>> ctc(tf.constant([[1]]), logits).numpy().round(4)  # -ln(.7 * .6 + .7 * .4 + .3 * .4)
    array([0.1985], dtype=float32)
    """
    labels, lengths = targets if isinstance(targets, tuple | list) else (targets, None)
    labels = tf.cast(labels, tf.int32)
    fits = labels.shape.rank == 2 and outputs.shape.rank == 3
    require(
        fits,
        f"`ctc` got labels of shape {labels.shape} and outputs of shape {outputs.shape}",
        "[batch, length] and [batch, time, classes]",
        "Add the missing axes.",
    )
    classes = outputs.shape[-1]
    require(
        classes is None or blank < classes,
        f"`blank` of `ctc` is {blank}, and the outputs have {classes} classes",
        f"one of the classes, {'at most ' + str(classes - 1) if classes else 'from 0 on'}",
        "Make the last layer one wider than there are labels, or correct `blank`.",
    )
    if lengths is None:
        lengths = tf.fill(tf.shape(outputs)[:1], tf.shape(outputs)[1])
    label_lengths = tf.reduce_sum(tf.cast(tf.not_equal(labels, blank), tf.int32), axis=-1)
    labels = in_range(labels, outputs, "ctc", tf.sequence_mask(label_lengths, tf.shape(labels)[1]))
    return keras.ops.ctc_loss(labels, outputs, label_lengths, tf.cast(lengths, tf.int32), mask_index=blank)


def with_mask(targets):
    """The targets and their bool [batch, time] mask, all True if none was given."""
    if isinstance(targets, tuple | list):
        targets, mask = targets
        return tf.convert_to_tensor(targets), tf.cast(mask, tf.bool)
    targets = tf.convert_to_tensor(targets)
    return targets, tf.ones(tf.shape(targets)[:2], tf.bool)


def hidden(tensor, mask):
    """The tensor [batch, time, ...] with 1 where masked.

    What is not a number at padding must be gone before the loss: weight 0 removes it from the value, but its
    gradient, 0 times NaN, is none either. (1 is a logit, a probability and an output that every loss can take.)
    """
    shown = tf.where(mask[..., tf.newaxis], tensor, tf.ones_like(tensor))
    if hasattr(tensor, "_keras_logits"):  # with which Keras computes the cross-entropy of a softmax exactly
        shown._keras_logits = hidden(tensor._keras_logits, mask)
    return shown


def masked(values, mask):
    """Values, 0 where masked, and the mask as weights."""
    weights = tf.cast(mask, values.dtype)
    return tf.where(mask, values, tf.zeros_like(values)), weights
