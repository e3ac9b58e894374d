# %% [markdown]
# # Diffusion
#
# A network learns to tell noise from signal on a spiral of points; sampling starts from noise and removes it step by
# step (Ho et al. 2020, with the deterministic steps of Song et al. 2021). Samples are drawn with averaged weights,
# which take one argument here: `ema_decay`.

# %%
from looptape import Trainer  # first: TensorFlow then starts without its log lines

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

STEPS = 4000
BATCH = 256
UNITS = 128
DECAY = 0.995
keras.utils.set_random_seed(0)


def make_data():
    """Endless batches of points [batch, 2]."""
    random = np.random.default_rng(0)
    angle = 3 * np.pi * np.sqrt(random.random(8192)) + 1
    points = np.stack([angle * np.cos(angle), angle * np.sin(angle)], axis=1) / 6 + 0.02 * random.normal(size=(8192, 2))
    points = tf.data.Dataset.from_tensor_slices(points.astype("float32"))
    return points.shuffle(8192, seed=1).batch(BATCH, drop_remainder=True).repeat()


# %% [markdown]
# At time 0 a point is all signal, at time 1 all noise; the model predicts the noise in it.


# %%
def rates(time):
    """(signal rate, noise rate) at times [batch, 1]; their squares add up to 1."""
    angle = 0.02 + time * (np.pi / 2 - 0.04)
    return tf.cos(angle), tf.sin(angle)


class Denoiser(keras.Model):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(2)
        hidden = [keras.layers.Dense(UNITS, "silu") for _ in range(3)]
        self.network = keras.Sequential([keras.Input((10,)), *hidden, keras.layers.Dense(2)])
        self.built = True  # its part is

    def call(self, noisy, time):
        waves = [wave(np.pi * 2**k * time) for k in range(4) for wave in (tf.sin, tf.cos)]
        return self.network(tf.concat([noisy, *waves], axis=1))

    def sample(self, count, steps):
        points = keras.random.normal([count, 2], seed=self.seed)
        for step in range(steps, 0, -1):
            time, earlier = (tf.fill([count, 1], t / steps) for t in (float(step), float(step - 1)))
            noise = self(points, time)
            signal_rate, noise_rate = rates(time)
            clean = (points - noise_rate * noise) / signal_rate
            signal_rate, noise_rate = rates(earlier)
            points = signal_rate * clean + noise_rate * noise
        return points


def make_model():
    keras.utils.set_random_seed(0)
    return Denoiser()


# %%
class Diffusion(Trainer):
    def compute_losses(self, points, training):
        time = keras.random.uniform([tf.shape(points)[0], 1], seed=self.model.seed)
        noise = keras.random.normal(tf.shape(points), seed=self.model.seed)
        signal_rate, noise_rate = rates(time)
        found = self.model(signal_rate * points + noise_rate * noise, time)
        return {"noise": tf.reduce_mean(tf.square(found - noise), axis=1)}


# %%
data = make_data()
trainer = Diffusion(make_model(), keras.optimizers.Adam(2e-3), ema_decay=DECAY)
trainer.fit(data, steps=STEPS, progress=False)
print(trainer.evaluate(data.take(8), averaged=True))

# %%
with trainer.averaged_weights():
    samples = trainer.model.sample(1000, steps=50).numpy()
real = np.concatenate(list(data.take(8).as_numpy_iterator()))
nearest = np.sqrt(np.square(samples[:, None] - real).sum(axis=-1)).min(axis=1)
print("median distance of a sample from the data:", np.median(nearest).round(3))
plt.scatter(*real[:1000].T, s=2, label="data")
plt.scatter(*samples.T, s=2, label="samples")
plt.legend()
plt.show()
