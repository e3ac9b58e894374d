"""`AdversarialPair`: a small generator and its discriminator."""

import keras


@keras.saving.register_keras_serializable(package="looptape")
class AdversarialPair(keras.Model):
    """A generator and a discriminator. Calling it with latents [batch, latent] returns the logits [batch, 1] of "real".

    Train the two in turns, each on its own variables: `pair.generator(latents)` returns examples [batch, features],
    `pair.discriminator(examples)` returns logits [batch, 1].

    Args:
        features: number of features of an example.
        latent_size: size of the generator's input.
        units: size of each hidden layer of both networks.

    >>> pair = AdversarialPair(features=2, latent_size=16)
    >>> examples = pair.generator(keras.ops.zeros((3, 16)))
    >>> tuple(examples.shape), tuple(pair.discriminator(examples).shape)
    ((3, 2), (3, 1))
    """

    def __init__(self, features=2, latent_size=16, units=(128, 128), **options):
        super().__init__(**options)
        self._arguments = {"features": features, "latent_size": latent_size, "units": tuple(units)}
        self.latent_size = latent_size
        self.generator = _network(latent_size, features, units, "relu", "generator")
        self.discriminator = _network(features, 1, units, "leaky_relu", "discriminator")
        self.built = True  # both are, since they know their inputs

    def call(self, latents, training=False):
        return self.discriminator(self.generator(latents, training=training), training=training)

    def get_config(self):
        return {**self._arguments, "name": self.name}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return cls(**config)


def _network(inputs, outputs, units, activation, name):
    hidden = [keras.layers.Dense(size, activation=activation) for size in units]
    return keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(outputs, dtype="float32")], name=name)
