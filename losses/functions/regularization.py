"""Penalties on the outputs of a model. Targets are ignored."""

import tensorflow as tf

from looptape.losses.convention import loss_function, require


def check_power(power):
    require(power in (1, 2), f"`power` is {power}", "1 or 2", "1 makes activities sparse, 2 keeps them small.")


@loss_function(check=check_power)
def activity(targets, outputs, *, power=2):
    """The mean over the last axis of `|output|^power`: one value per example, or per time step.

    >>> activity(power=1)(None, tf.constant([[1.0, -3.0]])).numpy().tolist()
    [2.0]
    """
    values = tf.abs(outputs) if power == 1 else tf.square(outputs)
    return tf.reduce_mean(values, axis=-1) if values.shape.rank > 1 else values


def check_order(order):
    require(order in (1, 2), f"`order` is {order}", "1 or 2", "1 penalises slopes, 2 penalises curvature.")


@loss_function(check=check_order)
def temporal_smoothness(targets, outputs, *, order=1):
    """The squared change from one time step to the next, mean over the features, for outputs [batch, time, ...].

    Returns values and weights [batch, time]. Each time step is compared with those before it, so the first
    `order` time steps have weight 0. `order=2` penalises the change of the change.

    >>> values, weights = temporal_smoothness(None, tf.constant([[[1.0], [3.0], [3.0]]]))
    >>> values.numpy().tolist(), weights.numpy().tolist()
    ([[0.0, 4.0, 0.0]], [[0.0, 1.0, 1.0]])
    """
    require(
        outputs.shape.rank is not None and outputs.shape.rank >= 2,
        f"`temporal_smoothness` got outputs of shape {outputs.shape}",
        "[batch, time, ...]",
        "Return the whole sequence from the layer.",
    )
    change = outputs
    for _ in range(order):
        change = change[:, 1:] - change[:, :-1]
    values = tf.reduce_mean(tf.square(change), axis=list(range(2, outputs.shape.rank)))
    missing = tf.shape(outputs)[1] - tf.shape(values)[1]
    pad = [[0, 0], [missing, 0]]
    return tf.pad(values, pad), tf.pad(tf.ones_like(values), pad)
