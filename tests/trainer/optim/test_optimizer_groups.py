"""Optimizers by pattern: learning rates per layer, freezing, and weight decay, each against Keras or a loop by hand."""

import keras
import numpy as np
import tensorflow as tf

from looptape.trainer import Trainer
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


def test_optimizers_by_pattern_are_per_layer_learning_rates():
    model = linear_model()
    kernel, bias = weights(model)
    optimizer = {".*bias": keras.optimizers.SGD(0.01), ".*": keras.optimizers.SGD(0.1)}
    train(model, dataset(X, Y, batch=32).repeat(), optimizer, steps=1)
    error = X @ kernel + bias - Y
    np.testing.assert_allclose(weights(model)[0], kernel - 0.1 * 2 * X.T @ error / 32, atol=1e-6)
    np.testing.assert_allclose(weights(model)[1], bias - 0.01 * 2 * error.mean(axis=0), atol=1e-6)


def test_freezing_with_optimizers_by_pattern():
    """Frozen between two fits: one optimizer has nothing to do."""
    model = dense_model()
    optimizer = {f".*{model.layers[0].name}/.*": keras.optimizers.SGD(0.1), ".*": keras.optimizers.Adam(0.01)}
    trainer, data = Trainer(model, optimizer, {"error": mse()}), dataset(X, Y, batch=32).repeat()
    trainer.fit(data, steps=2, progress=False)
    before = model.get_weights()
    model.layers[0].trainable = False
    trainer.fit(data, steps=4, progress=False)
    moved = [not np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True)]
    assert moved == [False, False, True, True]
    model.layers[0].trainable = True
    trainer.fit(data, steps=5, progress=False)
    assert not np.array_equal(before[0], model.get_weights()[0])


def test_a_layer_is_unfrozen_with_an_optimizer_of_its_own():
    """As two phases by hand: Adam's moments of the head continue, the encoder begins with a fresh SGD."""
    model, oracle = dense_model(), dense_model()
    head, encoder = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)
    model.layers[0].trainable = False
    patterns = {f".*{model.layers[0].name}/.*": keras.optimizers.SGD(0.1), ".*": keras.optimizers.Adam(0.01)}
    trainer, data = Trainer(model, patterns, {"error": mse()}), dataset(X, Y, batch=32).repeat()
    trainer.fit(data, steps=2, progress=False)
    model.layers[0].trainable = True
    trainer.fit(data, steps=5, progress=False)
    for step in range(5):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(oracle(X) - Y))
        gradients = tape.gradient(loss, oracle.trainable_variables)
        head.apply(gradients[2:], oracle.trainable_variables[2:])
        if step >= 2:
            encoder.apply(gradients[:2], oracle.trainable_variables[:2])
    for found, expected in zip(model.get_weights(), oracle.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_exclusion_from_weight_decay_is_kept():
    model, oracle = dense_model(), dense_model()
    for each, by_trainer in ((model, True), (oracle, False)):
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        if by_trainer:
            train(each, dataset(X, Y, batch=8), optimizer, epochs=2)
        else:
            each.compile(optimizer, loss="mse")
            each.fit(dataset(X, Y, batch=8), epochs=2, verbose=0, shuffle=False)
    assert_same_weights(model, oracle)
