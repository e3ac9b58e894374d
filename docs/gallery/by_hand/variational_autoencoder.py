"""The same model with a `train_step` in a subclass of `keras.Model`."""

import keras
import tensorflow as tf


class VariationalAutoencoder(keras.Model):
    def __init__(self, network):
        super().__init__()
        self.network = network
        self.total_tracker = keras.metrics.Mean(name="loss")
        self.reconstruction_tracker = keras.metrics.Mean(name="reconstruction")
        self.kl_tracker = keras.metrics.Mean(name="kl")

    @property
    def metrics(self):
        return [self.total_tracker, self.reconstruction_tracker, self.kl_tracker]

    def losses_of(self, images, training):
        out = self.network(images, training=training)
        error = tf.nn.sigmoid_cross_entropy_with_logits(images, out["logits"])
        divergence = tf.exp(out["log_variance"]) + tf.square(out["mean"]) - 1 - out["log_variance"]
        reconstruction = tf.reduce_mean(tf.reduce_sum(error, axis=[1, 2]))
        kl = tf.reduce_mean(tf.reduce_sum(divergence, axis=1) / 2)
        return reconstruction, kl

    def track(self, reconstruction, kl):
        self.total_tracker.update_state(reconstruction + kl)
        self.reconstruction_tracker.update_state(reconstruction)
        self.kl_tracker.update_state(kl)
        return {metric.name: metric.result() for metric in self.metrics}

    def train_step(self, images):
        with tf.GradientTape() as tape:
            reconstruction, kl = self.losses_of(images, training=True)
            total = reconstruction + kl
        variables = self.network.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(total, variables), variables, strict=True))
        return self.track(reconstruction, kl)

    def test_step(self, images):
        return self.track(*self.losses_of(images, training=False))


def compiled(script):
    model = VariationalAutoencoder(script.make_model())
    model.compile(keras.optimizers.Adam(2e-3))
    return model
