"""Losses for classification. Outputs are logits by default; set `from_logits=False` for probabilities.

Categorical losses return one value per element ([batch, classes] becomes [batch]); binary losses return the mean
over the last axis, as in Keras.
"""

import keras
import tensorflow as tf

from looptape.losses.convention import aligned, loss_function, require


def check_smoothing(from_logits, label_smoothing, **_):
    require(
        0 <= label_smoothing < 1,
        f"`label_smoothing` is {label_smoothing}",
        "in [0, 1)",
        "Use 0 for no smoothing.",
    )
    require(isinstance(from_logits, bool), f"`from_logits` is {from_logits!r}", "True or False", "Choose one.")


@loss_function(check=check_smoothing)
def sparse_categorical_cross_entropy(targets, outputs, *, from_logits=True, label_smoothing=0.0):
    """Cross-entropy of integer labels [batch, ...] or [batch, ..., 1] against outputs [batch, ..., classes].

    Labels outside the class range raise an error, also in traced code. XLA cannot raise, so there they are not
    checked.

    >>> sparse_categorical_cross_entropy(tf.constant([1]), tf.constant([[0.0, 0.0]])).numpy().round(4)
    array([0.6931], dtype=float32)
    """
    return sparse(targets, outputs, from_logits, label_smoothing, "sparse_categorical_cross_entropy")


@loss_function(check=check_smoothing)
def categorical_cross_entropy(targets, outputs, *, from_logits=True, label_smoothing=0.0):
    """Cross-entropy with a distribution over the classes as targets, both [batch, ..., classes].

    A class with a logit of -inf contributes 0 if its target is 0.

    >>> loss = categorical_cross_entropy(label_smoothing=0.1)
    >>> loss(tf.constant([[0.0, 1.0]]), tf.constant([[0.0, 2.0]])).numpy().round(4)
    array([0.2269], dtype=float32)
    """
    targets, outputs = aligned(targets, outputs, "categorical_cross_entropy")
    if from_logits:
        targets = smoothed(targets, label_smoothing) if label_smoothing else targets
        return focal(targets, log_probabilities(outputs, True), 0)
    return keras.losses.categorical_crossentropy(
        targets, outputs, from_logits=from_logits, label_smoothing=label_smoothing
    )


@loss_function(check=check_smoothing)
def binary_cross_entropy(targets, outputs, *, from_logits=True, label_smoothing=0.0):
    """Cross-entropy of independent yes/no targets in [0, 1], mean over the last axis; [batch] gives [batch].

    >>> binary_cross_entropy(tf.constant([1.0, 0.0]), tf.constant([0.0, 0.0])).numpy().round(4)
    array([0.6931, 0.6931], dtype=float32)
    """
    targets, outputs = aligned(targets, outputs, "binary_cross_entropy")
    return keras.losses.binary_crossentropy(targets, outputs, from_logits=from_logits, label_smoothing=label_smoothing)


def check_focal(gamma, alpha, **smoothing):
    check_smoothing(**smoothing)
    require(gamma >= 0, f"`gamma` is {gamma}", "at least 0", "The paper's is 2; 0 is plain cross-entropy.")
    require(alpha is None or 0 < alpha < 1, f"`alpha` is {alpha}", "between 0 and 1", "Use None for no balance.")


@loss_function(check=check_focal)
def binary_focal(targets, outputs, *, gamma=2.0, alpha=None, from_logits=True, label_smoothing=0.0):
    """Binary cross-entropy times (1 - p)^gamma, where p is the probability of the true class (Lin 2017).

    Easy examples count less. `alpha` weights class 1, 1 - alpha weights class 0. Mean over the last axis. The
    gradient is finite for every gamma and every finite output.

    >>> binary_focal(tf.constant([1.0]), tf.constant([0.0])).numpy().round(4)
    array([0.1733], dtype=float32)
    """
    targets, outputs = aligned(targets, outputs, "binary_focal")
    if label_smoothing:
        targets = targets * (1.0 - label_smoothing) + 0.5 * label_smoothing
    values = keras.ops.binary_crossentropy(targets, outputs, from_logits=from_logits)
    if gamma:
        # 1 - p from the logit: as a difference it rounds to 0 above a logit of 16.6.
        one, zero = (tf.sigmoid(outputs), tf.sigmoid(-outputs)) if from_logits else (outputs, 1.0 - outputs)
        values *= power(targets * zero + (1.0 - targets) * one, gamma)
    if alpha is not None:
        values *= targets * alpha + (1.0 - targets) * (1.0 - alpha)
    return tf.reduce_mean(values, axis=-1)


@loss_function(check=check_focal)
def categorical_focal(targets, outputs, *, gamma=2.0, alpha=None, from_logits=True, label_smoothing=0.0):
    """Categorical cross-entropy times alpha (1 - p)^gamma; targets are distributions. `alpha=None` means 1.

    Logits keep their gradient however wrong they are. Probabilities within 1e-7 of 0 or 1 have no gradient.

    >>> categorical_focal(tf.constant([[0.0, 1.0]]), tf.constant([[0.0, 0.0]])).numpy().round(4)
    array([0.1733], dtype=float32)
    """
    targets, outputs = aligned(targets, outputs, "categorical_focal")
    if label_smoothing:
        targets = smoothed(targets, label_smoothing)
    values = focal(targets, log_probabilities(outputs, from_logits), gamma)
    return values if alpha is None else alpha * values


def focal(targets, logs, gamma):
    """-sum of t (1 - p)^gamma log p over the last axis; `logs` are the log p. A class with t = 0 contributes 0."""
    # 0 times the logarithm of a class that was ruled out, -inf, is not a number otherwise.
    entropies = -tf.math.multiply_no_nan(logs, targets)
    if not gamma:
        return tf.reduce_sum(entropies, axis=-1)
    return tf.reduce_sum(power(-tf.math.expm1(logs), gamma) * entropies, axis=-1)


def power(distance, gamma):
    """distance^gamma with a finite slope. For gamma below 1 the slope at 0 (p = 1, a flat loss) would be infinite."""
    return tf.pow(tf.maximum(distance, 1e-30), gamma)


def log_probabilities(outputs, from_logits):
    """Log-probabilities of the classes, computed from logits directly: probabilities would round to 0 and 1."""
    if from_logits:
        return tf.nn.log_softmax(outputs)
    shares = outputs / tf.reduce_sum(outputs, axis=-1, keepdims=True)
    nearest = keras.config.epsilon()
    return tf.math.log(tf.clip_by_value(shares, nearest, 1.0 - nearest))


def smoothed(targets, label_smoothing):
    """Mixes distributions with the uniform one, whose share is `label_smoothing`."""
    classes = tf.cast(tf.shape(targets)[-1], targets.dtype)
    return targets * (1.0 - label_smoothing) + label_smoothing / classes


@loss_function
def hinge(targets, outputs):
    """max(1 - t y, 0), mean over the last axis, for targets t of -1 and 1, or 0 and 1.

    As in Keras, targets count as labels 0 and 1 only if each of them is 0 or 1.

    >>> hinge(tf.constant([1.0, -1.0]), tf.constant([0.5, 0.5])).numpy().tolist()
    [0.5, 1.5]
    """
    return keras.losses.hinge(*aligned(targets, outputs, "hinge"))


@loss_function
def categorical_hinge(targets, outputs):
    """max(1 + largest wrong output - right output, 0), for one-hot targets, both [batch, ..., classes].

    >>> categorical_hinge(tf.constant([[0.0, 1.0]]), tf.constant([[0.5, 1.0]])).numpy().tolist()
    [0.5]
    """
    return keras.losses.categorical_hinge(*aligned(targets, outputs, "categorical_hinge"))


def sparse(targets, outputs, from_logits, label_smoothing, name):
    """Cross-entropy with integer labels; `name` is the loss to name in errors."""
    numbers = class_numbers(targets, outputs)
    if not label_smoothing:  # TensorFlow looks at the labels itself
        return keras.losses.sparse_categorical_crossentropy(numbers, outputs, from_logits=from_logits)
    targets = one_hot(in_range(numbers, outputs, name), outputs)
    return categorical_cross_entropy(targets, outputs, from_logits=from_logits, label_smoothing=label_smoothing)


def class_numbers(targets, outputs):
    """Returns integer targets with one axis fewer than the outputs."""
    targets = tf.convert_to_tensor(targets)
    if targets.shape.rank == outputs.shape.rank and targets.shape[-1] == 1:
        targets = tf.squeeze(targets, -1)
    fits = targets.shape.rank == outputs.shape.rank - 1 and targets.shape.is_compatible_with(outputs.shape[:-1])
    require(
        fits,
        f"The labels have shape {targets.shape} and the outputs {outputs.shape}",
        "the outputs' shape without its last axis",
        "For one-hot targets use `categorical_cross_entropy`.",
    )
    return targets if targets.dtype.is_integer else tf.cast(targets, tf.int32)


def one_hot(numbers, outputs):
    """Returns labels one-hot encoded, in the shape and dtype of the outputs."""
    return tf.one_hot(numbers, tf.shape(outputs)[-1], dtype=outputs.dtype)


def in_range(numbers, outputs, name, counted=True):
    """Returns the labels. Raises if a `counted` one (a bool tensor of the same shape) is outside the class range.

    Traced code raises when the update runs. XLA cannot raise, so there the labels are not checked.

    >>> in_range(tf.constant([1, -1]), tf.zeros([2, 3]), "ctc", tf.constant([True, False])).numpy().tolist()
    [1, -1]
    """
    wide = tf.cast(numbers, tf.int64)  # 300 classes are not 300 as uint8
    known = outputs.shape[-1]
    classes = tf.cast(tf.shape(outputs)[-1] if known is None else known, tf.int64)
    outside = counted & ((wide < 0) | (wide >= classes))
    have = "the output has a number of classes" if known is None else f"the output has {known} classes"
    last = "that number less 1" if known is None else known - 1
    needed = f"{have}, so labels must lie between 0 and {last}. Check how the labels are made."
    if tf.executing_eagerly():
        if bool(tf.reduce_any(outside)):
            raise ValueError(f"A label of loss {name!r} is {int(wide[outside][0])}; {needed}")
        return numbers
    # The label stands beside the text, not in it: XLA cannot format, and refuses to compile what does.
    worst = tf.reduce_min(tf.where(outside, wide, tf.int32.max))
    data = [f"A label of loss {name!r} is outside the class range; {needed}", tf.cast(worst, tf.int32)]
    with tf.control_dependencies([tf.debugging.Assert(~tf.reduce_any(outside), data)]):
        return tf.identity(numbers)
