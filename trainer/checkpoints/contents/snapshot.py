"""A copy of a trainer's state, taken at once, and the thread that writes it while training continues."""

import json
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class Snapshot(NamedTuple):
    """The contents of one checkpoint, frozen when it is taken."""

    step: int
    tensors: dict  # {name: a trackable that saves what the variable or iterator of this name held}
    contents: dict  # {name: [shape, dtype]}, see `store.describe`
    host: dict
    arrays: dict
    score: float | None = None


def take(step, state, contents, host, arrays=None, score=None):
    """A `Snapshot` of the present moment. Eager.

    A variable on the CPU is not copied here: TensorFlow copies it when the next update writes to it, because the
    snapshot still holds the old value. A variable on another device is copied to the host's memory.

    Args:
        step: the number of updates made.
        state: {name: tf.Variable, or an iterator of tf.data}.
        contents: their description.
        host: what JSON can hold.
        arrays: {name: array} of the host.
        score: how good the model is.
    """
    tensors = {name: _Held(item) for name, item in state.items()}
    arrays = {name: np.array(array) for name, array in (arrays or {}).items()}
    return Snapshot(step, tensors, contents, json.loads(json.dumps(host)), arrays, score)


class _Held(tf.Module):
    """Saves what a variable or an iterator held, under the keys that TensorFlow gives that object itself.

    There is no public way to do so: both attributes are what TensorFlow asks a trackable object for.
    """

    def __init__(self, item):
        super().__init__()
        held = _tensors(item)
        self._serialize_to_tensors = lambda: held  # a dict as an attribute would be tracked, too
        self._LEGACY_SAVEABLE_NAME = getattr(item, "_LEGACY_SAVEABLE_NAME", None)


def _tensors(item) -> dict[str, Any]:
    if isinstance(item, tf.Variable):
        with tf.device("CPU:0"):
            return {"VARIABLE_VALUE": tf.identity(item.read_value())}
    return {key: tf.identity(tensor) for key, tensor in item._serialize_to_tensors().items()}


class BackgroundWriter:
    """Runs one job at a time beside the training. All methods are called by the thread that trains.

    An exception of a job does not stay in its thread: the next call of any method raises it.

    >>> writer = BackgroundWriter()
    >>> writer.submit(lambda: "written", print)
    >>> writer.wait()
    written
    """

    def __init__(self):
        self._thread = None
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._finish: Callable[[Any], Any] | None = None

    def submit(self, job, finish):
        """Starts `job()` in a thread, after the job before it. `poll` or `wait` call `finish(what it returned)`.

        Waits for the job before: a disk that is slower than the training slows it down instead of filling the memory.
        """
        self.wait()
        self._finish = finish
        # Not a daemon: a process that ends by itself finishes its checkpoint first.
        self._thread = threading.Thread(target=self._run, args=(job,), name="looptape-checkpoint")
        self._thread.start()

    def _run(self, job):
        try:
            self._outcome = job()
        except BaseException as error:
            self._error = error

    def poll(self):
        """Finishes a job that is done, without waiting."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self):
        """Waits until nothing is being written, and finishes what was."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        outcome, error, finish = self._outcome, self._error, self._finish
        self._outcome = self._error = self._finish = None
        if error is not None:
            raise error
        finish(outcome)
