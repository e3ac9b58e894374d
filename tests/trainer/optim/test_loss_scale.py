"""Loss scaling for float16: gradients that would underflow, a scale that adapts, a model that is broken."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from tests.trainer.tools import (
    dataset,
    mse,
    regression,
    weights,
)

X, Y = regression(32)


def float16_model(scale=1.0):
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(8, activation="tanh", dtype="mixed_float16"),
            keras.layers.Dense(1, dtype="mixed_float16"),
            keras.layers.Rescaling(scale, dtype="float32"),
        ]
    )


def test_float16_gradients_that_would_underflow_are_scaled():
    """With outputs of the order 1e-4 the float16 gradients of the first layer vanish unless the loss is scaled."""
    model, reference = float16_model(1e-4), float16_model(1e-4)
    before = weights(model)
    trainer = Trainer(model, keras.optimizers.SGD(1e4), {"error": mse()})
    trainer.fit(dataset(X, 1e-4 * Y, batch=32).repeat(), steps=1, progress=False)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(reference(X) - 1e-4 * Y))
    unscaled = tape.gradient(loss, reference.trainable_variables[0].value)
    float32_model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(1),
            keras.layers.Rescaling(1e-4),
        ]
    )
    float32_model.set_weights(reference.get_weights())
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(float32_model(X) - 1e-4 * Y))
    exact = tape.gradient(loss, float32_model.trainable_variables[0].value).numpy()
    moved = (before[0] - weights(model)[0]) / 1e4
    # The weights are kept in float32, so the step itself is rounded to their last bit.
    resolution = np.max(np.abs(before[0])) * 2**-23 / 1e4
    np.testing.assert_allclose(moved, exact, rtol=0.01, atol=2 * resolution)
    error = np.max(np.abs(unscaled.numpy() - exact)) / np.max(np.abs(exact))
    assert error > 0.05, "without scaling float16 loses the gradient: the case would prove nothing"


def test_the_scale_is_halved_until_the_gradients_fit_and_grows_again(monkeypatch):

    monkeypatch.setattr("looptape.trainer.optim.loss_scale.GROWTH_INTERVAL", 5)
    model = float16_model()
    run = Trainer(model, keras.optimizers.SGD(1e-6), {"error": mse()})
    run.fit(dataset(X, 1000 * Y, batch=32).repeat(), steps=30, progress=False)
    skipped = run._engine.counters.skips.total
    assert skipped >= 2, "gradients near 1e3 · 2^15 do not fit into float16"
    assert int(run.optimizer.iterations) == 30 - skipped
    scale = float(run._engine.loss_scale.variables[0])
    assert 1.0 <= scale < 2.0**15
    assert np.isfinite(weights(model)[0]).all()


def test_a_float16_model_that_is_really_broken_stops():
    data = dataset(np.full_like(X, np.nan), Y, batch=32).repeat()
    run = Trainer(float16_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    with pytest.raises(FloatingPointError, match="loss/error became nan"):
        run.fit(data, steps=100, progress=False)
    assert float(run._engine.loss_scale.variables[0]) == 1.0, "the floor"
