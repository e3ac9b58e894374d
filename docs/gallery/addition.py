# %% [markdown]
# # Addition, one character at a time
#
# A sequence-to-sequence model reads "27+58" and writes "85". No class is needed: a loss, a metric and a model. The one
# argument more than in `compile` is `probe_every`, which logs how far the gradient reaches back through both LSTMs.

# %%
from looptape import Trainer  # first: TensorFlow then starts without its log lines

import keras
import numpy as np
import tensorflow as tf

STEPS = 3000
BATCH = 128
UNITS = 96
DIGITS = 2
CHARACTERS = "0123456789+ "
keras.utils.set_random_seed(0)


def encode(text, length):
    return [CHARACTERS.index(character) for character in text.ljust(length)]


def make_data(seed=0):
    """Batches of (questions [batch, 2 · DIGITS + 1, characters], answers [batch, DIGITS + 1])."""
    numbers = np.random.default_rng(seed).integers(0, 10**DIGITS, size=(8192, 2))
    questions = [encode(f"{a}+{b}"[::-1], 2 * DIGITS + 1) for a, b in numbers]  # backwards, which is easier
    answers = [encode(str(a + b), DIGITS + 1) for a, b in numbers]
    questions = np.eye(len(CHARACTERS), dtype="float32")[questions]
    return tf.data.Dataset.from_tensor_slices((questions, answers)).shuffle(8192, seed=1).batch(BATCH)


# %%
def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((2 * DIGITS + 1, len(CHARACTERS))),
            keras.layers.LSTM(UNITS, name="reader"),
            keras.layers.RepeatVector(DIGITS + 1),
            keras.layers.LSTM(UNITS, return_sequences=True, name="writer"),
            keras.layers.Dense(len(CHARACTERS)),
        ]
    )


# %%
data = make_data().repeat()
trainer = Trainer(
    make_model(),
    keras.optimizers.Adam(5e-3),
    {"characters": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
    metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    probe_every=500,
)
trainer.fit(data, steps=STEPS, progress=False)
print(trainer.evaluate(make_data(seed=7)))

# %%
questions, answers = next(iter(make_data(seed=7)))
written = trainer.predict(questions[:5]).argmax(axis=-1)
for question, answer in zip(questions[:5].numpy().argmax(axis=-1), written, strict=True):
    print("".join(CHARACTERS[i] for i in question)[::-1].strip(), "=", "".join(CHARACTERS[i] for i in answer))

# %% [markdown]
# The gradient of the loss at every time step of the reader, from the ordinary backward pass:

# %%
print(trainer.timestep_gradients((questions, answers))["reader"]["state"].round(4))
