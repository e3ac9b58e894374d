"""Non-finite updates: skipped, counted, and named."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from tests.trainer.tools import (
    assert_identical_weights,
    assert_same_weights,
    dataset,
    dense_model,
    linear_model,
    mse,
    regression,
    train,
    weights,
)

X, Y = regression(32)


def normalized_model():
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_non_finite_update_is_skipped_and_counted(accumulation_steps, run_eagerly):
    """Batch 3 of 6 is NaN: the same weights and statistics as training without the update that holds it."""
    bad = X.copy()
    bad[16:20] = np.nan
    size = 8 // accumulation_steps
    model, oracle = normalized_model(), normalized_model()
    options = {"accumulation_steps": accumulation_steps, "run_eagerly": run_eagerly}
    trainer = Trainer(
        model, keras.optimizers.Adam(0.01), {"error": mse()}, metrics=[keras.metrics.MeanAbsoluteError()], **options
    )
    history = trainer.fit(dataset(bad, Y, batch=size), epochs=1, progress=False).history
    keep = np.r_[0:16, 24:32]
    expected = Trainer(
        oracle, keras.optimizers.Adam(0.01), {"error": mse()}, metrics=[keras.metrics.MeanAbsoluteError()], **options
    )
    history2 = expected.fit(dataset(X[keep], Y[keep], batch=size), epochs=1, progress=False).history
    assert_identical_weights(model, oracle)
    for left, right in zip(model.non_trainable_variables, oracle.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())
    assert trainer._engine.counters.step == int(trainer.step) == 4, "the step counts: its data are gone"
    assert int(trainer.optimizer.iterations) == 3
    assert trainer._engine.counters.skips.total == 1
    for name, values in history2.items():
        assert history[name] == pytest.approx(values, rel=1e-6), name


@pytest.mark.parametrize("steps_per_call", [1, 3, "auto"])
def test_skipping_does_not_depend_on_the_updates_per_call(steps_per_call):
    bad = np.concatenate([X] * 3)
    bad[10], bad[70] = np.inf, np.nan
    data = dataset(bad, np.concatenate([Y] * 3), batch=8)
    model, oracle = dense_model(), dense_model()
    trainer = train(model, data, epochs=2, steps_per_call=steps_per_call)
    train(oracle, data, epochs=2, run_eagerly=True)
    assert trainer._engine.counters.skips.total == 4 and trainer._engine.counters.step == 24
    assert_same_weights(model, oracle, 1e-6)


def test_a_gradient_that_overflows_with_a_finite_loss_is_skipped():
    class Steep(Trainer):
        def compute_losses(self, batch, training):
            x, _ = batch
            # sqrt(0) is finite, its derivative is not.
            return {"root": tf.sqrt(tf.nn.relu(0.0 * self.model(x, training=training)))[:, 0]}

    model = linear_model()
    before = weights(model)
    trainer = train(model, dataset(X, Y, batch=8), epochs=1, trainer_class=Steep)
    assert trainer._engine.counters.skips.total == 4
    for left, right in zip(before, weights(model), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_run_of_non_finite_updates_names_the_loss_that_broke_first():
    class Breaking(Trainer):
        max_skipped = 4

        def compute_losses(self, batch, training):
            x, y = batch
            error = self.model(x, training=training) - y
            broken = tf.where(self.step >= 5, np.nan, 1.0)
            return {"good": tf.square(error)[:, 0], "bad": broken * tf.abs(error)[:, 0]}

    trainer = Breaking(linear_model(), keras.optimizers.SGD(0.01))
    message = r"4 updates in a row were not finite, from step 5 on: loss/bad became nan\."
    with pytest.raises(FloatingPointError, match=message):
        trainer.fit(dataset(X, Y, batch=8).repeat(), steps=100, progress=False)
    assert trainer._engine.counters.step == 9


@pytest.mark.parametrize(
    ("optimizer", "clip_norm", "skips"), [("SGD", None, 0), ("Adam", 1.0, 0), ("SGD", 1.0, 0), ("Adam", None, 3)]
)
def test_gradients_whose_squares_overflow(optimizer, clip_norm, skips):
    """They are finite, and a small rate or clipping makes a step of them; Adam's second moments would stay infinite."""
    size = 2.0**67
    inputs, targets = np.ones((4, 1), "float32"), np.zeros((4, 1), "float32")
    updated = []
    for scale in (1.0, size):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
        rate = 0.1 if clip_norm else 0.1 / scale
        run = Trainer(
            model,
            getattr(keras.optimizers, optimizer)(rate),
            {"error": lambda batch, outputs, scale=scale: scale * tf.square(outputs[:, 0])},
            clip_norm=clip_norm,
        )
        run.fit(dataset(inputs, targets, batch=4).repeat(), steps=3, progress=False)
        updated.append(model.layers[-1].kernel.numpy())
    assert run._engine.counters.skips.total == skips
    if not skips:
        np.testing.assert_allclose(updated[1], updated[0], rtol=1e-5)
        assert updated[0][0, 0] < 0.9
