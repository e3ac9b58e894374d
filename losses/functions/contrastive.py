"""Losses between embeddings. `info_nce` compares examples across the batch, so splitting a batch changes its value."""

import keras
import tensorflow as tf

from looptape.losses.convention import as_float, loss_function, require


def check_info_nce(temperature, **_):
    require(temperature > 0, f"`temperature` is {temperature}", "above 0", "The usual range is 0.05 to 0.5.")


@loss_function(check=check_info_nce)
def info_nce(targets, outputs, *, temperature=0.1, symmetric=False):
    """Cross-entropy [batch] of finding each example's partner in the batch by cosine similarity (van den Oord 2018).

    Outputs are [batch, features], and targets are their partners in the same shape. Or outputs are the pair of both,
    and targets are ignored. `symmetric` averages both directions, as CLIP does. Gradients flow to both.

    >>> one = tf.constant([[1.0, 0.0], [0.0, 1.0]])
    >>> info_nce(temperature=1.0)(one, one).numpy().round(4)
    array([0.3133, 0.3133], dtype=float32)
    """
    anchors, partners = outputs if isinstance(outputs, tuple | list) else (outputs, as_float(targets))
    require(
        anchors.shape.rank == 2 and anchors.shape.is_compatible_with(partners.shape),
        f"`info_nce` got embeddings of shapes {anchors.shape} and {partners.shape}",
        "[batch, features] twice",
        "Flatten the other axes.",
    )
    anchors, partners = tf.math.l2_normalize(anchors, -1), tf.math.l2_normalize(partners, -1)
    logits = tf.matmul(anchors, partners, transpose_b=True) / temperature
    own = tf.range(tf.shape(logits)[0])
    values = keras.losses.sparse_categorical_crossentropy(own, logits, from_logits=True)
    if not symmetric:
        return values
    back = keras.losses.sparse_categorical_crossentropy(own, tf.transpose(logits), from_logits=True)
    return 0.5 * (values + back)


def check_triplet(margin, distance):
    require(margin > 0, f"`margin` is {margin}", "above 0", "The usual range is 0.2 to 1.")
    choices = ["euclidean", "squared"]
    require(distance in choices, f"`distance` is {distance!r}", f"one of {choices}", "Choose one.")


@loss_function(check=check_triplet)
def triplet(targets, outputs, *, margin=1.0, distance="euclidean"):
    """max(d(anchor, positive) - d(anchor, negative) + margin, 0): [batch] (Schroff 2015).

    Outputs are three tensors [batch, features], or one [batch, 3, features]; targets are ignored.

    >>> outputs = (tf.constant([[0.0]]), tf.constant([[1.0]]), tf.constant([[1.5]]))
    >>> triplet(None, outputs).numpy().tolist()
    [0.5]
    """
    if not isinstance(outputs, tuple | list):
        require(
            outputs.shape.rank == 3 and outputs.shape[1] == 3,
            f"`triplet` got one tensor of shape {outputs.shape}",
            "three tensors, or one of shape [batch, 3, features]",
            "Stack anchor, positive and negative on axis 1.",
        )
        outputs = tf.unstack(outputs, axis=1)
    require(
        len(outputs) == 3,
        f"`triplet` got {len(outputs)} tensors",
        "three",
        "Give anchor, positive and negative.",
    )
    anchor, positive, negative = outputs
    near, far = (tf.reduce_sum(tf.square(anchor - other), axis=-1) for other in (positive, negative))
    if distance == "euclidean":
        # The root has no gradient at 0: below 1e-12 the distance is constant.
        near, far = (tf.sqrt(tf.maximum(square, 1e-12)) for square in (near, far))
    return tf.maximum(near - far + margin, 0.0)
