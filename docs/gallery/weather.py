# %% [markdown]
# # A weather-like series
#
# Hourly temperatures with a yearly and a daily cycle, and fronts that pass every few days. From five days the network
# predicts the temperature half a day ahead, as three quantiles: three losses on three columns of one output.

# %%
from looptape import Trainer  # first: TensorFlow then starts without its log lines

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

STEPS = 1000
BATCH = 64
UNITS = 32
PAST = 60  # every other hour of five days
AHEAD = 12  # hours
QUANTILES = {"low": 0.1, "median": 0.5, "high": 0.9}
keras.utils.set_random_seed(0)


def temperatures(hours):
    random = np.random.default_rng(0)
    hour = np.arange(hours)
    fronts = np.zeros(hours)
    for t in range(1, hours):
        fronts[t] = 0.98 * fronts[t - 1] + random.normal()
    cycles = 8 * np.sin(2 * np.pi * hour / (24 * 365)) + 4 * np.sin(2 * np.pi * hour / 24)
    return ((cycles + fronts) / 8).astype("float32")


def make_data(first=0, last=12000):
    """Batches of (series [batch, PAST, 1], what is measured AHEAD hours later [batch])."""
    series = temperatures(16000)[first:last]
    return keras.utils.timeseries_dataset_from_array(
        series[: -AHEAD - 2 * PAST, np.newaxis],
        series[2 * (PAST - 1) + AHEAD :],
        sequence_length=PAST,
        sampling_rate=2,
        batch_size=BATCH,
        shuffle=True,
        seed=1,
    )


# %%
def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((PAST, 1)), keras.layers.LSTM(UNITS), keras.layers.Dense(len(QUANTILES))])


class QuantileForecast(Trainer):
    def compute_losses(self, batch, training):
        series, target = batch
        forecast = self.model(series, training=training)
        self.log("inside", tf.cast((forecast[:, 0] < target) & (target < forecast[:, -1]), tf.float32))
        errors = {name: target - forecast[:, i] for i, name in enumerate(QUANTILES)}
        return {name: tf.maximum(q * errors[name], (q - 1) * errors[name]) for name, q in QUANTILES.items()}


# %%
data = make_data().repeat()
trainer = QuantileForecast(make_model(), keras.optimizers.Adam(2e-3))
trainer.fit(data, steps=STEPS, progress=False)
held_out = make_data(first=12000, last=16000)
print(trainer.evaluate(held_out))  # `inside` should be near 0.8

# %%
series, target = next(iter(held_out))
forecast = trainer.predict(series)
order = np.argsort(target)
plt.fill_between(range(len(order)), forecast[order, 0], forecast[order, -1], alpha=0.3, label="80 % interval")
plt.plot(forecast[order, 1], label="median")
plt.plot(target.numpy()[order], "k.", label="measured")
plt.legend()
plt.show()
