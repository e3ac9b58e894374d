# %% [markdown]
# # Wasserstein GAN with gradient penalty
#
# Points on a ring of eight Gaussians. The penalty is a gradient inside a loss, so `compute_losses` opens a tape of its
# own; the critic makes three updates for each one of the generator. The penalty's factor is a loss weight, and
# TensorBoard shows the penalty on its own.

# %%
from looptape import Trainer  # first: TensorFlow then starts without its log lines

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

STEPS = 2000
BATCH = 128
UNITS = 128
LATENT = 8
CRITIC_STEPS = 3
keras.utils.set_random_seed(0)


def make_data():
    """Endless batches of points [batch, 2]."""
    random = np.random.default_rng(0)
    angle = 2 * np.pi * random.integers(0, 8, 8192) / 8
    points = 2 * np.stack([np.cos(angle), np.sin(angle)], axis=1) + 0.05 * random.normal(size=(8192, 2))
    points = tf.data.Dataset.from_tensor_slices(points.astype("float32"))
    return points.shuffle(8192, seed=1).batch(BATCH, drop_remainder=True).repeat()


# %%
def dense(name, inputs, outputs):
    hidden = [keras.layers.Dense(UNITS, "relu") for _ in range(3)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(outputs)], name=name)


class Pair(keras.Model):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(2)
        self.generator, self.critic = dense("generator", LATENT, 2), dense("critic", 2, 1)
        self.built = True  # both parts are

    def draw(self, count):
        return self.generator(keras.random.normal([count, LATENT], seed=self.seed))

    def between(self, real, fake):
        """Points on the lines from real to generated ones."""
        part = keras.random.uniform([tf.shape(real)[0], 1], seed=self.seed)
        return real + part * (fake - real)

    def call(self, latents):
        return self.critic(self.generator(latents))


def make_model():
    keras.utils.set_random_seed(0)
    return Pair()


# %%
class WGAN(Trainer):
    def __init__(self, pair, optimizer, generator_optimizer):
        super().__init__(pair, optimizer)
        self.generator_optimizer = generator_optimizer

    def criticise(self, real, training):
        fake = self.model.draw(tf.shape(real)[0])
        points = self.model.between(real, fake)
        with tf.GradientTape() as tape:
            tape.watch(points)
            score = self.model.critic(points)
        slope = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(score, points)), axis=1) + 1e-9)
        distance = self.model.critic(fake) - self.model.critic(real)
        return {"distance": distance[:, 0], "penalty": tf.square(slope - 1)}

    def forge(self, real, training):
        return {"score": -self.model.critic(self.model.draw(tf.shape(real)[0]))[:, 0]}

    def train_step(self, real):
        critic, generator = self.model.critic, self.model.generator
        for _ in range(CRITIC_STEPS):
            self.minimize(
                real,
                self.criticise,
                variables=critic.trainable_variables,
                loss_weights={"distance": 1.0, "penalty": 10.0},
                name="critic",
            )
        self.minimize(
            real,
            self.forge,
            variables=generator.trainable_variables,
            optimizer=self.generator_optimizer,
            name="generator",
        )
        return {}

    def eval_step(self, real):
        return self.criticise(real, False)


# %%
data = make_data()
optimizers = [keras.optimizers.Adam(1e-3, beta_1=0.0, beta_2=0.9) for _ in range(2)]
trainer = WGAN(make_model(), *optimizers)
trainer.fit(data, steps=STEPS, progress=False)
print(trainer.evaluate(data.take(8)))

# %% [markdown]
# How many of the eight modes have at least one of a thousand generated points within 0.3?

# %%
fake = trainer.model.draw(1000).numpy()
angle = 2 * np.pi * np.arange(8) / 8
modes = 2 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
print("modes:", int((np.linalg.norm(fake[:, None] - modes, axis=-1) < 0.3).any(axis=0).sum()))
plt.scatter(*next(iter(data)).numpy().T, s=4, label="real")
plt.scatter(*fake[:256].T, s=4, label="generated")
plt.legend()
plt.show()
