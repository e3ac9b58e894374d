"""The same model with a `train_step` in a subclass of `keras.Model`."""

import keras
import tensorflow as tf


class QuantileForecast(keras.Model):
    def __init__(self, network, quantiles):
        super().__init__()
        self.network, self.quantiles = network, quantiles
        self.trackers = {name: keras.metrics.Mean(name=name) for name in (*quantiles, "inside")}

    @property
    def metrics(self):
        return list(self.trackers.values())

    def loss_of(self, batch, training):
        series, target = batch
        forecast = self.network(series, training=training)
        inside = tf.cast((forecast[:, 0] < target) & (target < forecast[:, -1]), tf.float32)
        self.trackers["inside"].update_state(inside)
        losses = []
        for i, (name, q) in enumerate(self.quantiles.items()):
            error = target - forecast[:, i]
            losses.append(tf.reduce_mean(tf.maximum(q * error, (q - 1) * error)))
            self.trackers[name].update_state(losses[-1])
        return tf.add_n(losses)

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = self.loss_of(batch, training=True)
        variables = self.network.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {name: tracker.result() for name, tracker in self.trackers.items()}

    def test_step(self, batch):
        self.loss_of(batch, training=False)
        return {name: tracker.result() for name, tracker in self.trackers.items()}


def compiled(script):
    model = QuantileForecast(script.make_model(), script.QUANTILES)
    model.compile(keras.optimizers.Adam(2e-3))
    return model
