"""Losses for regression: the mean over the last axis, as in Keras, so [batch, features] becomes [batch]."""

import math

import keras
import tensorflow as tf

from looptape.losses.convention import aligned, loss_function, require


@loss_function
def squared_error(targets, outputs):
    """The squared error, mean over the last axis. [batch] and [batch, 1] give [batch].

    >>> squared_error(tf.constant([[0.0, 1.0]]), tf.constant([[2.0, 1.0]])).numpy().tolist()
    [2.0]
    """
    return keras.losses.mean_squared_error(*aligned(targets, outputs, "squared_error"))


@loss_function
def absolute_error(targets, outputs):
    """The absolute error, mean over the last axis.

    >>> absolute_error(tf.constant([[0.0, 1.0]]), tf.constant([[2.0, 1.0]])).numpy().tolist()
    [1.0]
    """
    return keras.losses.mean_absolute_error(*aligned(targets, outputs, "absolute_error"))


def check_delta(delta):
    require(delta > 0, f"`delta` is {delta}", "above 0", "It is the error at which the loss becomes linear.")


@loss_function(check=check_delta)
def huber(targets, outputs, *, delta=1.0):
    """Half the squared error up to `delta` and linear beyond; mean over the last axis.

    >>> huber(delta=2.0)(tf.constant([0.0, 0.0]), tf.constant([1.0, 4.0])).numpy().tolist()
    [0.5, 6.0]
    """
    return keras.losses.huber(*aligned(targets, outputs, "huber"), delta=delta)


@loss_function
def log_cosh(targets, outputs):
    """log(cosh(error)), mean over the last axis: half the squared error if small, the absolute error if large.

    >>> log_cosh(tf.constant([0.0]), tf.constant([1.0])).numpy().round(4)
    array([0.4338], dtype=float32)
    """
    targets, outputs = aligned(targets, outputs, "log_cosh")
    error = outputs - targets
    # cosh(x) = 1 + 2 sinh(x / 2)^2 keeps small errors, which |x| + log(1 + exp(-2 |x|)) - log(2) rounds away.
    near = tf.math.log1p(2.0 * tf.square(tf.sinh(0.5 * tf.clip_by_value(error, -1.0, 1.0))))
    size = tf.abs(error)
    far = size + tf.math.log1p(tf.exp(-2.0 * size)) - math.log(2.0)
    return tf.reduce_mean(tf.where(size < 1.0, near, far), axis=-1)


def check_level(level):
    require(0 < level < 1, f"`level` is {level}", "between 0 and 1", "Use 0.5 for the median.")


@loss_function(check=check_level)
def quantile(targets, outputs, *, level=0.5):
    """The pinball loss, which is minimal at the given quantile of the targets; mean over the last axis.

    >>> quantile(level=0.9)(tf.constant([1.0, 0.0]), tf.constant([0.0, 1.0])).numpy().round(4).tolist()
    [0.8999999761581421, 0.10000000149011612]
    """
    targets, outputs = aligned(targets, outputs, "quantile")
    error = targets - outputs
    return tf.reduce_mean(tf.maximum(level * error, (level - 1.0) * error), axis=-1)
