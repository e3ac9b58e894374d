"""Rows of the training: losses, metrics and what hooks log do not hide one another."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import looptape
from looptape import Trainer
from tests.trainer.tools import dataset, linear_model, regression

X, Y = regression(16)


class Logging(Trainer):
    """Logs by names that the trainer writes itself."""

    def train_step(self, batch):
        self.minimize(batch)
        return {"loss/error": 97.0, "optimizer/learning_rate": 96.0, "own/value": 95.0}


def test_what_a_hook_logs_does_not_replace_the_rows_of_the_trainer(tmp_path):
    trainer = Logging(linear_model(), keras.optimizers.SGD(0.25), {"error": "mse"})
    loss = trainer.evaluate(dataset(X, Y, batch=16))["loss"]
    trainer.fit(dataset(X, Y, batch=16), steps=1, workdir=tmp_path, progress=False)
    written = {name: values.item() for name, (_, values) in looptape.read(tmp_path).scalars.items()}
    assert written["loss/error"] == pytest.approx(loss, rel=1e-6)
    assert written["optimizer/learning_rate"] == 0.25 and written["own/value"] == 95.0


class Own(Trainer):
    def compute_losses(self, batch, training):
        outputs = self.model(batch[0])
        self.update_metrics(batch[1], outputs)
        return {"error": tf.square(outputs - batch[1])[:, 0]}


def test_a_metric_named_like_a_loss_is_refused_before_the_first_step():
    trainer = Own(linear_model(), "sgd", metrics={"error": keras.metrics.MeanAbsoluteError()})
    with pytest.raises(ValueError, match="'error' is the name of a loss and of a metric"):
        trainer.fit(dataset(X, Y, batch=8), epochs=1, progress=False)
    assert trainer.step.numpy() == 0


def test_labels_that_are_nan_at_a_weight_of_0_do_not_count_in_metrics():
    labels, weights = Y.copy(), np.ones(16, "float32")
    labels[::2], weights[::2] = np.nan, 0.0

    def metrics():
        return {"absolute": keras.metrics.MeanAbsoluteError()}

    model = linear_model()
    found = Trainer(model, "sgd", {"error": "mse"}, metrics=metrics()).evaluate((X, labels, weights))
    expected = Trainer(model, "sgd", {"error": "mse"}, metrics=metrics()).evaluate((X[1::2], Y[1::2]))
    assert found == pytest.approx(expected, rel=1e-5)
