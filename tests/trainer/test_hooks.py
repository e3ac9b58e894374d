"""Hooks beyond one: several optimizers and models, raw variables, freezing, groups, transformations."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer import Trainer
from tests.trainer.tools import (
    assert_same_weights,
    dataset,
    dense_model,
    linear_model,
    mse,
    read_events,
    regression,
    train,
    weights,
)

X, Y = regression(32)
NOISE = np.random.default_rng(1).normal(size=(32, 2)).astype("float32")


class Pair(keras.Model):
    """A generator and a discriminator."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(6)
        self.generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)])
        self.discriminator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        self.built = True


def real_loss(logits):
    return tf.nn.sigmoid_cross_entropy_with_logits(tf.ones_like(logits), logits)[:, 0]


def fake_loss(logits):
    return tf.nn.sigmoid_cross_entropy_with_logits(tf.zeros_like(logits), logits)[:, 0]


class Gan(Trainer):
    def __init__(self, model, generator_optimizer, discriminator_optimizer, **options):
        super().__init__(model, generator_optimizer, **options)
        self.discriminator_optimizer = discriminator_optimizer

    def discriminator_losses(self, batch, training):
        real, noise = batch
        fake = tf.stop_gradient(self.model.generator(noise, training=training))
        return {
            "real": real_loss(self.model.discriminator(real, training=training)),
            "fake": fake_loss(self.model.discriminator(fake, training=training)),
        }

    def generator_losses(self, batch, training):
        return {"fool": real_loss(self.model.discriminator(self.model.generator(batch[1], training=training)))}

    def train_step(self, batch):
        self.minimize(
            batch,
            self.discriminator_losses,
            variables=self.model.discriminator.trainable_variables,
            optimizer=self.discriminator_optimizer,
            name="discriminator",
        )
        values = self.minimize(
            batch, self.generator_losses, variables=self.model.generator.trainable_variables, name="generator"
        )
        return {"fooled": tf.exp(-values["fool"])}

    def eval_step(self, batch):
        return self.generator_losses(batch, training=False)


def hand_written_gan(steps, batch):
    model, first, second = Pair(), keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)
    for step in range(steps):
        start = step * batch % 32
        real, noise = X[start : start + batch], NOISE[start : start + batch]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(real_loss(model.discriminator(real)))
            loss += tf.reduce_mean(fake_loss(model.discriminator(model.generator(noise))))
        variables = model.discriminator.trainable_variables
        second.apply(tape.gradient(loss, variables), variables)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(real_loss(model.discriminator(model.generator(noise))))
        variables = model.generator.trainable_variables
        first.apply(tape.gradient(loss, variables), variables)
    return model


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_a_gan_equals_a_hand_written_loop(accumulation_steps, tmp_path):
    trainer = Gan(Pair(), keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1), accumulation_steps=accumulation_steps)
    data = dataset(X, NOISE, batch=8 // accumulation_steps).repeat()
    trainer.fit(data, steps=6, log_every=2, workdir=tmp_path, progress=False)
    assert_same_weights(trainer.model, hand_written_gan(6, 8))
    _, values = read_events(tmp_path / "train")[-1]
    assert {"loss/discriminator/real", "loss/discriminator/fake", "loss/generator/fool"} <= set(values)
    assert {"optimizer/gradient_norm/discriminator/global", "optimizer/learning_rate/generator"} <= set(values)
    assert values["metrics/fooled"] == pytest.approx(np.exp(-values["loss/generator/fool"]), rel=0.05)
    assert set(trainer.evaluate(data.take(2))) == {"loss", "fool"}


def test_alternating_updates():
    """The discriminator every step, the generator every second one: a condition on the step, in the graph."""

    class Alternating(Gan):
        def train_step(self, batch):
            super().train_step(batch)
            return {}

        def generator_losses(self, batch, training):
            due = tf.cast(self.step % 2 == 0, tf.float32)
            return {name: due * value for name, value in super().generator_losses(batch, training).items()}

    trainer = Alternating(Pair(), keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
    data = dataset(X, NOISE, batch=8).repeat()
    moved = []
    for step in range(1, 5):
        before = trainer.model.generator.get_weights()
        trainer.fit(data, steps=step, progress=False)
        moved.append(not np.array_equal(before[0], trainer.model.generator.get_weights()[0]))
    assert moved == [True, False, True, False]


def test_raw_variables_equal_a_hand_written_loop():
    w, b = tf.Variable([[1.0], [0.5], [-1.0]]), tf.Variable([0.0])
    train((lambda x: x @ w + b, [w, b]), dataset(X, Y, batch=8), epochs=2)
    kernel, bias = np.array([[1.0], [0.5], [-1.0]]), np.zeros(1)
    for _ in range(2):
        for start in range(0, 32, 8):
            x, y = X[start : start + 8], Y[start : start + 8]
            error = x @ kernel + bias - y
            kernel, bias = kernel - 0.1 * 2 * x.T @ error / 8, bias - 0.1 * 2 * error.mean(axis=0)
    np.testing.assert_allclose(w.numpy(), kernel, atol=1e-5)
    np.testing.assert_allclose(b.numpy(), bias, atol=1e-5)


def test_a_tf_module_trains_and_resumes(tmp_path):
    class Line(tf.Module):
        def __init__(self):
            self.w = tf.Variable([[1.0], [0.5], [-1.0]])

        def __call__(self, x):
            return x @ self.w

    def fit(steps, workdir):
        trainer = Trainer(Line(), keras.optimizers.Adam(0.1), {"error": mse()})
        trainer.fit(dataset(X, Y, batch=8).repeat(), steps=steps, workdir=workdir, progress=False)
        return trainer.model.w.numpy()

    fit(3, tmp_path / "a")
    np.testing.assert_array_equal(fit(7, tmp_path / "a"), fit(7, tmp_path / "b"))


def test_freezing_and_unfreezing_between_two_fits():
    model, oracle = dense_model(), dense_model()
    trainer = Trainer(model, keras.optimizers.Adam(0.05), {"error": mse()})
    data = dataset(X, Y, batch=32).repeat()
    model.layers[0].trainable = False
    first = model.layers[0].kernel.numpy()
    trainer.fit(data, steps=3, progress=False)
    np.testing.assert_array_equal(first, model.layers[0].kernel.numpy())
    model.layers[0].trainable = True
    trainer.fit(data, steps=5, progress=False)
    assert not np.array_equal(first, model.layers[0].kernel.numpy())
    # Adam by hand: the moments of the second layer continue, those of the first begin at the third update; Keras
    # corrects all biases by the optimizer's iterations.
    moments = {}
    for step in range(5):
        trained = oracle.layers[1].trainable_weights + (oracle.layers[0].trainable_weights if step >= 3 else [])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(oracle(X) - Y))
        gradients = tape.gradient(loss, trained)
        for variable, gradient in zip(trained, gradients, strict=True):
            g = gradient.numpy().astype("float64")
            m, v = moments.get(variable.path, (0.0, 0.0))
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            moments[variable.path] = m, v
            rate = 0.05 * np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
            variable.assign(variable.numpy() - rate * m / (np.sqrt(v) + 1e-7))
    assert_same_weights(model, oracle, 1e-5)


def test_averages_with_layers_that_are_frozen_and_unfrozen():
    """As averages by hand over all variables from the first update on, whatever is frozen."""
    model = dense_model()
    trainer, data = Trainer(model, keras.optimizers.SGD(0.1), {"error": mse()}, ema_decay=0.5), dataset(X, Y, batch=32)
    data, seen, phases = data.repeat(), [], {0: (False, True), 3: (True, True), 6: (True, False)}

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(model.get_weights())

    expected = model.get_weights()
    for begin, flags in phases.items():
        for layer, trainable in zip(model.layers, flags, strict=True):
            layer.trainable = trainable
        trainer.fit(data, steps=begin + 3, callbacks=[Notes()], progress=False)
    for after in seen:
        expected = [0.5 * mean + 0.5 * new for mean, new in zip(expected, after, strict=True)]
    with trainer.averaged_weights():
        found = model.get_weights()
    for each, mean in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, mean, atol=1e-6)


def test_transform_gradients_comes_after_clipping():
    class Signed(Trainer):
        def transform_gradients(self, gradients, variables):
            return [tf.sign(gradient) for gradient in gradients]

    model = linear_model()
    before = weights(model)
    trainer = Signed(model, keras.optimizers.SGD(0.1), {"error": mse()}, clip_norm=1e-3)
    trainer.fit(dataset(X, Y, batch=32).repeat(), steps=1, progress=False)
    np.testing.assert_allclose(np.abs(before[0] - weights(model)[0]), 0.1, atol=1e-6)


def test_update_metrics_and_log_in_a_hook_of_ones_own():
    class Own(Trainer):
        def compute_losses(self, batch, training):
            x, y = batch
            outputs = self.model(x, training=training)
            self.update_metrics(y, outputs)
            self.log("largest", tf.reduce_max(y))
            return {"error": tf.square(outputs - y)[:, 0]}

    model = linear_model()
    trainer = Own(model, keras.optimizers.SGD(0.0), metrics={"mae": keras.metrics.MeanAbsoluteError()})
    history = trainer.fit(dataset(X, Y, batch=8), epochs=1, progress=False).history
    assert history["mae"] == pytest.approx([np.mean(np.abs(model(X).numpy() - Y))], rel=1e-5)
    assert history["largest"] == pytest.approx([np.mean([Y[i : i + 8].max() for i in range(0, 32, 8)])], rel=1e-5)


def test_a_loop_over_tensors_in_compute_losses_works_in_evaluation_too():
    class Powers(Trainer):
        def compute_losses(self, batch, training):
            output = self.model(batch[0], training=training)[:, 0]
            power = tf.ones_like(output)
            for _ in tf.range(3):
                power = power * output
            return {"cube": power}

    trainer = Powers(linear_model(), "sgd")
    found = trainer.evaluate(dataset(X, Y, batch=8))["cube"]
    expected = np.mean(trainer.model(X).numpy()[:, 0].astype("float64") ** 3)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
