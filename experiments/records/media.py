"""Pictures and texts for TensorBoard, made after every evaluation: samples, reconstructions, what a user wants to see.

    shown = media.Show(trainer, config.workdir, {"samples": lambda: media.tiled(model.generate(codes), columns=8)})
    return launch.Experiment(trainer, dataset, held_out, callbacks=(shown,))

They are in the run `shown` of TensorBoard, under Images and Text.
"""

import os

import keras
import numpy as np

from looptape.trainer.loggers.interface import Output
from looptape.trainer.summaries import event_writer


class Show(keras.callbacks.Callback):
    """Calls functions after each evaluation and writes what they give as the run `shown` below the work directory.

    A text is Markdown; an array [height, width, channels] is an image, uint8 or floats in [0, 1]. It is a run of its
    own because TensorBoard follows one event file per run during training. After a resume no step appears twice.
    Loggers of `fit` receive them, too.

    Args:
        trainer: the trainer, for the step.
        workdir: of the experiment; with None nothing is called or written.
        functions: {tag: function without arguments that returns a text or an image}.
    """

    remembers = False

    def __init__(self, trainer, workdir, functions):
        super().__init__()
        self._trainer, self._functions = trainer, functions
        self._directory = None if workdir is None else os.path.join(workdir, "shown")
        self._writer, self._written = None, 0

    def on_train_begin(self, logs=None):
        if self._directory is not None:
            self._open(self._trainer.step.numpy())

    def on_test_end(self, logs=None):
        if self._writer is None:
            return
        step = self._trainer.step.numpy()
        if step <= self._written:  # training went back to a checkpoint, or this evaluation is made once more
            self._writer.close()
            self._open(step - 1)
        rows = Output("shown", lambda: self._writer, self._trainer._engine.loggers)
        rows.write(step, [_summary(tag, function()) for tag, function in self._functions.items()])
        self._writer.flush()
        self._written = step

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.close()

    def _open(self, step):
        """A new event file after what was shown up to a step."""
        event_writer.drop_later_events(self._directory, step)
        self._writer, self._written = event_writer.EventWriter(self._directory, step), step


def tiled(images, columns):
    """One image [height, width, channels] of images [count, height, width, channels], row by row; the rest is black."""
    images = np.asarray(images)
    count, height, width, channels = images.shape
    rows = -(-count // columns)
    filled = np.zeros((rows * columns, height, width, channels), images.dtype)
    filled[:count] = images
    grid = filled.reshape(rows, columns, height, width, channels).transpose(0, 2, 1, 3, 4)
    return grid.reshape(rows * height, columns * width, channels)


def code(text):
    """Markdown that shows a text as it is, line by line."""
    return "".join(f"    {line}\n" for line in text.split("\n"))


def _summary(tag, value):
    if isinstance(value, str):
        return event_writer.text(tag, value)
    pixels = np.asarray(value)
    if pixels.ndim != 3:
        raise ValueError(
            f"{tag!r} gave an array of shape {pixels.shape}; an image must be [height, width, channels]. Use `tiled` "
            "for several images."
        )
    if pixels.dtype != np.uint8:
        pixels = np.round(255 * np.clip(pixels, 0, 1)).astype(np.uint8)
    return event_writer.image(tag, pixels)
