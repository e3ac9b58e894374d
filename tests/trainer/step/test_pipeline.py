"""The gradient pipeline: clipping, non-finite updates, float16, averages, replicas."""

import keras
import numpy as np
import pytest

from looptape import Trainer
from tests.trainer.tools import (
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


def test_evaluation_with_averaged_weights():
    model = linear_model()
    trainer = train(model, dataset(X, Y, batch=8).repeat(), steps=6, ema_decay=0.9)
    raw_loss = trainer.evaluate(dataset(X, Y, batch=32))["loss"]
    averaged = trainer.evaluate(dataset(X, Y, batch=32), averaged=True)["loss"]
    kernel, bias = (a.numpy() for a in trainer._engine.main.pipeline.averages)
    assert averaged == pytest.approx(np.mean((X @ kernel + bias - Y) ** 2), rel=1e-5)
    assert trainer.evaluate(dataset(X, Y, batch=32))["loss"] == raw_loss != averaged


def test_averages_leave_moving_statistics_as_they_are():
    """They are averages already: evaluation with averaged weights uses the present ones."""
    trainer = train(normalized_model(), dataset(X, Y, batch=8).repeat(), steps=6, ema_decay=0.9)
    model = trainer.model
    moving, trained = [v.numpy() for v in model.non_trainable_variables], weights(model)
    with trainer.averaged_weights():
        for before, variable in zip(moving, model.non_trainable_variables, strict=True):
            np.testing.assert_array_equal(before, variable.numpy())
        assert all(np.any(before != now) for before, now in zip(trained, weights(model), strict=True))


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
    assert (
        double._engine.counters.step == single._engine.counters.step
        and second.iterations.numpy() == single.optimizer.iterations.numpy()
    )
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
    assert (
        trainer._engine.counters.skips.total == 1
        and optimizer.iterations.numpy() == 3
        and trainer._engine.counters.step == 4
    )
    for variable in model.variables:
        values = [v.numpy() for v in strategy.experimental_local_results(variable.value)]
        np.testing.assert_array_equal(values[0], values[1])
        assert np.isfinite(values[0]).all()
