# %% [markdown]
# # Variational autoencoder
#
# Images of one blob at a random place are compressed to two numbers. The two terms of the objective are two named
# losses: `Trainer` weights them, logs them separately and checks that both reach the network.

# %%
from looptape import Trainer  # first: TensorFlow then starts without its log lines

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

STEPS = 1500
BATCH = 64
UNITS = 128
SIDE = 16
keras.utils.set_random_seed(0)


def make_data():
    """Endless batches of images [batch, SIDE, SIDE] with values between 0 and 1."""
    centre = np.random.default_rng(0).uniform(3, SIDE - 4, size=(2048, 2, 1, 1))
    rows, columns = np.mgrid[:SIDE, :SIDE]
    images = np.exp(-((rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2) / 6).astype("float32")
    return tf.data.Dataset.from_tensor_slices(images).shuffle(2048, seed=1).batch(BATCH).repeat()


# %% [markdown]
# The model is an ordinary Keras model. The layer that draws a latent vector owns a seed generator, whose state Looptape
# saves in every checkpoint.


# %%
class Sampling(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(2)

    def call(self, mean, log_variance):
        return mean + tf.exp(log_variance / 2) * keras.random.normal(tf.shape(mean), seed=self.seed)


def make_model():
    keras.utils.set_random_seed(0)
    images = keras.Input((SIDE, SIDE))
    hidden = keras.layers.Dense(UNITS, "relu")(keras.layers.Flatten()(images))
    mean, log_variance = keras.layers.Dense(2, name="mean")(hidden), keras.layers.Dense(2, name="log_variance")(hidden)
    decoder = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(UNITS, "relu"),
            keras.layers.Dense(SIDE * SIDE),
            keras.layers.Reshape((SIDE, SIDE)),
        ],
        name="decoder",
    )
    logits = decoder(Sampling()(mean, log_variance))
    return keras.Model(images, {"logits": logits, "mean": mean, "log_variance": log_variance})


# %% [markdown]
# What you write for `Trainer`: the two losses, one value per image.


# %%
class VariationalAutoencoder(Trainer):
    def compute_losses(self, images, training):
        out = self.model(images, training=training)
        error = tf.nn.sigmoid_cross_entropy_with_logits(images, out["logits"])
        divergence = tf.exp(out["log_variance"]) + tf.square(out["mean"]) - 1 - out["log_variance"]
        return {"reconstruction": tf.reduce_sum(error, axis=[1, 2]), "kl": tf.reduce_sum(divergence, axis=1) / 2}


# %%
data = make_data()
trainer = VariationalAutoencoder(make_model(), keras.optimizers.Adam(2e-3))
trainer.fit(data, steps=STEPS, progress=False)
print(trainer.evaluate(data.take(8)))

# %% [markdown]
# The latent plane, decoded on a grid: the blob moves smoothly.

# %%
grid = np.stack(np.meshgrid(np.linspace(-1.5, 1.5, 6), np.linspace(-1.5, 1.5, 6)), axis=-1).reshape(-1, 2)
images = tf.sigmoid(trainer.model.get_layer("decoder")(grid)).numpy().reshape(6, 6, SIDE, SIDE)
plt.imshow(images.transpose(0, 2, 1, 3).reshape(6 * SIDE, 6 * SIDE), cmap="gray")
plt.axis("off")
plt.show()
