# %% [markdown]
# # Transfer learning in two phases
#
# A convolutional network learns to tell twelve textures apart. Its base is then used for three new textures, of which
# there are few examples: first only the new head is trained, then everything with a small learning rate. `trainable` is
# Keras's own switch; a trainer trains what is trainable when it makes its first update, so each phase has its trainer.

# %%
from looptape import Trainer  # first: TensorFlow then starts without its log lines

import keras
import numpy as np
import tensorflow as tf

STEPS = 600
BATCH = 32
FILTERS = 16
EXAMPLES = 18  # of the new task
keras.utils.set_random_seed(0)


def textures(kinds, count, seed):
    """(noisy waves [count, 16, 16, 1], which of the kinds [count]); a kind is a direction and a wavelength."""
    random = np.random.default_rng(seed)
    label, phase = random.integers(0, len(kinds), count), random.uniform(0, 2 * np.pi, size=(count, 1, 1))
    angle, length = (np.array(kinds)[label, i].reshape(-1, 1, 1) for i in (0, 1))
    rows, columns = np.mgrid[:16, :16]
    waves = np.sin(2 * np.pi * (rows * np.sin(angle) + columns * np.cos(angle)) / length + phase)
    images = waves + 2.0 * random.normal(size=waves.shape)
    return images[..., np.newaxis].astype("float32"), label


OLD = [(angle, length) for angle in np.pi * np.arange(4) / 4 for length in (3.0, 4.0, 5.0)]
NEW = [(np.pi / 8, 4.5), (3 * np.pi / 8, 3.5), (5 * np.pi / 8, 4.0)]


def make_data(kinds=NEW, count=EXAMPLES):
    return tf.data.Dataset.from_tensor_slices(textures(kinds, count, seed=0)).batch(BATCH)


# %%
def make_base():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            keras.layers.Conv2D(FILTERS, 5, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Conv2D(2 * FILTERS, 3, 2, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
        ],
        name="base",
    )


def with_head(base, classes):
    """A classifier on a base. With training=False BatchNormalization keeps the statistics it has learnt."""
    images = keras.Input((16, 16, 1))
    features = base(images) if base.trainable else base(images, training=False)
    return keras.Model(images, keras.layers.Dense(classes, name="head")(features))


def trainer_of(model, learning_rate):
    return Trainer(
        model,
        keras.optimizers.Adam(learning_rate),
        {"class": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    )


# %% [markdown]
# The old task, with many examples; and for comparison the new one from nothing.

# %%
test = textures(NEW, 1000, seed=5)
base = make_base()
trainer_of(with_head(base, len(OLD)), 3e-3).fit(make_data(OLD, 4096).repeat(), steps=STEPS, progress=False)
scratch = trainer_of(with_head(make_base(), len(NEW)), 3e-3)
scratch.fit(make_data().repeat(), steps=STEPS, progress=False)
print("from nothing:", scratch.evaluate(test)["accuracy"])
learnt = base.get_weights()

# %% [markdown]
# Phase one trains the head, phase two everything.


# %%
def make_model():
    keras.utils.set_random_seed(0)
    base.set_weights(learnt)
    base.trainable = False
    return with_head(base, len(NEW))


data = make_data().repeat()
model = make_model()
first = trainer_of(model, 1e-2)
first.fit(data, steps=STEPS // 2, progress=False)
print("after the head:", first.evaluate(test)["accuracy"])
base.trainable = True
trainer = trainer_of(model, 1e-4)
trainer.fit(data, steps=STEPS // 2, progress=False)
print("after all:", trainer.evaluate(test)["accuracy"])
