"""`train_on_batch`: the update of `fit` on a batch that Python made."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from tests.trainer.tools import assert_identical_weights, assert_same_weights, dataset, dense_model, mse, regression

X, Y = regression(32)


def make(model=None, **options):
    return Trainer(model or dense_model(), keras.optimizers.Adam(0.05), {"error": mse()}, **options)


@pytest.mark.parametrize("eager", [False, True])
def test_it_is_the_update_of_fit(eager):
    by_batch, by_fit = make(run_eagerly=eager), make(run_eagerly=eager)
    for batch in dataset(X, Y, batch=8):
        by_batch.train_on_batch(batch)
    by_fit.fit(dataset(X, Y, batch=8), epochs=1, progress=False)
    assert_identical_weights(by_batch.model, by_fit.model)
    assert by_batch.step.numpy() == by_batch.optimizer.iterations.numpy() == 4


def test_what_it_returns_is_about_this_batch():
    class Logging(Trainer):
        def compute_losses(self, batch, training):
            self.log("first", batch[0][0, 0])
            return super().compute_losses(batch, training)

    trainer = Logging(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()}, metrics=["mae"])
    for rows in (slice(0, 8), slice(8, 11)):
        difference = trainer.model(X[rows]).numpy() - Y[rows]
        found = trainer.train_on_batch((X[rows], Y[rows]))
        expected = {"error": np.mean(difference**2), "mean_absolute_error": np.mean(np.abs(difference))}
        expected |= {"loss": expected["error"], "first": X[rows][0, 0]}
        assert found == pytest.approx(expected, rel=1e-5)
    assert trainer._engine.calls.traces == 1, "another number of examples costs no trace"


def test_accumulation_divides_the_batch_however_small():
    divided, whole = make(accumulation_steps=3), make()
    for rows in (8, 2, 7, 1, 8):
        for trainer in (divided, whole):
            trainer.train_on_batch([X[:rows], Y[:rows]])
    assert_same_weights(divided.model, whole.model)
    assert divided.step.numpy() == 5 and divided._engine.calls.traces == 1


def test_fit_continues_after_it_and_it_after_fit(tmp_path):
    trainer = make()
    trainer.train_on_batch((X[:8], Y[:8]))
    trainer.fit(dataset(X, Y, batch=8).repeat(), steps=3, workdir=tmp_path, progress=False)
    resumed = make()
    resumed.fit(dataset(X, Y, batch=8).repeat(), steps=4, workdir=tmp_path, progress=False)
    trainer.fit(dataset(X, Y, batch=8).repeat().skip(2), steps=4, progress=False)
    assert_identical_weights(trainer.model, resumed.model)
    trainer.model.layers[0].trainable = False
    frozen = trainer.model.layers[0].get_weights()[0]
    trainer.train_on_batch((X[:8], Y[:8]))
    np.testing.assert_array_equal(trainer.model.layers[0].get_weights()[0], frozen)
    assert trainer.step.numpy() == 5


def test_updates_that_are_not_finite_are_skipped_and_end_the_run():
    trainer = make()
    trainer.max_skipped = 2
    bad = np.full_like(Y[:8], np.inf)
    before = trainer.model.get_weights()[0]
    assert "error" not in trainer.train_on_batch((X[:8], bad))
    np.testing.assert_array_equal(trainer.model.get_weights()[0], before)
    with pytest.raises(FloatingPointError, match="2 updates in a row were not finite, from step 0 on: loss/error"):
        trainer.train_on_batch((X[:8], bad))
    assert trainer.train_on_batch((X[:8], Y[:8]))["error"] > 0


REFUSED = {
    "two arguments": (lambda: make().train_on_batch(X, Y), TypeError, r"too many.*as \(x, y\)"),
    "unequal": (lambda: make().train_on_batch((X[:8], Y[:4])), ValueError, "have 4 and 8 examples; all must have the"),
    "empty": (lambda: make().train_on_batch((X[:0], Y[:0])), ValueError, "have 0 examples"),
    "numbers": (lambda: make().train_on_batch(([1.0], [2.0])), TypeError, "not hold only dense arrays.*np.asarray"),
    "a dataset": (lambda: make().train_on_batch(tf.data.Dataset.range(3)), TypeError, "pass datasets to `fit`"),
    "no targets": (lambda: make().train_on_batch(X[:8]), ValueError, "The batches have no targets"),
    "auto": (lambda: make(accumulation_steps="auto").train_on_batch((X, Y)), ValueError, "may need the batches around"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()
