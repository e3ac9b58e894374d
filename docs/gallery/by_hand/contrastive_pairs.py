"""The same encoder with a `train_step` in a subclass of `keras.Model`."""

import keras
import tensorflow as tf


class Siamese(keras.Model):
    def __init__(self, encoder, margin):
        super().__init__()
        self.encoder, self.margin = encoder, margin
        self.trackers = {name: keras.metrics.Mean(name=name) for name in ("same", "different", "accuracy")}

    @property
    def metrics(self):
        return list(self.trackers.values())

    def losses_of(self, batch, training):
        signals, same = batch
        left, right = (self.encoder(signals[side], training=training) for side in ("left", "right"))
        distance = tf.sqrt(tf.reduce_sum(tf.square(left - right), axis=1) + 1e-9)
        apart = tf.square(tf.nn.relu(self.margin - distance))
        together = tf.reduce_sum(same * tf.square(distance)) / tf.reduce_sum(same)
        separate = tf.reduce_sum((1 - same) * apart) / tf.reduce_sum(1 - same)
        right_answers = tf.cast((distance < self.margin / 2) == (same > 0.5), tf.float32)
        self.trackers["same"].update_state(together)
        self.trackers["different"].update_state(separate)
        self.trackers["accuracy"].update_state(right_answers)
        return together + separate

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = self.losses_of(batch, training=True)
        variables = self.encoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {name: tracker.result() for name, tracker in self.trackers.items()}

    def test_step(self, batch):
        self.losses_of(batch, training=False)
        return {name: tracker.result() for name, tracker in self.trackers.items()}


def compiled(script):
    model = Siamese(script.make_model(), script.MARGIN)
    model.compile(keras.optimizers.Adam(2e-3))
    return model
