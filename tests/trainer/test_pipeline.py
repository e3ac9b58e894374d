"""The gradient pipeline: clipping, non-finite updates, float16, averages, replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

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
from trainer import Trainer

X, Y = regression(32)


def test_clipping_is_by_the_global_norm():
    model = linear_model()
    before = weights(model)
    train(model, dataset(X, 100 * Y, batch=32).repeat(), keras.optimizers.SGD(1.0), steps=1, clip_norm=0.5)
    moved = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(before, weights(model), strict=True)))
    assert moved == pytest.approx(0.5, rel=1e-5)


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
    assert trainer.host_step == int(trainer.step) == 4, "the step counts: its data are gone"
    assert int(trainer.optimizer.iterations) == 3
    assert trainer.calls.skipped == 1
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
    assert trainer.calls.skipped == 4 and trainer.host_step == 24
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
    assert trainer.calls.skipped == 4
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
    assert trainer.host_step == 9


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
    import trainer.scaling

    monkeypatch.setattr(trainer.scaling, "GROWTH_INTERVAL", 5)
    model = float16_model()
    run = Trainer(model, keras.optimizers.SGD(1e-6), {"error": mse()})
    run.fit(dataset(X, 1000 * Y, batch=32).repeat(), steps=30, progress=False)
    skipped = run.calls.skipped
    assert skipped >= 2, "gradients near 1e3 · 2^15 do not fit into float16"
    assert int(run.optimizer.iterations) == 30 - skipped
    scale = float(run.loss_scale.variables[0])
    assert 1.0 <= scale < 2.0**15
    assert np.isfinite(weights(model)[0]).all()


def test_a_float16_model_that_is_really_broken_stops():
    data = dataset(np.full_like(X, np.nan), Y, batch=32).repeat()
    run = Trainer(float16_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    with pytest.raises(FloatingPointError, match="loss/error became nan"):
        run.fit(data, steps=100, progress=False)
    assert float(run.loss_scale.variables[0]) == 1.0, "the floor"


def test_evaluation_with_averaged_weights():
    model = linear_model()
    trainer = train(model, dataset(X, Y, batch=8).repeat(), steps=6, ema_decay=0.9)
    raw_loss = trainer.evaluate(dataset(X, Y, batch=32))["loss"]
    averaged = trainer.evaluate(dataset(X, Y, batch=32), averaged=True)["loss"]
    kernel, bias = (a.numpy() for a in trainer.main.averages)
    assert averaged == pytest.approx(np.mean((X @ kernel + bias - Y) ** 2), rel=1e-5)
    assert trainer.evaluate(dataset(X, Y, batch=32))["loss"] == raw_loss != averaged


TWO = {
    "sgd": ({}, lambda: keras.optimizers.SGD(0.1)),
    "adam": ({}, lambda: keras.optimizers.Adam(0.01)),
    "clip": ({"clip_norm": 0.05}, lambda: keras.optimizers.SGD(0.1)),
    "accumulation": ({"accumulation_steps": 2, "ema_decay": 0.9}, lambda: keras.optimizers.Adam(0.01)),
}


@pytest.mark.parametrize("name", TWO)
def test_two_devices_equal_one(name, two_devices):
    options, optimizer = TWO[name]
    one = dense_model()
    x, y = regression(36)  # batches of 9 do not divide by 2, and the last update is short
    single = Trainer(one, optimizer(), {"error": mse()}, metrics=[keras.metrics.MeanAbsoluteError()], **options)
    history = single.fit(dataset(x, y, batch=9), epochs=10, progress=False).history
    strategy = two_devices
    with strategy.scope():
        two, second = dense_model(), optimizer()
        metric = keras.metrics.MeanAbsoluteError()
    double = Trainer(two, second, {"error": mse()}, metrics=[metric], strategy=strategy, **options)
    history2 = double.fit(dataset(x, y, batch=9), epochs=10, progress=False).history
    assert_same_weights(one, two)
    assert double.host_step == single.host_step and second.iterations.numpy() == single.optimizer.iterations.numpy()
    for key, values in history.items():
        np.testing.assert_allclose(history2[key], values, rtol=1e-5, err_msg=key)


def test_a_nan_on_the_second_device_only_skips_the_update_everywhere(two_devices):
    bad = X.copy()
    bad[15] = np.nan  # batch 2 of 4, second half
    strategy = two_devices
    with strategy.scope():
        model, optimizer = normalized_model(), keras.optimizers.SGD(0.1)
    trainer = Trainer(model, optimizer, {"error": mse()}, strategy=strategy)
    trainer.fit(dataset(bad, Y, batch=8), epochs=1, progress=False)
    assert trainer.calls.skipped == 1 and optimizer.iterations.numpy() == 3 and trainer.host_step == 4
    for variable in model.variables:
        values = [v.numpy() for v in strategy.experimental_local_results(variable.value)]
        np.testing.assert_array_equal(values[0], values[1])
        assert np.isfinite(values[0]).all()
