"""Losses for padded sequences. The masked losses return the pair (values, weights), with weight 0 at padding.

A special target value marks the padding, or the targets are the pair `(targets, mask)` with a [batch, time]
mask.
"""

import math

import keras
import tensorflow as tf

from looptape.losses.convention import aligned, loss_function, require
from looptape.losses.functions.classification import check_smoothing, class_numbers, in_range, sparse
from looptape.losses.functions.regression import squared_error


@loss_function(check=check_smoothing)
def masked_cross_entropy(targets, outputs, *, padding=0, from_logits=True, label_smoothing=0.0):
    """Cross-entropy per token: labels [batch, time] against outputs [batch, time, classes].

    Returns values and weights [batch, time]. Tokens equal to `padding` do not count. With `padding=None` all tokens
    count, unless the targets are the pair `(targets, mask)`. Labels and outputs at padding are ignored, even if they
    are NaN. All other labels must be in the class range.

    >>> values, weights = masked_cross_entropy(tf.constant([[1, 0]]), tf.zeros([1, 2, 2]))
    >>> values.numpy().round(4), weights.numpy()
    (array([[0.6931, 0.    ]], dtype=float32), array([[1., 0.]], dtype=float32))
    """
    check_rank(outputs, "masked_cross_entropy", "[batch, time, classes]")
    targets, mask = with_mask(targets)
    targets = class_numbers(targets, outputs)
    if padding is not None:
        mask = mask & tf.not_equal(tf.cast(targets, tf.int64), tf.cast(padding, tf.int64))  # -1 is 255 as uint8
    targets = tf.where(mask, targets, tf.zeros_like(targets))
    values = sparse(targets, hidden(outputs, mask), from_logits, label_smoothing, "masked_cross_entropy")
    return masked(values, mask)


@loss_function
def masked_squared_error(targets, outputs, *, padding=math.nan):
    """Squared error per time step, mean over the features; both are [batch, time, features] or [batch, time].

    Returns values and weights [batch, time]. A time step does not count if any feature of its target equals
    `padding` (NaN by default). With `padding=None` all time steps count, unless the targets are the pair
    `(targets, mask)`.

    >>> nan = float("nan")
    >>> values, weights = masked_squared_error(tf.constant([[1.0, nan]]), tf.constant([[3.0, 5.0]]))
    >>> values.numpy(), weights.numpy()
    (array([[4., 0.]], dtype=float32), array([[1., 0.]], dtype=float32))
    """
    check_rank(outputs, "masked_squared_error", "[batch, time, features]")
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
    require(blank >= 0, f"`blank` is {blank}", "the number of a class, at least 0", "Keras uses 0.")


@loss_function(check=check_blank)
def ctc(targets, outputs, *, blank=0):
    """Connectionist temporal classification: -log p of the labels over all alignments, [batch].

    Targets are labels [batch, length], padded with `blank`; outputs are logits [batch, time, classes]. If the
    outputs are padded too, pass the targets as the pair `(labels, output_lengths)` with the number of valid time
    steps [batch]; later logits are ignored, even if they are NaN. Labels outside the class range raise an error,
    and so does a blank before a label. XLA cannot raise: there labels are not checked, and a blank before a label
    gives NaN, so that the update is skipped.

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
    labels = without_blanks_inside(labels, blank)
    outputs = hidden(outputs, tf.sequence_mask(lengths, tf.shape(outputs)[1]))
    values = keras.ops.ctc_loss(labels, outputs, label_lengths, tf.cast(lengths, tf.int32), mask_index=blank)
    # Where XLA cannot raise, the gradient must be NaN, too.
    return values * tf.where(has_blanks_inside(labels, blank), math.nan, tf.ones([], values.dtype))


def without_blanks_inside(labels, blank):
    """Returns the labels. Raises if a label follows a blank: blanks are padding, so the rest would be cut off.

    >>> without_blanks_inside(tf.constant([[2, 1, 0]]), 0).numpy().tolist()
    [[2, 1, 0]]
    """
    inside = tf.reduce_any(has_blanks_inside(labels, blank))
    message = (
        f"The labels of loss 'ctc' have the blank, {blank}, before another label; blanks must only be at the end, as "
        "padding. Remove it from the labels, or set `blank` to a class that is not used as a label."
    )
    if tf.executing_eagerly():
        if bool(inside):
            raise ValueError(message)
        return labels
    with tf.control_dependencies([tf.debugging.Assert(~inside, [message])]):
        return tf.identity(labels)


def has_blanks_inside(labels, blank):
    """Returns [batch], whether a label follows a blank.

    >>> has_blanks_inside(tf.constant([[2, 1, 0], [2, 0, 1]]), 0).numpy().tolist()
    [False, True]
    """
    is_blank = tf.equal(labels, blank)
    return tf.reduce_any(is_blank[:, :-1] & ~is_blank[:, 1:], axis=-1)


def check_rank(outputs, name, needed):
    """Raises if the outputs have more than three axes: a mask [batch, time] would broadcast to the wrong ones."""
    rank = outputs.shape.rank
    advice = "Flatten the other axes."
    require(rank is not None and rank <= 3, f"`{name}` got outputs of shape {outputs.shape}", needed, advice)


def with_mask(targets):
    """Returns the targets and their bool [batch, time] mask, all True if none was given.

    A mask [batch, time, 1] loses its last axis. Any other shape raises an error, even one that would broadcast.
    """
    if isinstance(targets, tuple | list):
        targets, mask = (tf.convert_to_tensor(part) for part in targets)
        given = mask.shape
        if given.rank == 3 and given[-1] == 1:
            mask = mask[..., 0]
        require(
            mask.shape.rank == 2 and mask.shape.is_compatible_with(targets.shape[:2]),
            f"The mask has shape {given} and the targets {targets.shape}",
            "[batch, time], as the targets' first two axes",
            "For whole sequences use a sample weight, or repeat the mask along the time axis.",
        )
        return targets, tf.cast(mask, tf.bool)
    targets = tf.convert_to_tensor(targets)
    return targets, tf.ones(tf.shape(targets)[:2], tf.bool)


def hidden(tensor, mask):
    """Returns the tensor [batch, time, ...] with 1 at masked positions.

    NaN at padding must be removed before the loss: weight 0 removes it from the value, but the gradient would be 0
    times NaN. 1 is valid as a logit, a probability and an output.
    """
    shown = tf.where(mask[..., tf.newaxis], tensor, tf.ones_like(tensor))
    if hasattr(tensor, "_keras_logits"):  # with which Keras computes the cross-entropy of a softmax exactly
        shown._keras_logits = hidden(tensor._keras_logits, mask)
    return shown


def masked(values, mask):
    """Returns the values, 0 where masked, and the mask as weights."""
    weights = tf.cast(mask, values.dtype)
    return tf.where(mask, values, tf.zeros_like(values)), weights
