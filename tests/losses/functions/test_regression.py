"""Against NumPy, and against Keras's own losses without their reduction."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import losses

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
    ],
)
def test_against_keras(loss, keras_loss):
    expected = keras_loss.call(tf.constant(TARGETS), tf.constant(OUTPUTS))
    np.testing.assert_allclose(loss(TARGETS, OUTPUTS), expected, rtol=1e-6)


def test_the_quantile_loss_is_least_at_the_quantile():
    data = np.arange(101, dtype="float32")
    guesses = np.linspace(0, 100, 201, dtype="float32")
    loss = losses.quantile(level=0.8)
    values = [float(tf.reduce_mean(loss(data, np.full_like(data, guess)))) for guess in guesses]
    assert guesses[int(np.argmin(values))] == 80.0


def test_a_single_axis_is_not_averaged_away():
    np.testing.assert_allclose(losses.squared_error(TARGETS[:, 0], OUTPUTS[:, 0]), ERROR[:, 0] ** 2, rtol=1e-5)


@pytest.mark.parametrize("error", [0.0, 1e-10, 1e-6, 1e-4, 1e-3, 0.5, 0.999, 1.0, 3.0, 50.0, 1e6])
def test_log_cosh_of_small_and_large_errors(error):
    """By its series in float64; below 1e-4 it was 0 or negative."""
    output = tf.constant([[error, -error]])
    with tf.GradientTape() as tape:
        tape.watch(output)
        value = losses.log_cosh(tf.zeros([1, 2]), output)
    x = float(np.float32(error))
    expected = x**2 / 2 - x**4 / 12 + x**6 / 45 if x < 0.01 else np.logaddexp(x, -x) - np.log(2)
    np.testing.assert_allclose(value, [expected], rtol=1e-6)
    np.testing.assert_allclose(tape.gradient(value, output), np.tanh([[x, -x]]) / 2, rtol=1e-5)
