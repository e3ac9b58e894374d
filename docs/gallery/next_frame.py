# %% [markdown]
# # The next frame of a video, by a convolutional LSTM
#
# A square moves and bounces off the walls; from eight frames the network predicts the ninth. `probe_every` also works
# with `ConvLSTM2D`: it shows how far back in the video the gradient reaches.

# %%
from looptape import Trainer  # first: TensorFlow then starts without its log lines

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

STEPS = 400
BATCH = 16
FILTERS = 12
FRAMES = 8
SIDE = 16
keras.utils.set_random_seed(0)


def make_data(count=1024, seed=0):
    """Batches of (frames [batch, FRAMES, SIDE, SIDE, 1], the one after them [batch, SIDE, SIDE, 1])."""
    random = np.random.default_rng(seed)
    place = (
        random.uniform(0, SIDE - 4, size=(count, 1, 2))
        + random.choice([-2, -1, 1, 2], size=(count, 1, 2)) * (np.arange(FRAMES + 1)[:, np.newaxis])
    )
    place = (SIDE - 4) - np.abs(place % (2 * (SIDE - 4)) - (SIDE - 4))  # reflected
    first = np.round(place).astype(int)[..., np.newaxis]
    inside = (np.arange(SIDE) >= first) & (np.arange(SIDE) < first + 4)
    video = (inside[:, :, 0, :, np.newaxis] & inside[:, :, 1, np.newaxis, :])[..., np.newaxis].astype("float32")
    return tf.data.Dataset.from_tensor_slices((video[:, :-1], video[:, -1])).shuffle(count, seed=1).batch(BATCH)


# %%
def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((FRAMES, SIDE, SIDE, 1)),
            keras.layers.ConvLSTM2D(FILTERS, 5, padding="same", name="video"),
            keras.layers.Conv2D(1, 3, padding="same"),
        ]
    )


# %%
data, held_out = make_data().repeat(), make_data(128, seed=5)
trainer = Trainer(
    make_model(),
    keras.optimizers.Adam(5e-3),
    {"pixels": keras.losses.BinaryCrossentropy(from_logits=True)},
    probe_every=100,
)
trainer.fit(data, steps=STEPS, progress=False)
print(trainer.evaluate(held_out))
print(trainer.timestep_gradients(next(iter(held_out)))["video"]["state"])

# %% [markdown]
# The last frame seen, the one that came, and the prediction.

# %%
frames, following = next(iter(held_out))
predicted = tf.sigmoid(trainer.predict(frames[:4])).numpy()
shown = [[frames[i, -1, ..., 0], following[i, ..., 0], predicted[i, ..., 0]] for i in range(len(predicted))]
plt.imshow(np.block(shown), cmap="gray")
plt.axis("off")
plt.show()
