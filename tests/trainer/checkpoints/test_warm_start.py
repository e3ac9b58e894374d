"""Weights in and out of a trainer: warm starts and exported weights."""

import contextlib

import keras
import numpy as np
import pytest

from looptape.trainer import Trainer
from tests.trainer.tools import (
    assert_identical_weights,
    dataset,
    linear_model,
    mse,
    regression,
)

X, Y = regression(32)


def test_warm_start_reports_what_matched(tmp_path):
    def model(units):
        return keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4, name="body"), keras.layers.Dense(units, name=f"head{units}")]
        )

    source = model(1)
    Trainer(source, "sgd", {"e": mse()}).fit(dataset(X, Y, batch=8), epochs=1, workdir=tmp_path, progress=False)
    target = model(2)
    report = Trainer(target, "sgd", {"e": mse()}).warm_start(tmp_path)
    np.testing.assert_array_equal(target.layers[0].kernel.numpy(), source.layers[0].kernel.numpy())
    assert len(report.matched) == 2 and len(report.missing) == 2 and len(report.unused) == 2
    assert "2 weights taken over" in str(report) and "head2/kernel" in str(report)
    with pytest.raises(FileNotFoundError, match="Give a .keras file, or the work directory"):
        Trainer(target, "sgd", {"e": mse()}).warm_start(tmp_path / "nothing")


@pytest.mark.parametrize("averaged", [False, True])
def test_the_final_the_best_and_the_averaged_weights_are_exported(averaged, tmp_path):
    model = linear_model()
    seen = []
    trainer = Trainer(model, keras.optimizers.SGD(0.2), {"error": mse()}, ema_decay=0.9)
    data = dataset(X, Y, batch=32)

    def see(epoch, logs):
        with trainer.averaged_weights() if averaged else contextlib.nullcontext():
            seen.append((logs["val_loss"], model.get_weights()))

    options = {"eval_dataset": data, "eval_every": 2, "evaluate_averaged": averaged, "progress": False}
    spy = keras.callbacks.LambdaCallback(on_epoch_end=see)
    trainer.fit(data.repeat(), steps=6, workdir=tmp_path, callbacks=[spy], **options)
    other = linear_model(seed=9)
    other.load_weights(tmp_path / "best.weights.h5")
    best = min(seen, key=lambda pair: pair[0])[1]
    np.testing.assert_array_equal(other.get_weights()[0], best[0])
    other.load_weights(tmp_path / "averaged.weights.h5")
    np.testing.assert_array_equal(other.get_weights()[0], trainer._engine.main.pipeline.averages[0].numpy())
    other.load_weights(tmp_path / "model.weights.h5")
    assert_identical_weights(other, model)
