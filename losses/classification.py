"""Losses for classification. Outputs are logits by default; set `from_logits=False` for probabilities.

The categorical ones give one value per element ([batch, classes] gives [batch]); the binary ones the mean
over the last axis, as in Keras.
"""

import keras
import tensorflow as tf

from losses.function import aligned, loss_function, require


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
    """Cross-entropy with class numbers [batch, ...] or [batch, ..., 1] against [batch, ..., classes].

    A label that is no class number is an error.

    >>> sparse_categorical_cross_entropy(tf.constant([1]), tf.constant([[0.0, 0.0]])).numpy().round(4)
    array([0.6931], dtype=float32)
    """
    return sparse(targets, outputs, from_logits, label_smoothing, "sparse_categorical_cross_entropy")


@loss_function(check=check_smoothing)
def categorical_cross_entropy(targets, outputs, *, from_logits=True, label_smoothing=0.0):
    """Cross-entropy with a distribution over the classes as targets, both [batch, ..., classes].

    >>> loss = categorical_cross_entropy(label_smoothing=0.1)
    >>> loss(tf.constant([[0.0, 1.0]]), tf.constant([[0.0, 2.0]])).numpy().round(4)
    array([0.2269], dtype=float32)
    """
    targets, outputs = aligned(targets, outputs, "categorical_cross_entropy")
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
    """Binary cross-entropy times (1 - p)^gamma, p that of the truth: easy examples count less (Lin 2017).

    `alpha` is the weight of the class 1, and 1 - alpha that of the class 0. Mean over the last axis.

    >>> binary_focal(tf.constant([1.0]), tf.constant([0.0])).numpy().round(4)
    array([0.1733], dtype=float32)
    """
    targets, outputs = aligned(targets, outputs, "binary_focal")
    return keras.losses.binary_focal_crossentropy(
        targets,
        outputs,
        apply_class_balancing=alpha is not None,
        alpha=0.5 if alpha is None else alpha,
        gamma=gamma,
        from_logits=from_logits,
        label_smoothing=label_smoothing,
    )


@loss_function(check=check_focal)
def categorical_focal(targets, outputs, *, gamma=2.0, alpha=None, from_logits=True, label_smoothing=0.0):
    """Categorical cross-entropy times alpha (1 - p)^gamma; targets as distributions. `alpha=None` is 1.

    Logits keep their gradient however wrong they are; of probabilities what is nearer to 0 or 1 than 1e-7 has none.

    >>> categorical_focal(tf.constant([[0.0, 1.0]]), tf.constant([[0.0, 0.0]])).numpy().round(4)
    array([0.1733], dtype=float32)
    """
    targets, outputs = aligned(targets, outputs, "categorical_focal")
    if label_smoothing:
        targets = smoothed(targets, label_smoothing)
    values = focal(targets, log_probabilities(outputs, from_logits), gamma)
    return values if alpha is None else alpha * values


def focal(targets, logs, gamma):
    """-sum of t (1 - p)^gamma log p over the last axis, p of the given logarithms. A class with t = 0 counts 0."""
    # 0 times the logarithm of a class that was ruled out, -inf, is not a number otherwise.
    entropies = -tf.math.multiply_no_nan(logs, targets)
    if not gamma:
        return tf.reduce_sum(entropies, axis=-1)
    # Below 1 a power has no finite slope at 0, where p is 1 and the loss is flat.
    distance = tf.maximum(-tf.math.expm1(logs), 1e-30)
    return tf.reduce_sum(tf.pow(distance, gamma) * entropies, axis=-1)


def log_probabilities(outputs, from_logits):
    """The logarithms of the classes' probabilities. Logits are not made probabilities first: these round to 0 and 1."""
    if from_logits:
        return tf.nn.log_softmax(outputs)
    shares = outputs / tf.reduce_sum(outputs, axis=-1, keepdims=True)
    nearest = keras.config.epsilon()
    return tf.math.log(tf.clip_by_value(shares, nearest, 1.0 - nearest))


def smoothed(targets, label_smoothing):
    """Distributions mixed with the even one, of which they get the share `label_smoothing`."""
    classes = tf.cast(tf.shape(targets)[-1], targets.dtype)
    return targets * (1.0 - label_smoothing) + label_smoothing / classes


@loss_function
def hinge(targets, outputs):
    """max(1 - t y, 0), mean over the last axis, for targets t of -1 and 1 (0 and 1 are understood too).

    As in Keras, it depends on all targets whether 0 and 1 were meant: a batch of ones only reads the same
    either way.

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
    """Cross-entropy with class numbers, under the name of the loss that wants it."""
    numbers = class_numbers(targets, outputs)
    if not label_smoothing:  # TensorFlow looks at the labels itself
        return keras.losses.sparse_categorical_crossentropy(numbers, outputs, from_logits=from_logits)
    targets = one_hot(in_range(numbers, outputs, name), outputs)
    return categorical_cross_entropy(targets, outputs, from_logits=from_logits, label_smoothing=label_smoothing)


def class_numbers(targets, outputs):
    """Integer targets with one axis less than the outputs."""
    targets = tf.convert_to_tensor(targets)
    if targets.shape.rank == outputs.shape.rank and targets.shape[-1] == 1:
        targets = tf.squeeze(targets, -1)
    fits = targets.shape.rank == outputs.shape.rank - 1 and targets.shape.is_compatible_with(outputs.shape[:-1])
    require(
        fits,
        f"The class numbers have shape {targets.shape} and the outputs {outputs.shape}",
        "the outputs' shape without its last axis",
        "For one-hot targets use `categorical_cross_entropy`.",
    )
    return targets if targets.dtype.is_integer else tf.cast(targets, tf.int32)


def one_hot(numbers, outputs):
    """Class numbers as distributions like the outputs."""
    return tf.one_hot(numbers, tf.shape(outputs)[-1], dtype=outputs.dtype)


def in_range(numbers, outputs, name, counted=True):
    """The class numbers; an error if one that is `counted` (a bool tensor like them) is none of the outputs' classes.

    Traced, the error comes when the update runs; compiled by XLA, which has no errors, never.

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
    data = [f"A label of loss {name!r} is no class number; {needed}", tf.cast(worst, tf.int32)]
    with tf.control_dependencies([tf.debugging.Assert(~tf.reduce_any(outside), data)]):
        return tf.identity(numbers)
