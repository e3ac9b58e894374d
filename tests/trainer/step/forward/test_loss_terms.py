"""Sample weights that cannot be: below 0, or all 0. Labels of sparse cross-entropies: ignored ones, and XLA."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer import Trainer
from tests.trainer.tools import dataset, linear_model, mse, regression, weights

X, Y = regression(16)


def weighted(values):
    return dataset(X, Y, np.array(values, "float32"), batch=8)


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"accumulation_steps": 2}])
def test_a_weight_below_zero_is_refused_before_anything_is_trained(options):
    trainer = Trainer(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()}, **options)
    data, before = weighted([-0.5] + [1.0] * 15), weights(trainer.model)
    sentence = "A sample weight is -0.5; weights must be 0 or more, .* Check how they are made"
    with pytest.raises(ValueError, match=sentence):
        trainer.fit(data, epochs=1, progress=False)
    for value, kept in zip(weights(trainer.model), before, strict=True):
        np.testing.assert_array_equal(value, kept)
    with pytest.raises(ValueError, match=sentence):
        trainer.evaluate(data)


class Pairs(Trainer):
    """Returns a pair (values, weights)."""

    def compute_losses(self, batch, training):
        inputs, targets, sample_weight = batch
        return {"error": (tf.square(self.model(inputs) - targets)[:, 0], sample_weight)}


def test_a_weight_below_zero_in_a_pair_is_refused():
    trainer = Pairs(linear_model(), keras.optimizers.SGD(0.1))
    data = weighted([-0.5] + [1.0] * 15)
    for call in (lambda: trainer.fit(data, epochs=1, progress=False), lambda: trainer.evaluate(data)):
        with pytest.raises(ValueError, match="A sample weight is -0.5; weights must be 0 or more"):
            call()


@pytest.mark.parametrize("kind", [Trainer, Pairs])
def test_under_xla_the_update_is_skipped(kind):
    losses = {"error": mse()} if kind is Trainer else None
    trainer = kind(linear_model(), keras.optimizers.SGD(0.1), losses, jit_compile=True)
    data, before = weighted([-0.5] + [1.0] * 15).take(1), weights(trainer.model)
    trainer.fit(data, epochs=1, progress=False)
    assert trainer._engine.counters.skips.total == 1
    for value, kept in zip(weights(trainer.model), before, strict=True):
        np.testing.assert_array_equal(value, kept)
    assert np.isnan(trainer.evaluate(data)["loss"])


@pytest.mark.parametrize("odd", [np.nan, np.inf])
@pytest.mark.parametrize("loss", [mse(), lambda y, outputs: tf.square(y - outputs)], ids=["class", "function"])
def test_labels_at_weight_zero_may_be_nan(loss, odd):
    def trained(targets):
        trainer = Trainer(linear_model(), keras.optimizers.SGD(0.1), {"error": loss})
        data = dataset(X, targets, np.array([0.0, 1.0] * 8, "float32"), batch=8)
        trainer.fit(data, epochs=1, progress=False)
        return [*weights(trainer.model), trainer.evaluate(data)["loss"]]

    targets = Y.copy()
    targets[::2] = odd
    for value, expected in zip(trained(targets), trained(Y), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_labels_at_masked_time_steps_may_be_nan():
    x = np.ones([4, 3, 2], "float32")
    x[:, 2] = 0.0
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3, 2)), keras.layers.Masking(), keras.layers.Dense(1)])
    trainer, targets = Trainer(model, keras.optimizers.SGD(0.1), {"error": mse()}), np.ones([4, 3, 1], "float32")
    expected = trainer.evaluate(dataset(x, targets, batch=4))["error"]
    targets[:, 2] = np.nan
    assert trainer.evaluate(dataset(x, targets, batch=4))["error"] == expected
    trainer.fit(dataset(x, targets, batch=4), epochs=1, progress=False)
    assert trainer._engine.counters.skips.total == 0


def test_values_at_weight_zero_may_be_nan_in_evaluations():
    trainer, targets = Pairs(linear_model(), "sgd"), Y.copy()
    targets[0] = np.nan
    data = dataset(X, targets, np.array([0.0] + [1.0] * 15, "float32"), batch=8)
    expected = np.mean((trainer.model(X).numpy() - Y)[1:] ** 2)
    assert trainer.evaluate(data)["error"] == pytest.approx(expected, rel=1e-5)


def test_weights_that_sum_to_zero_measure_nothing_and_train_nothing():
    trainer = Trainer(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    data, before = weighted([0.0] * 16), weights(trainer.model)
    history = trainer.fit(data, epochs=1, eval_dataset=data, progress=False).history
    assert np.isnan(history["loss"]).all() and np.isnan(history["val_loss"]).all()
    assert "error" not in history and "val_error" not in history and trainer._engine.counters.skips.total == 0
    for value, kept in zip(weights(trainer.model), before, strict=True):
        np.testing.assert_array_equal(value, kept)


def test_a_batch_without_weight_leaves_the_mean_of_the_others():
    trainer = Trainer(linear_model(), keras.optimizers.SGD(0.0), {"error": mse()})
    data = weighted([0.0] * 8 + [1.0] * 8)
    expected = float(np.mean((trainer.model(X[8:]).numpy() - Y[8:]) ** 2))
    history = trainer.fit(data, epochs=1, eval_dataset=data, progress=False).history
    assert history["error"] == pytest.approx([expected], rel=1e-5)
    assert history["val_loss"] == pytest.approx([expected], rel=1e-5)


LABELS = np.random.default_rng(0).integers(0, 3, size=16)


def fit(labels, loss=None, weights=None, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, "softmax")])
    loss = loss or keras.losses.SparseCategoricalCrossentropy()
    trainer = Trainer(model, keras.optimizers.SGD(0.1), {"error": loss}, **options)
    data = (X, labels) if weights is None else (X, labels, weights)
    trainer.fit(data, steps=3, batch_size=16, progress=False)
    return model.get_weights()


def test_xla_compiles_it_with_weights_too():
    weights = np.linspace(0.0, 1.0, 16).astype("float32")
    for left, right in zip(fit(LABELS, weights=weights), fit(LABELS, weights=weights, jit_compile=True), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(16,), (16, 1)])
def test_labels_that_do_not_count_may_be_anything(shape):
    odd = LABELS.copy()
    odd[[2, 5]] = -1
    weights = np.ones(16, "float32")
    weights[[2, 5]] = 0.0
    ignoring = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)
    expected = fit(LABELS.reshape(shape), weights=weights)
    compiled = fit(odd.reshape(shape), weights=weights, jit_compile=True)
    for found in (fit(odd.reshape(shape), weights=weights), fit(odd.reshape(shape), ignoring), compiled):
        for left, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
    odd[0] = 7
    for loss in (None, ignoring, keras.losses.get("sparse_categorical_crossentropy")):
        with pytest.raises(ValueError, match="A label of loss 'error' is 7; the output has 3 classes"):
            fit(odd, loss, weights)
