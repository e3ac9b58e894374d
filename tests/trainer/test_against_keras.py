"""`Trainer.fit` ends with the weights of `keras.Model.fit`: same model, optimizer and data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.tools import assert_same_weights, dataset, dense_model, mse, regression, train

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_weights(name):
    x, y = regression(32)
    ours, theirs = dense_model(), dense_model()
    trainer = train(ours, dataset(x, y, batch=8), OPTIMIZERS[name](), epochs=5)
    theirs.compile(OPTIMIZERS[name](), loss="mse")
    history = theirs.fit(dataset(x, y, batch=8), epochs=5, verbose=0, shuffle=False)
    assert_same_weights(ours, theirs)
    assert trainer._engine.counters.step == 20
    np.testing.assert_allclose(
        trainer.evaluate(dataset(x, y, batch=8))["loss"], theirs.evaluate(x, y, verbose=0), rtol=1e-5
    )
    assert len(history.history["loss"]) == 5


def test_history_has_the_values_of_keras_with_a_short_last_batch():
    x, y = regression(20)
    ours, theirs = dense_model(), dense_model()
    from looptape import Trainer

    trainer = Trainer(ours, keras.optimizers.SGD(0.1), {"error": mse()}, metrics=[keras.metrics.MeanAbsoluteError()])
    data = dataset(x, y, batch=8)
    history = trainer.fit(data, epochs=3, eval_dataset=data, progress=False).history
    theirs.compile(keras.optimizers.SGD(0.1), loss="mse", metrics=[keras.metrics.MeanAbsoluteError()])
    expected = theirs.fit(data, epochs=3, validation_data=data, verbose=0, shuffle=False).history
    assert_same_weights(ours, theirs)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(history["error"], expected["loss"], rtol=1e-5)


def test_regularizers_and_add_loss_join_as_in_keras():
    class Penalized(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(0.3 * tf.reduce_mean(tf.square(inputs)))
            return inputs

    def model():
        keras.utils.set_random_seed(3)
        return keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.1)),
                Penalized(),
                keras.layers.Dense(1),
            ]
        )

    x, y = regression(32)
    ours, theirs = model(), model()
    trainer = train(ours, dataset(x, y, batch=8), epochs=3)
    theirs.compile(keras.optimizers.SGD(0.1), loss="mse")
    theirs.fit(dataset(x, y, batch=8), epochs=3, verbose=0, shuffle=False)
    assert_same_weights(ours, theirs)
    results = trainer.evaluate(dataset(x, y, batch=8))
    np.testing.assert_allclose(results["loss"], theirs.evaluate(x, y, batch_size=8, verbose=0), rtol=1e-5)
    hidden = x @ ours.layers[0].kernel.numpy() + ours.layers[0].bias.numpy()
    penalty = 0.1 * np.sum(ours.layers[0].kernel.numpy() ** 2) + 0.3 * np.mean(hidden**2)
    np.testing.assert_allclose(results["regularization"], penalty, rtol=1e-5)


def test_batch_normalization_and_dropout_match_keras():
    def model():
        keras.utils.set_random_seed(5)
        return keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(momentum=0.8),
                keras.layers.Dropout(0.3, seed=11),
                keras.layers.Dense(1),
            ]
        )

    x, y = regression(32)
    ours, theirs = model(), model()
    train(ours, dataset(x, y, batch=8), epochs=3)
    theirs.compile(keras.optimizers.SGD(0.1), loss="mse")
    theirs.fit(dataset(x, y, batch=8), epochs=3, verbose=0, shuffle=False)
    assert_same_weights(ours, theirs)
    for left, right in zip(ours.non_trainable_variables, theirs.non_trainable_variables, strict=True):
        np.testing.assert_allclose(left.numpy(), right.numpy(), atol=1e-6)
