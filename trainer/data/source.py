"""The source of batches: a dataset, its iterator, and the position in it."""

import atexit
import contextlib
import ctypes
import os
import re
import shutil
import tempfile
import threading
import warnings
import weakref
from typing import Any

import keras
import tensorflow as tf

from looptape.trainer import arguments
from looptape.trainer.data import pipeline
from looptape.trainer.data.adapters import as_dataset, converted, is_examples
from looptape.trainer.data.by_worker.indexed_data import IndexedData
from looptape.trainer.data.by_worker.sharded_data import ShardedData
from looptape.trainer.data.literal_path import literal
from looptape.trainer.data.resumability import has_clock, loose_ends, moving_parts, runs_python, unseeded_shuffles

_ALIVE: weakref.WeakSet = weakref.WeakSet()


@atexit.register
def _end_iterators():
    """Ends iterators with Python code before the interpreter exits; prefetching would otherwise deadlock."""
    for source in list(_ALIVE):
        source.close(exiting=True)


def end(iterator, dataset, exiting=False):
    """Ends the iterator of a dataset without waiting for TensorFlow's tuning thread.

    That thread sleeps for up to a minute. TensorFlow 2.21 wakes it just before it marks the iterator as cancelled, so
    the thread often goes back to sleep, and ending the iterator takes as long. So this happens in the background, and
    not at all if the process exits. An iterator with Python code ends at once, inside an operation: Python holds its
    lock while it drops an iterator, and one that prefetches with Python code then deadlocks.
    """
    if runs_python(dataset):
        _empty(iterator, dataset)
    elif exiting:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(iterator))  # never dropped
    else:
        threading.Thread(target=_empty, args=(iterator, dataset), name="end of an iterator", daemon=True).start()


def _empty(iterator, dataset):
    with tf.init_scope():  # garbage is collected at any moment, also while a function is traced
        empty = tf.data.experimental.to_variant(dataset.take(0))
        tf.raw_ops.MakeIterator(dataset=empty, iterator=iterator._iterator_resource)


_KEPT_ARRAYS, _KEPT_OTHERS = 2, 4  # sources that a trainer keeps: made from arrays; from datasets, functions, …


class Source:
    """A dataset with an iterator that is kept between calls of `fit`.

    Args:
        data: what the user passed; kept, so that its id stays its own.
        dataset: a `tf.data.Dataset` of batches made from it.
    """

    def __init__(self, data, dataset):
        self.data, self.dataset = data, dataset
        self.iterator = iter(self.dataset)
        cardinality = int(self.dataset.cardinality())
        self.length = cardinality if cardinality >= 0 else None
        self.infinite = cardinality == tf.data.INFINITE_CARDINALITY
        if self.length == 0:
            raise ValueError("The dataset is empty: it has no batch. Check the files or the filter it is made from.")
        self.position = 0  # batches used in this pass
        self.passes = 0  # that are over
        self.own_rows = False  # batches hold the rows of this worker only, and not those of all
        self.sharded = False  # by a pipeline of its own for each worker
        self.description: str | None = None  # where the pipeline does not show what the order depends on
        self.anchor = None  # (a position in this pass, TensorFlow's name of a checkpoint of the iterator there)
        self._checkpointable = self._obstacle = self._directory = None
        _ALIVE.add(self)
        self._examined = False

    def close(self, exiting=False):
        iterator, self.iterator = self.iterator, None
        if iterator is not None:
            end(iterator, self.dataset, exiting)

    def __del__(self):
        with contextlib.suppress(Exception):  # also where Python is ending, or `__init__` did not
            self.close()

    def for_trace(self):
        """(iterator, `own_rows`, whether the number of batches is known): what an update is traced by."""
        return self.iterator, self.own_rows, self.length is not None or self.infinite

    @property
    def in_python(self):
        """Whether Python code makes each batch: a generator, an environment, a `PyDataset`."""
        made = callable(self.data) or hasattr(self.data, "__next__") or isinstance(self.data, keras.utils.PyDataset)
        return made and not isinstance(self.data, tf.data.Dataset)

    def describe(self):
        """The pipeline's operations and their options, as `pipeline.describe`, to be compared with a checkpoint's."""
        return pipeline.describe(self.dataset)

    def remaining(self):
        """Batches left in this pass, or None if that is not known."""
        return None if self.length is None else max(self.length - self.position, 0)

    def advance(self, batches):
        self.position += batches

    def checkpointable(self, warn=True):
        """Whether the iterator's position can be saved; tried once, by serializing it.

        Warns once, before the first step, if it cannot, and if a resumed run gets other batches although it can.
        """
        if self._checkpointable is None:
            try:
                # Not a second iterator: it would draw from the seed generator that shuffles share.
                self._mark()
                self._checkpointable = True
            except (tf.errors.OpError, NotImplementedError, ValueError) as error:
                self._checkpointable = False
                reason = re.search(r"(\S+ is stateful|op \S+ .*?stateful)", str(error))
                self._obstacle = reason.group(0) if reason else str(error).splitlines()[0]
        if warn and self._obstacle is not None:
            warnings.warn(
                f"The position in this dataset cannot be saved ({self._obstacle}). A resumed run recreates the "
                "dataset and skips the batches that were used, which is exact only if the dataset yields the same "
                "batches each time: seed its shuffles, use `stateless` random operations.",
                stacklevel=2,
            )
            self._obstacle = None  # said once
        if warn and not self._examined:
            self._examined = True
            found = loose_ends(self.dataset)
            if found:
                warnings.warn(
                    f"A resumed run will not get the same batches as one that is not interrupted: {'; '.join(found)}. "
                    "Leave these options out where the bits matter.",
                    stacklevel=2,
                )
        return self._checkpointable

    def _mark(self):
        """Notes the present position, so that batches after it can be fetched once more."""
        if self._directory is None:
            self._directory = tempfile.mkdtemp()
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        prefix = os.path.join(self._directory, "iterator")
        self.anchor = self.position, tf.train.Checkpoint(iterator=self.iterator).write(prefix)

    def can_refetch(self):
        """Whether `refetch` can give the batches after the present position, once they are used."""
        return self.anchor is not None

    def refetch(self, count):
        """The last `count` batches before the position once more, or None where that is not possible."""
        if self.anchor is None or self.position - count < self.anchor[0]:
            return None
        position, prefix = self.anchor
        iterator = iter(self.dataset)
        with literal(prefix) as readable:
            tf.train.Checkpoint(iterator=iterator).read(readable).expect_partial()
        for _ in range(self.position - count - position):
            next(iterator, None)
        return [batch for _, batch in zip(range(count), iterator, strict=False)] or None

    def skip_to(self, position, passes=0):
        """Goes to a position of the pass after `passes` whole ones. Only for a source that is new.

        By the iterators that were used before: a shuffle draws the order of a pass when that begins. Python code may
        change its own state at each batch and at the end of a pass (`PyDataset.on_epoch_end`), so it runs through.
        """
        whole_passes = runs_python(self.dataset)
        for _ in range(passes):
            next(self.iterator, None)
            for _ in self.iterator if whole_passes else ():
                pass
            self.iterator = iter(self.dataset)
        for _ in range(position):
            next(self.iterator, None)

    def restart(self):
        """Begins the next pass over the data."""
        self.iterator = iter(self.dataset)
        self.position = 0
        self.passes += 1
        if self.anchor is not None:
            self._mark()


class IndexedSource(Source):
    """The position in an `IndexedData`, of which each worker reads its own rows.

    Args:
        data: the `IndexedData`.
        repeat: never end.
        workers: who reads it together.
    """

    def __init__(self, data, repeat, workers):
        self._repeat, self._rank, self._workers = repeat, workers.rank, workers.count
        super().__init__(data, data.dataset(repeat=repeat, rank=workers.rank, workers=workers.count))
        self.own_rows = workers.count > 1
        self.description = repr(data)

    def sample(self):
        """The checksum of one example, of another one each time. Each worker draws the same ones, from all of them."""
        return self.data.samples.draw()

    def _from(self, start):
        made = self.data.dataset(start, repeat=self._repeat, rank=self._rank, workers=self._workers)
        return iter(made)

    @property
    def _start(self):
        return self.passes * self.data.batches_per_pass + self.position

    def checkpointable(self, warn=True):
        """No iterator has to be saved: the position, an integer, is enough.

        Warns once, before the first step, if the function makes other examples after a resume.
        """
        found = moving_parts(self.dataset) if warn and not self._examined else ()
        self._examined = self._examined or warn
        if found:
            warnings.warn(
                "The function of the `IndexedData` has operations with a state of their own "
                f"({', '.join(sorted(found))}), which no checkpoint holds: a resumed run, and one with another number "
                "of workers, will not get the same examples. Make random numbers of the index, e.g. "
                "tf.random.stateless_normal(shape, seed=[1, index]).",
                stacklevel=2,
            )
        return False

    def describe(self):
        """No operations: they depend on the number of workers, and the `description` tells what the order does."""
        return [["IndexedData", {}]]

    def identity(self):
        """Values that must be equal on all workers: the arguments, and one example of the next batch."""
        number = int(self.data.indices(self._start)[0])
        [example] = tf.data.Dataset.from_tensors(tf.constant(number, tf.int64)).map(self.data.example)
        return self.description, example

    def can_refetch(self):
        return True

    def refetch(self, count):
        if self._start < count:
            return None
        return [batch for _, batch in zip(range(count), self._from(self._start - count), strict=False)]

    def skip_to(self, position, passes=0):
        self.iterator = self._from(passes * self.data.batches_per_pass + position)

    def restart(self):
        self.position = 0
        self.passes += 1
        self.iterator = self._from(self._start)


class ShardedSource(Source):
    """The position in a `ShardedData`: each worker counts the batches of its own pipeline.

    Args:
        data: the `ShardedData`.
        workers: who reads it together.
    """

    def __init__(self, data, workers):
        super().__init__(data, data.dataset(workers))
        self.own_rows = self.sharded = workers.count > 1
        self.description = f"ShardedData of {workers.count} workers"

    def checkpointable(self, warn=True):
        """One checkpoint cannot hold the iterators of all workers; the position, equal on all of them, is enough.

        Warns once, before the first step, if the batches after a resume are others.
        """
        found = []
        if warn and not self._examined:
            self._examined = True
            found = loose_ends(self.dataset) + [f"{kind} has a state" for kind in sorted(moving_parts(self.dataset))]
            found += ["a shuffle has no seed"] if unseeded_shuffles(self.dataset) else []
        if found:
            warnings.warn(
                "A resumed run recreates the pipelines of the `ShardedData` and will not get the same batches: "
                f"{'; '.join(found)}. Seed every shuffle, use `stateless` random operations, and keep the order.",
                stacklevel=2,
            )
        return False

    def identity(self):
        """Values that must be equal on all workers: how many there are. The batches differ."""
        return self.description, ()

    def sample(self):
        """Nothing to be compared."""
        return 0


def open_source(sources, data, batch_size, repeat, workers, change=lambda dataset: dataset):
    """The `Source` of some data among those that a trainer keeps, or a new one.

    A dataset, a `PyDataset` or a function is known by the object itself; arrays are known by the arrays, in whatever
    tuple they come, by what they hold, and by their batch size. Data take memory: only the latest few are kept.

    Args:
        sources: {key: Source}, changed in place.
        data: what was passed to `fit`.
        batch_size: how many examples make a batch, if the data are arrays.
        repeat: whether data that do not say themselves begin again at their end.
        workers: the `Workers`, of whom each reads its own rows of an `IndexedData`.
        change: what is made of the dataset before it is iterated over.
    """
    key: Any = id(data)
    batch_size = arguments.check_integer("batch_size", batch_size, 1, "It is the number of examples in a batch.")
    if is_examples(data):
        leaves = tf.nest.flatten(data)
        # Arrays may have been written to since the last time.
        contents = tuple(pipeline.checksum_of_all(converted(leaf)) for leaf in leaves)
        key = tuple(map(id, leaves)), contents, str(tf.nest.map_structure(lambda _: 0, data)), batch_size, repeat
    elif not isinstance(data, tf.data.Dataset):
        key = id(data), repeat
    source = sources.pop(key, None)
    if source is None:
        if isinstance(data, IndexedData):
            source = IndexedSource(data, repeat, workers)
            if change(source.dataset) is not source.dataset:
                raise ValueError(
                    "`bptt_updates` is set and the data are an `IndexedData`, whose position counts whole batches. "
                    "Give a `tf.data.Dataset`, or leave `bptt_updates` out."
                )
        elif isinstance(data, ShardedData):
            if not repeat:
                raise ValueError(
                    "`epochs` is given with a `ShardedData`, whose workers may have passes of different lengths. Give "
                    "`steps`."
                )
            source = ShardedSource(data, workers)
        else:
            source = Source(data, change(as_dataset(data, batch_size, training=True, repeat=repeat)))
    sources[key] = source  # the latest is the last
    for arrays, limit in ((True, _KEPT_ARRAYS), (False, _KEPT_OTHERS)):
        alike = [other for other, kept in sources.items() if is_examples(kept.data) == arrays]
        for other in alike[:-limit]:
            del sources[other]
    return source


def timed(fetch):
    """(what `fetch` returns, seconds it took as a float32 scalar). Traced or eager.

    With `tf.config.experimental.enable_op_determinism` the seconds are 0.
    """
    if not has_clock():
        return fetch(), tf.zeros([])
    start = tf.timestamp()
    with tf.control_dependencies([start]):
        batch = fetch()
    # A variant (an optional) cannot be waited for by its value, but by its operation.
    leaves = (
        [x for x in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(x)]
        if not hasattr(batch, "has_value")
        else []
    )
    with tf.control_dependencies(leaves or [batch.has_value()]):
        return batch, tf.cast(tf.timestamp() - start, tf.float32)


def check_totals(steps, epochs):
    """Exactly one of the two, as lifetime totals."""
    if (steps is None) == (epochs is None):
        received = "both are given" if steps is not None else "neither is given"
        raise ValueError(
            f"`fit` takes exactly one of `steps` and `epochs`; {received}. Both count over the trainer's lifetime: "
            "steps=1000 trains until 1,000 updates were made in all."
        )
    if steps is not None:
        return arguments.check_integer("steps", steps, 1, "It is the lifetime total of updates."), None
    return None, arguments.check_integer("epochs", epochs, 1, "It is the lifetime total of passes over the data.")


def check_passes(epochs, source):
    """Refuses passes over data without an end."""
    if epochs is not None and source.infinite:
        raise ValueError(
            f"`fit` was asked for {epochs} passes over an infinite dataset, and the first would never end. Train by "
            "`steps`, or leave out `repeat()`."
        )
