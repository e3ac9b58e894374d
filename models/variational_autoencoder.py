"""`VariationalAutoencoder`: an encoder with a Gaussian posterior, and a decoder."""

import math

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="looptape")
class VariationalAutoencoder(keras.Model):
    """Returns {"reconstruction": logits in the input's shape, "latent": mean and log-variance [batch, 2·latent]}.

    In training the latent code is drawn from the posterior; otherwise it is the posterior's mean. Use the losses
    `losses.bernoulli_negative_log_likelihood` and `losses.standard_normal_kl`.

    Args:
        input_shape: shape of one example, e.g. (28, 28, 1), with values in [0, 1].
        latent_size: number of dimensions of the latent code.
        units: size of each hidden layer of the encoder; the decoder mirrors them.
        seed: seed of the draws, or None.

    >>> outputs = VariationalAutoencoder((8, 8, 1), latent_size=3)(tf.zeros([2, 8, 8, 1]))
    >>> {name: tuple(value.shape) for name, value in outputs.items()}
    {'reconstruction': (2, 8, 8, 1), 'latent': (2, 6)}
    """

    def __init__(self, input_shape, latent_size=8, units=(256, 128), seed=None, **options):
        super().__init__(**options)
        self._arguments = {
            "input_shape": tuple(input_shape),
            "latent_size": latent_size,
            "units": tuple(units),
            "seed": seed,
        }
        hidden = lambda size: keras.layers.Dense(size, activation="relu")  # noqa: E731
        self.encoder = keras.Sequential(
            [
                keras.Input(tuple(input_shape)),
                keras.layers.Flatten(),
                *map(hidden, units),
                keras.layers.Dense(2 * latent_size, dtype="float32"),
            ],
            name="encoder",
        )
        self.decoder = keras.Sequential(
            [
                keras.Input((latent_size,)),
                *map(hidden, reversed(tuple(units))),
                keras.layers.Dense(math.prod(input_shape), dtype="float32"),
                keras.layers.Reshape(tuple(input_shape), dtype="float32"),
            ],
            name="decoder",
        )
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.build((None, *input_shape))

    def build(self, input_shape):
        self.built = True  # both halves are, since they know their inputs

    def call(self, inputs, training=False):
        gaussian = self.encoder(inputs)
        latent, log_variance = tf.split(gaussian, 2, axis=-1)
        if training:
            noise = keras.random.normal(tf.shape(latent), dtype="float32", seed=self.seed_generator)
            latent += tf.exp(0.5 * log_variance) * noise
        return {"reconstruction": self.decoder(latent), "latent": gaussian}

    def generate(self, latents):
        """Decodes latents [batch, latent], e.g. standard normal draws, into examples with values in [0, 1]."""
        return tf.sigmoid(self.decoder(latents))

    def get_config(self):
        return {**self._arguments, "name": self.name}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return cls(**config)
