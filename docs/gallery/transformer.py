# %% [markdown]
# # A Transformer that classifies sequences
#
# Two marks are hidden among other tokens: which one comes first? Attention has to compare their places. The model is
# an ordinary Keras model with dropout, and training it needs no subclass. Clipping is an argument of the trainer.

# %%
from looptape import Trainer  # first: TensorFlow then starts without its log lines

import keras
import numpy as np
import tensorflow as tf

STEPS = 1200
BATCH = 64
LENGTH = 24
WIDTH = 32
TOKENS = 30
keras.utils.set_random_seed(0)


def make_data(count=8192, seed=0):
    """Batches of (token numbers [batch, LENGTH], whether mark 0 comes before mark 1 [batch, 1])."""
    random = np.random.default_rng(seed)
    tokens = random.integers(2, TOKENS, size=(count, LENGTH), dtype="int32")
    places = random.permuted(np.tile(np.arange(LENGTH), (count, 1)), axis=1)[:, :2]
    np.put_along_axis(tokens, places, np.array([[0, 1]], "int32"), axis=1)
    first = places[:, :1] < places[:, 1:]
    return tf.data.Dataset.from_tensor_slices((tokens, first)).shuffle(count, seed=1).batch(BATCH)


# %%
class Positions(keras.layers.Layer):
    """Embeddings of tokens, plus one of each place."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = keras.layers.Embedding(TOKENS, WIDTH), keras.layers.Embedding(LENGTH, WIDTH)

    def call(self, tokens):
        return self.tokens(tokens) + self.places(tf.range(LENGTH))


def make_model():
    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = Positions()(tokens)
    for _ in range(2):
        looked_up = keras.layers.MultiHeadAttention(2, WIDTH // 2, dropout=0.1)(x, x)
        x = keras.layers.LayerNormalization()(x + looked_up)
        hidden = keras.layers.Dense(WIDTH)(keras.layers.Dense(2 * WIDTH, "relu")(x))
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(hidden))
    return keras.Model(tokens, keras.layers.Dense(1)(keras.layers.GlobalMaxPooling1D()(x)))


# %%
data, held_out = make_data().repeat(), make_data(1024, seed=5)
trainer = Trainer(
    make_model(),
    keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.0, STEPS, warmup_target=3e-3, warmup_steps=50)),
    {"answer": keras.losses.BinaryCrossentropy(from_logits=True)},
    metrics={"accuracy": keras.metrics.BinaryAccuracy(threshold=0.0)},
    clip_norm=1.0,
)
trainer.fit(data, steps=STEPS, eval_dataset=held_out, eval_every=STEPS, progress=False)
print(trainer.evaluate(held_out))
