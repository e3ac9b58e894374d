"""Weights for the time steps of a loss: last step only, growing, discounted, or any function of time."""

import functools
import numbers

import keras
import tensorflow as tf


def over_time(loss, weights):
    """Weights the time steps of a loss. The result is still a mean: Σ w·l / Σ w over the whole update.

    With `Trainer(bptt_updates=True)`, which cuts sequences, it is refused: a window does not know where they end.

    A Keras mask on the outputs marks where each sequence ends. If the loss returns weights of its own, these mark the
    end instead and multiply the time weights.

    Args:
        loss: a loss that returns values [batch, time] or [batch, time, …], or the name of a Keras loss.
        weights: "last" (only the last valid time step of each sequence counts), "linear" (1/n, 2/n, … 1 over the n
            time steps of the sequence), a number γ between 0 and 1 (γ^(n − 1 − t): earlier time steps count less), a
            list (one number per time step), or a function `(t, length) -> weight` of float32 tensors, where t
            [1, time] counts from 0 and length [batch, 1] is the number of time steps up to the last valid one.

    Example:

    >>> import keras
    >>> loss = over_time(keras.losses.MeanSquaredError(), "last")
    >>> values, weights = loss(tf.zeros([1, 3, 1]), tf.ones([1, 3, 1]))
    >>> values.numpy().tolist(), weights.numpy().tolist()
    ([[1.0, 1.0, 1.0]], [[0.0, 0.0, 1.0]])
    """
    function = _function(weights)
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    if not callable(loss):
        raise TypeError(
            f"`over_time` got {loss!r} as the loss; it must be a callable(targets, outputs) or the name of a Keras "
            "loss. Use e.g. over_time(keras.losses.MeanSquaredError(), 'last')."
        )

    def weighted(targets, outputs):
        result = loss.call(targets, outputs) if hasattr(loss, "call") else loss(targets, outputs)
        values, own = result if isinstance(result, tuple) else (result, None)
        if values.shape.rank is None or values.shape.rank < 2:
            raise ValueError(
                f"The loss {weighted.__name__!r} returns values of shape {values.shape}; to weight its time steps, "
                "they must be [batch, time] or [batch, time, …]. Use a loss that does not sum over time, and a layer "
                "with return_sequences=True."
            )
        mask = getattr(outputs, "_keras_mask", None) if own is None else own > 0
        made = time_weights(function, tf.shape(values)[0], tf.shape(values)[1], mask)
        if own is not None:
            own = tf.cast(own, tf.float32)
            made = tf.reshape(made, tf.concat([tf.shape(made), tf.ones([tf.rank(own) - 2], tf.int32)], 0)) * own
        return values, made

    weighted.__name__ = getattr(loss, "__name__", type(loss).__name__)
    weighted.summed_function = loss  # type: ignore[attr-defined]
    weighted.needs_whole_sequences = True  # type: ignore[attr-defined]
    return weighted


def time_weights(function, batch, time, mask=None):
    """Returns [batch, time] weights: `function` at each time step, 0 after the last valid one."""
    t = tf.cast(tf.range(time), tf.float32)[tf.newaxis]
    if mask is None:
        length = tf.fill([batch, 1], tf.cast(time, tf.float32))
    else:
        mask = tf.cast(mask, tf.bool)
        mask = tf.reduce_any(tf.reshape(mask, [tf.shape(mask)[0], tf.shape(mask)[1], -1]), axis=-1)
        length = tf.reduce_max(tf.where(mask, t + 1.0, 0.0), axis=1, keepdims=True)
    made = tf.cast(tf.convert_to_tensor(function(t, length)), tf.float32)
    made = tf.broadcast_to(made, [batch, time])
    return tf.where(t < length, made, 0.0)


def _function(weights):
    if callable(weights):
        return weights
    if isinstance(weights, str):
        if weights not in _NAMED:
            raise ValueError(
                f"`weights` is {weights!r}; it must be one of {sorted(_NAMED)}, a number between 0 and 1, a list or a "
                "function of (t, length). Use e.g. over_time('mse', 'last')."
            )
        return _NAMED[weights]
    if isinstance(weights, numbers.Real) and not isinstance(weights, bool):
        if not 0 < weights <= 1:
            raise ValueError(
                f"`weights` is the discount {weights}; it must be above 0 and at most 1 (equal weights). "
                "Use e.g. 0.95, or 'last'."
            )
        return lambda t, length: tf.cast(weights, tf.float32) ** (length - 1.0 - t)
    try:
        listed = tf.reshape(tf.convert_to_tensor(weights, tf.float32), [1, -1])
    except (TypeError, ValueError):
        raise TypeError(
            f"`weights` is {weights!r}; it must be 'last', 'linear', a number, a list of numbers or a function."
        ) from None
    if not bool(tf.reduce_all(tf.math.is_finite(listed) & (listed >= 0))) or not bool(tf.reduce_any(listed > 0)):
        raise ValueError(f"`weights` is {weights!r}; they must be finite, not negative, and not all 0.")
    return functools.partial(_listed, listed)


def _listed(listed, t, length):
    if not listed.shape.is_compatible_with(t.shape):
        raise ValueError(
            f"`weights` is a list of {listed.shape[1]} numbers, and the loss has {t.shape[1]} time steps; it must have "
            "a number for each. Use a function of (t, length) for sequences of any length."
        )
    return listed


_NAMED = {
    "last": lambda t, length: tf.cast(tf.equal(t, length - 1.0), tf.float32),
    "linear": lambda t, length: (t + 1.0) / tf.maximum(length, 1.0),
}
