"""Where batches come from: a dataset, its iterator, and the position in it."""

import os
import re
import shutil
import tempfile
import warnings
import weakref

import tensorflow as tf

from trainer import arguments, workers


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
        self.anchor = None  # (a position in this pass, TensorFlow's name of a checkpoint of the iterator there)
        self._checkpointable = self._obstacle = self._directory = None

    def remaining(self):
        """Batches left in this pass, or None if that is not known."""
        return None if self.length is None else max(self.length - self.position, 0)

    def advance(self, batches):
        self.position += batches

    def checkpointable(self, warn=True):
        """Whether the iterator's position can be saved; tried once, by serializing it."""
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
                f"The position in this dataset cannot be saved ({self._obstacle}). A resumed run makes the dataset "
                "anew and skips what was used, which is exact only if the dataset gives the same batches each time: "
                "seed its shuffles, use `stateless` random operations.",
                stacklevel=2,
            )
            self._obstacle = None  # said once
        return self._checkpointable

    def _mark(self):
        """Notes the present position, so that batches after it can be fetched once more."""
        if self._directory is None:
            self._directory = tempfile.mkdtemp()
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        prefix = os.path.join(self._directory, "iterator")
        self.anchor = self.position, tf.train.Checkpoint(iterator=self.iterator).write(prefix)

    def refetch(self, count):
        """The last `count` batches before the position once more, or None where that is not possible."""
        if self.anchor is None or self.position - count < self.anchor[0]:
            return None
        position, prefix = self.anchor
        iterator = iter(self.dataset)
        tf.train.Checkpoint(iterator=iterator).read(prefix).expect_partial()
        for _ in range(self.position - count - position):
            next(iterator, None)
        return [batch for _, batch in zip(range(count), iterator, strict=False)] or None

    def peek(self):
        """The contents of the next batch as bytes, to be compared between workers; nothing if it cannot be put back."""
        if not self.checkpointable(warn=False):
            return b""
        self._mark()
        batch = next(self.iterator, None)
        tf.train.Checkpoint(iterator=self.iterator).read(self.anchor[1])
        return workers.bytes_of(batch)

    def skip_to(self, position, passes=0):
        """Goes to a position of the pass after `passes` whole ones. Only for a source that is new.

        By the iterators that were used before: a shuffle draws the order of a pass when that begins.
        """
        for _ in range(passes):
            next(self.iterator, None)
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


def has_clock():
    """Whether operations may ask for the time: deterministic ones may not, and only trying tells."""
    with tf.init_scope():
        try:
            tf.timestamp()
        except tf.errors.FailedPreconditionError:
            return False
    return True


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
    leaves = [x for x in tf.nest.flatten(batch) if tf.is_tensor(x)] if not hasattr(batch, "has_value") else []
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
