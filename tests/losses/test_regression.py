"""Against NumPy, and against Keras's own losses without their reduction."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import losses

RNG = np.random.default_rng(0)
TARGETS = RNG.normal(size=(6, 4)).astype("float32") * 2
OUTPUTS = RNG.normal(size=(6, 4)).astype("float32") * 2
ERROR = (OUTPUTS - TARGETS).astype("float64")


def huber(error, delta):
    small = np.abs(error) <= delta
    return np.where(small, 0.5 * error**2, delta * (np.abs(error) - 0.5 * delta)).mean(-1)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (losses.squared_error, (ERROR**2).mean(-1)),
        (losses.absolute_error, np.abs(ERROR).mean(-1)),
        (losses.huber, huber(ERROR, 1.0)),
        (losses.huber(delta=0.3), huber(ERROR, 0.3)),
        (losses.log_cosh, np.log(np.cosh(ERROR)).mean(-1)),
        (losses.quantile, 0.5 * np.abs(ERROR).mean(-1)),
        (losses.quantile(level=0.9), np.where(ERROR < 0, -0.9 * ERROR, 0.1 * ERROR).mean(-1)),
    ],
)
def test_against_numpy(loss, expected):
    np.testing.assert_allclose(loss(TARGETS, OUTPUTS), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "keras_loss"),
    [
        (losses.squared_error, keras.losses.MeanSquaredError()),
        (losses.absolute_error, keras.losses.MeanAbsoluteError()),
        (losses.huber(delta=0.3), keras.losses.Huber(delta=0.3)),
        (losses.log_cosh, keras.losses.LogCosh()),
    ],
)
def test_against_keras(loss, keras_loss):
    expected = keras_loss.call(tf.constant(TARGETS), tf.constant(OUTPUTS))
    np.testing.assert_array_equal(loss(TARGETS, OUTPUTS), expected)


def test_the_quantile_loss_is_least_at_the_quantile():
    data = np.arange(101, dtype="float32")
    guesses = np.linspace(0, 100, 201, dtype="float32")
    loss = losses.quantile(level=0.8)
    values = [float(tf.reduce_mean(loss(data, np.full_like(data, guess)))) for guess in guesses]
    assert guesses[int(np.argmin(values))] == 80.0


def test_a_single_axis_is_not_averaged_away():
    np.testing.assert_allclose(losses.squared_error(TARGETS[:, 0], OUTPUTS[:, 0]), ERROR[:, 0] ** 2, rtol=1e-5)
