"""The same denoiser with a `train_step`, and averaged weights, in a subclass of `keras.Model`."""

import keras
import tensorflow as tf


class Diffusion(keras.Model):
    def __init__(self, denoiser, make_model, rates, decay):
        super().__init__()
        self.denoiser, self.rates, self.decay = denoiser, rates, decay
        self.averaged = make_model()
        self.averaged.trainable = False
        self.noise_tracker = keras.metrics.Mean(name="noise")

    @property
    def metrics(self):
        return [self.noise_tracker]

    def loss_of(self, points, denoiser):
        time = keras.random.uniform([tf.shape(points)[0], 1], seed=self.denoiser.seed)
        noise = keras.random.normal(tf.shape(points), seed=self.denoiser.seed)
        signal_rate, noise_rate = self.rates(time)
        found = denoiser(signal_rate * points + noise_rate * noise, time)
        return tf.reduce_mean(tf.square(found - noise))

    def train_step(self, points):
        with tf.GradientTape() as tape:
            loss = self.loss_of(points, self.denoiser)
        variables = self.denoiser.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for mean, variable in zip(self.averaged.network.weights, self.denoiser.network.weights, strict=True):
            mean.assign(self.decay * mean + (1 - self.decay) * variable)
        self.noise_tracker.update_state(loss)
        return {"noise": self.noise_tracker.result()}

    def test_step(self, points):
        self.noise_tracker.update_state(self.loss_of(points, self.averaged))
        return {"noise": self.noise_tracker.result()}


def compiled(script):
    model = Diffusion(script.make_model(), script.make_model, script.rates, script.DECAY)
    model.compile(keras.optimizers.Adam(2e-3))
    return model
