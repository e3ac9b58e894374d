"""Runs that die, and what they leave."""

import os
import shutil
import subprocess
import sys

import keras
import tensorflow as tf

from looptape.trainer.checkpoints import store as checkpoints
from looptape.trainer.checkpoints import trainer_state
from looptape.trainer.counters import Counters
from looptape.trainer.step.nonfinite import Skips
from tests.trainer.tools import read_events

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TIMING = {"throughput/examples_per_second", "throughput/data_wait"}


class Killed(Exception):
    """Stands for SIGKILL where a process of its own would take too long: nothing is saved on the way out."""


class Killer(keras.callbacks.Callback):
    """Ends a run in the middle of everything, once a step is reached."""

    def __init__(self, trainer, step):
        super().__init__()
        self._trainer, self._step = trainer, step

    def on_train_batch_end(self, batch, logs=None):
        if self._trainer._engine.counters.step >= self._step:
            raise Killed


class Reborn:
    """A trainer that can be made as new, without tracing again."""

    def __init__(self, trainer, data):
        self.trainer = trainer
        trainer._engine.prepare(iter(data))
        self._initial = [(v, v.numpy()) for v in self.variables(data)]

    def variables(self, data):
        class Nowhere:
            def checkpointable(self):
                return False

        return list(trainer_state.tracked_state(self.trainer._engine, Nowhere()).values())

    def reset(self):
        trainer = self.trainer
        for variable, value in self._initial:
            variable.assign(value)
        trainer._engine.counters = Counters(Skips(trainer._engine))
        trainer._engine.sources.clear()
        trainer._engine.ledger.take()
        trainer.model.stop_training = False
        return trainer


def copied(directory, name):
    target = os.path.join(os.path.dirname(directory), name)
    return shutil.copytree(directory, target)


def rows(workdir, run="train"):
    """[(step, {tag: value})] without what the clock decides."""
    found = read_events(os.path.join(workdir, run))
    return [(step, {tag: value for tag, value in values.items() if tag not in TIMING}) for step, values in found]


def scalars(workdir, run="train"):
    """{step: {tag: number}}; vectors and pictures left out, several events of a step joined."""
    found = {}
    for step, values in rows(workdir, run):
        numbers = {tag: float(value) for tag, value in values.items() if value.shape == () and value.dtype.kind == "f"}
        found.setdefault(step, {}).update(numbers)
    return found


def process(module, *arguments, **options):
    """Starts `python -m module` with pipes for what it prints; or, with "-c" for a module, the program after it."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": REPOSITORY}
    command = [sys.executable, *(["-m"] if module != "-c" else []), module, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **{**pipes, **options})


def shuffled(x, y, batch):
    tf.random.set_seed(4)  # a part of what a shuffle is seeded with
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=4).repeat().batch(batch)


def fails_from(step, monkeypatch):
    """Makes every save from a step on fail as a full disk does."""
    write = tf.train.Checkpoint.write

    def full(checkpoint, path, *arguments, **options):
        directory = os.path.basename(os.path.dirname(path))
        if directory.startswith(checkpoints.TEMPORARY) and int(directory.split("-")[1]) >= step:
            raise tf.errors.ResourceExhaustedError(None, None, "no space left on device")
        return write(checkpoint, path, *arguments, **options)

    monkeypatch.setattr(tf.train.Checkpoint, "write", full)
