"""A call that ends by an error or Ctrl-C: the host knows how many updates were made."""

import keras
import pytest
import tensorflow as tf

from looptape.trainer import Trainer
from tests.trainer.tools import dataset, linear_model, mse, regression

X, Y = regression(64)


def check(trainer, data, made):
    assert trainer._engine.counters.step == trainer.step.numpy() == made
    assert trainer._engine.sources[id(data)].position == made
    seen = []
    spy = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    trainer.fit(dataset(X, Y, batch=8).repeat(), steps=made + 3, callbacks=[spy], progress=False)
    assert trainer._engine.counters.step == trainer.step.numpy() == made + 3
    assert len(seen) == 3


def test_an_error_in_the_data():
    def batches():
        for start in range(0, 40, 8):
            yield X[start : start + 8], Y[start : start + 8]
        raise OSError("the disk is gone")

    spec = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1])
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    trainer = Trainer(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()}, steps_per_call=8)
    with pytest.raises(tf.errors.OpError, match="the disk is gone"):
        trainer.fit(data, steps=8, log_every=8, progress=False)
    check(trainer, data, 5)


def test_ctrl_c_between_the_updates_and_their_count(monkeypatch):
    trainer = Trainer(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()}, steps_per_call=4)
    data = dataset(X, Y, batch=8).repeat()

    def interrupt(values):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer._engine.ledger, "receive", interrupt)
        trainer.fit(data, steps=100, log_every=100, progress=False)
    check(trainer, data, 4)
