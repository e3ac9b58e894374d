"""What several test files of the trainer use."""

import glob
import os
import re

import keras
import numpy as np
import tensorflow as tf
from tensorboard.compat.proto import event_pb2

from looptape import Trainer


def dense_model(features=3, units=4, outputs=1, seed=1):
    """A small model with the same weights every time."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((features,)), keras.layers.Dense(units, activation="tanh"), keras.layers.Dense(outputs)]
    )


def linear_model(features=3, seed=1):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((features,)), keras.layers.Dense(1)])


def regression(count=32, features=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, features)).astype("float32")
    y = (x @ rng.normal(size=(features, 1)) + 0.1 * rng.normal(size=(count, 1))).astype("float32")
    return x, y


def dataset(*arrays, batch):
    arrays = arrays if len(arrays) > 1 else arrays[0]
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch)


def mse():
    return keras.losses.MeanSquaredError()


def weights(model):
    return [w.numpy() for w in model.trainable_variables]


def assert_same_weights(a, b, tolerance=1e-6):
    for left, right in zip(weights(a), weights(b), strict=True):
        np.testing.assert_allclose(left, right, atol=tolerance, rtol=0)


def assert_identical_weights(a, b):
    for left, right in zip(weights(a), weights(b), strict=True):
        np.testing.assert_array_equal(left, right)


def train(model, data, optimizer=None, losses=None, *, steps=None, epochs=None, trainer_class=Trainer, **options):
    """A trainer that has trained."""
    optimizer = keras.optimizers.SGD(0.1) if optimizer is None else optimizer
    losses = {"error": mse()} if losses is None and trainer_class is Trainer else losses
    trainer = trainer_class(model, optimizer, losses, **options)
    trainer.fit(data, steps=steps, epochs=epochs, progress=False)
    return trainer


def _numbers(path):
    return [int(number) for number in re.findall(r"\d+", os.path.basename(path))]


def read_events(directory):
    """[(step, {tag: value})] of all event files of a run, in the order of writing."""
    rows = []
    # By number: the tenth file that a process makes comes after the ninth, also within one second.
    for path in sorted(glob.glob(os.path.join(directory, "events*")), key=_numbers):
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            event = event_pb2.Event.FromString(record)
            values = {value.tag: tf.make_ndarray(value.tensor) for value in event.summary.value}
            if values:
                rows.append((event.step, values))
    return rows
