"""Decides which loops XLA compiles, in how many parts, and for how many shapes."""

import functools
import os
import threading
import warnings

import tensorflow as tf

from looptape.trainer.recurrent.hoisted import scan
from looptape.trainer.variables import OWN_CALL

LIMIT = 16


class CompiledShapes:
    """The shapes that a layer's loops are compiled for. XLA compiles each (time, batch) anew; past `limit` of them the
    plain loop runs, and one warning says so.
    """

    def __init__(self, name, limit=LIMIT):
        self.name = name
        self.limit = limit
        self.seen: set[tuple[int, int]] = set()
        self._warned = False
        self._lock = threading.Lock()

    def admit(self, time, batch):
        """Whether loops over this shape are compiled: a bool if both sizes are integers, else a bool tensor."""
        if isinstance(time, int) and isinstance(batch, int):
            return self._admit(time, batch)
        admitted = tf.numpy_function(self._admit, [time, batch], tf.bool, name=OWN_CALL)
        return tf.ensure_shape(admitted, [])

    def _admit(self, time, batch):
        shape = int(time), int(batch)
        with self._lock:
            if shape not in self.seen and len(self.seen) < self.limit:
                self.seen.add(shape)
            admitted = shape in self.seen
            warn = not admitted and not self._warned
            self._warned |= warn
        if warn:
            warnings.warn(
                f"The loop of {self.name!r} was compiled for {self.limit} shapes; a batch of {batch} sequences of "
                f"length {time} and every other new shape runs the plain loop, which gives the same result more "
                "slowly. Pad the sequences to a few lengths and drop the last, smaller batch to stay below the limit.",
                stacklevel=2,
            )
        return admitted


def is_compiled(dtype):
    """The "auto" rule. In float32 on a processor the compiled loops were the faster ones at every size measured (see
    `benchmarks.recurrent`); other dtypes and GPUs were not measured.
    """
    return dtype == tf.float32 and not tf.config.list_logical_devices("GPU")


def parts(batch, units):
    """Into how many parts a batch is cut, whose compiled loops run side by side: XLA runs a loop mostly on one thread.

    Two parts took 0.84 of the time of one at 32 examples and 64 units (LSTM, GRU), 0.92 at 16 units, 0.85 at 16
    examples; and 1.12 at 8 examples and 16 units.

    Args:
        batch: number of examples; None if unknown, which counts as 32.
    """
    batch = 32 if batch is None else batch
    threads = tf.config.threading.get_inter_op_parallelism_threads() or os.cpu_count() or 1
    if batch * units * units < 2**13:  # the cut costs more than it saves
        return 1
    return max(1, min(threads, batch // 8))


def forward(recurrence, *arguments):
    """`loops.forward`, compiled."""
    return _compiled(scan.forward, recurrence, _signature(arguments))(*arguments)


def backward(recurrence, *arguments):
    """`loops.backward`, compiled."""
    return _compiled(scan.backward, recurrence, _signature(arguments))(*arguments)


@functools.lru_cache(maxsize=256)
def _compiled(loop, recurrence, signature):
    """A function for one signature: programs with and without probes share it, and TensorFlow, which would warn of one
    function with many traces, sees one trace of each.
    """
    return tf.function(functools.partial(loop, recurrence), jit_compile=True)


def _signature(arguments):
    flat = tf.nest.flatten(arguments)
    return tuple(None if tensor is None else (tensor.dtype, tuple(tensor.shape)) for tensor in flat)
