# %% [markdown]
# # DCGAN
#
# A convolutional generator learns to draw bright rings. Generator and discriminator have an optimizer each:
# `train_step` calls `minimize` once per network, and each call runs the whole pipeline (check, clip, apply, log).

# %%
from looptape import Trainer  # first: TensorFlow then starts without its log lines

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

STEPS = 3000
BATCH = 32
FILTERS = 16
LATENT = 16
keras.utils.set_random_seed(0)


def make_data():
    """Endless batches of images [batch, 16, 16, 1] between -1 and 1: rings of random place and size."""
    random = np.random.default_rng(0)
    centre, radius = random.uniform(5, 10, size=(2048, 2, 1, 1)), random.uniform(2.5, 4.5, size=(2048, 1, 1))
    rows, columns = np.mgrid[:16, :16]
    distance = np.hypot(rows - centre[:, 0], columns - centre[:, 1])
    images = (2 * np.exp(-((distance - radius) ** 2)) - 1)[..., np.newaxis].astype("float32")
    return tf.data.Dataset.from_tensor_slices(images).shuffle(2048, seed=1).batch(BATCH, drop_remainder=True).repeat()


# %%
class Pair(keras.Model):
    """Generator and discriminator. Calling it judges generated images."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(2)
        self.generator = keras.Sequential(
            [
                keras.Input((LATENT,)),
                keras.layers.Dense(4 * 4 * 2 * FILTERS, use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
                keras.layers.Reshape((4, 4, 2 * FILTERS)),
                keras.layers.Conv2DTranspose(FILTERS, 4, 2, "same", activation="relu"),
                keras.layers.Conv2DTranspose(1, 4, 2, "same", activation="tanh"),
            ],
            name="generator",
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((16, 16, 1)),
                keras.layers.Conv2D(FILTERS, 4, 2, "same", activation="silu"),
                keras.layers.Conv2D(2 * FILTERS, 4, 2, "same", activation="silu"),
                keras.layers.Flatten(),
                keras.layers.Dropout(0.2, seed=3),
                keras.layers.Dense(1),
            ],
            name="discriminator",
        )
        self.built = True  # both parts are

    def draw(self, count, training):
        return self.generator(keras.random.normal([count, LATENT], seed=self.seed), training=training)

    def call(self, latents, training=False):
        return self.discriminator(self.generator(latents, training=training), training=training)


def make_model():
    keras.utils.set_random_seed(0)
    return Pair()


# %%
class DCGAN(Trainer):
    def __init__(self, pair, optimizer, generator_optimizer):
        super().__init__(pair, optimizer)
        self.generator_optimizer = generator_optimizer

    def judge(self, real, training):
        fake = self.model.draw(tf.shape(real)[0], training)
        logits = self.model.discriminator(tf.concat([real, fake], axis=0), training=training)[:, 0]
        on_real, on_fake = tf.split(logits, 2)
        return {"real": tf.nn.softplus(-on_real), "fake": tf.nn.softplus(on_fake)}

    def forge(self, real, training):
        fake = self.model.draw(tf.shape(real)[0], training)
        return {"fooled": tf.nn.softplus(-self.model.discriminator(fake, training=training)[:, 0])}

    def train_step(self, real):
        pair = self.model
        self.minimize(real, self.judge, variables=pair.discriminator.trainable_variables, name="discriminator")
        self.minimize(
            real,
            self.forge,
            variables=pair.generator.trainable_variables,
            optimizer=self.generator_optimizer,
            name="generator",
        )
        return {}

    def eval_step(self, real):
        return {**self.judge(real, False), **self.forge(real, False)}


# %%
data = make_data()
trainer = DCGAN(make_model(), keras.optimizers.Adam(4e-4, beta_1=0.5), keras.optimizers.Adam(4e-4, beta_1=0.5))
trainer.fit(data, steps=STEPS, progress=False)
print(trainer.evaluate(data.take(8)))

# %% [markdown]
# Real images above, generated ones below.

# %%
fake = trainer.model.draw(8, training=False).numpy()
real = next(iter(data)).numpy()[:8]
plt.imshow(np.block([[image[..., 0] for image in row] for row in (real, fake)]), cmap="gray")
plt.axis("off")
plt.show()
