# %% [markdown]
# # Contrastive pairs
#
# A Siamese network: one encoder sees two noisy signals and puts them close together if they show the same pattern, and
# at least a margin apart if not (Hadsell et al. 2006). Two named losses show whether one side dominates. Weights make
# each loss count only its own pairs.

# %%
from looptape import Trainer  # first: TensorFlow then starts without its log lines

import keras
import numpy as np
import tensorflow as tf

STEPS = 600
BATCH = 64
UNITS = 64
MARGIN = 1.0
keras.utils.set_random_seed(0)


def make_data(count=4096, seed=0):
    """Batches of ({"left", "right"} signals [batch, 32], whether they show the same of ten patterns)."""
    patterns, random = np.random.default_rng(9).normal(size=(10, 32)), np.random.default_rng(seed)
    left, right = random.integers(0, 10, count), random.integers(0, 10, count)
    right = np.where(random.random(count) < 0.5, left, right)
    signals = {
        side: (patterns[label] + 0.7 * random.normal(size=(count, 32))).astype("float32")
        for side, label in (("left", left), ("right", right))
    }
    same = (left == right).astype("float32")
    return tf.data.Dataset.from_tensor_slices((signals, same)).shuffle(count, seed=1).batch(BATCH)


# %%
def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((32,)), keras.layers.Dense(UNITS, "relu"), keras.layers.Dense(8)])


class Siamese(Trainer):
    def compute_losses(self, batch, training):
        signals, same = batch
        left, right = (self.model(signals[side], training=training) for side in ("left", "right"))
        distance = tf.sqrt(tf.reduce_sum(tf.square(left - right), axis=1) + 1e-9)
        self.log("accuracy", tf.cast((distance < MARGIN / 2) == (same > 0.5), tf.float32))
        apart = tf.square(tf.nn.relu(MARGIN - distance))
        return {"same": (tf.square(distance), same), "different": (apart, 1 - same)}


# %%
data = make_data().repeat()
trainer = Siamese(make_model(), keras.optimizers.Adam(2e-3))
trainer.fit(data, steps=STEPS, progress=False)
print(trainer.evaluate(make_data(1024, seed=5)))
