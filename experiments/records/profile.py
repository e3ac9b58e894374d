"""`--profile=from-to`: a profile of a few updates for TensorBoard."""

import os

import keras
import tensorflow as tf


class Profile(keras.callbacks.Callback):
    """Profiles the updates `first` to `last`. It makes every call run one update, which costs small models time.

    Args:
        trainer: counts the updates.
        first: the first update in the profile, counting from 1.
        last: the last one.
        workdir: the profile goes to its run `train`.
    """

    def __init__(self, trainer, first, last, workdir):
        super().__init__()
        self._trainer, self._first, self._last = trainer, first, last
        self._directory = os.path.join(workdir, "train")
        self._running = False

    def on_train_batch_begin(self, batch, logs=None):
        if self._trainer.step.numpy() + 1 == self._first:
            tf.profiler.experimental.start(self._directory)
            self._running = True

    def on_train_batch_end(self, batch, logs=None):
        if self._running and self._trainer.step.numpy() >= self._last:
            self._stop()

    def on_train_end(self, logs=None):
        self._stop()

    def _stop(self):
        if self._running:
            self._running = False
            tf.profiler.experimental.stop()
