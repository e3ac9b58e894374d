"""Data by index: plain arithmetic gives the order and the position, and each worker reads its own rows."""

import copy
import functools
import re

import tensorflow as tf

from looptape.trainer import arguments
from looptape.trainer.data import batches
from looptape.trainer.data.by_worker import record_files

_SEEDS = 2**31
# What NumPy's arrays, lists, frames and files say to a tensor of a trace.
_TAKES_NO_TENSOR = re.compile(
    r"symbolic|SymbolicTensor|indices must be|valid indices|Selection can't|int64 scalar|unhashable"
)


class IndexedData:
    """Data by index: a function makes an example from its number. Shuffled in each pass, and batched.

    Pass it to `Trainer.fit` or `Trainer.evaluate` in place of a dataset. The order of a pass is a stateless
    permutation, so the position is one integer: a checkpoint holds no shuffle buffer, and a run resumes at once. With
    several workers, each makes only its own rows of a batch; the global batches are the same for any number of
    workers.

    Args:
        number: number of examples.
        function: index → example, as in `tf.data.Dataset.map`: traced, called with an int64 scalar, in parallel.
            Examples have equal shapes; pad or cut sequences here. With `batched`: [rows] indices → [rows] examples.
        batch_size: rows of a global batch.
        shuffle: permute the examples, differently in each pass. Pass False for evaluation.
        seed: seed of the permutations, from 0 to 2³¹ − 1.
        drop_remainder: leave out the last, smaller batch of a pass. Its examples differ from pass to pass.
        num_parallel_calls: parallel calls of `function`; by default `tf.data` chooses.
        batched: `function` makes all rows of a batch at once, from an int64 vector of indices, such as
            `lambda indices: (tf.gather(x, indices), tf.gather(y, indices))`. The batches are the same. Use it for cheap
            examples: a call costs some 30 µs, whether it makes one example or a hundred.

    Example:

    >>> squares = IndexedData(10, lambda index: index * index, batch_size=4, shuffle=False)
    >>> [batch.tolist() for batch in squares.dataset().as_numpy_iterator()]
    [[0, 1, 4, 9], [16, 25, 36, 49], [64, 81]]
    >>> [batch.tolist() for batch in squares.dataset(rank=1, workers=2).as_numpy_iterator()]
    [[4, 9], [36, 49], [81]]
    """

    def __init__(
        self,
        number,
        function,
        *,
        batch_size=32,
        shuffle=True,
        seed=0,
        drop_remainder=False,
        num_parallel_calls=tf.data.AUTOTUNE,
        batched=False,
    ):
        if not callable(function):
            raise TypeError(
                f"`function` is {function!r}; it must be a function that makes an example from its index. "
                "Use e.g. looptape.IndexedData(len(x), lambda index: (x[index], y[index])) with tensors x and y."
            )
        self.number = arguments.check_integer("number", number, 1, "It is the number of examples.")
        self.function = function
        self.batch_size = arguments.check_integer("batch_size", batch_size, 1, "It is that of a global batch.")
        self.shuffle, self.drop_remainder = bool(shuffle), bool(drop_remainder)
        self.seed = arguments.check_integer("seed", seed, 0, "Use another one for another order.")
        if self.seed >= _SEEDS:
            raise ValueError(f"`seed` is {seed}; it must be less than 2**31. Use e.g. seed={seed % _SEEDS}.")
        if self.drop_remainder and self.number < self.batch_size:
            raise ValueError(
                f"There are {self.number} examples and `batch_size` is {self.batch_size}; with `drop_remainder` no "
                "batch is left. Make the batches smaller, or leave `drop_remainder` out."
            )
        self._num_parallel_calls = num_parallel_calls
        self.batched = bool(batched)

    @classmethod
    def from_records(cls, files, function, **options):
        """Reads TFRecord files; `function` parses each record: serialized record (a string scalar) → example.

        Scans the files once to find where each record begins, which reads a few bytes per record. The files must not
        be compressed.

        Args:
            files: a path or a list of paths, the same on all workers. Records are numbered in this order.
            function: such as `lambda record: tf.io.parse_single_example(record, features)`; with `batched=True`, of
                a vector of records, such as `lambda records: tf.io.parse_example(records, features)`.
            options: as for `IndexedData`.
        """
        if not callable(function):
            raise TypeError(
                f"`function` is {function!r}; it must be a function that parses a serialized record. "
                "Use e.g. lambda record: tf.io.parse_single_example(record, features)."
            )
        records = record_files.Records(files)
        read = records.read_all if options.get("batched") else records.read
        return cls(len(records), lambda index: function(read(index)), **options)

    @property
    def batches_per_pass(self):
        """Number of batches in a pass over the examples."""
        whole, rest = divmod(self.number, self.batch_size)
        return whole + bool(rest and not self.drop_remainder)

    def indices(self, batch):
        """The numbers of the examples in a global batch, as an array. Eager.

        Args:
            batch: number of the batch, counted from 0 over all passes.
        """
        first, size = self._rows_of(batch)
        return self._order(first + tf.range(size, dtype=tf.int64), batch // self.batches_per_pass).numpy()

    @functools.cached_property
    def samples(self):
        """The `Samples` by which workers compare these data."""
        return Samples(self)

    def _rows_of(self, batch):
        """(where a batch begins in the order of its pass, its number of rows)."""
        first = batch % self.batches_per_pass * self.batch_size
        return first, min(self.batch_size, self.number - first)

    def _order(self, places, passes):
        """The examples at places of a pass's order. Eager or traced; int64 tensors of any one shape."""
        if not self.shuffle:
            return places
        seed = tf.stack([tf.constant(self.seed, tf.int64), tf.cast(passes, tf.int64)])
        return tf.random.experimental.index_shuffle(places, seed, tf.constant(self.number - 1, tf.int64))

    def dataset(self, start=0, *, repeat=False, rank=0, workers=1):
        """A `tf.data.Dataset` of one worker's rows of each batch.

        All workers have the same number of elements; if a batch has fewer rows than there are workers, the last workers
        get elements without rows.

        Args:
            start: the first batch, counted over all passes.
            repeat: never end; otherwise end after the pass that contains `start`.
            rank: index of the worker.
            workers: number of workers that share each batch.
        """
        begin, count = self._share(self.batch_size, rank, workers)
        last_begin, last_count = self._share(self._rows_of(self.batches_per_pass - 1)[1], rank, workers)
        # Each batch takes equally many places in the stream of examples, which goes through the function in parallel;
        # the surplus ones of a smaller last batch repeat an example and are cut off.
        stride = max(count if self.batches_per_pass > 1 else 0, last_count, 1)

        def made_at(batch, rows):
            is_last = tf.equal(batch % self.batches_per_pass, self.batches_per_pass - 1)
            rows = begin + tf.cast(is_last, tf.int64) * (last_begin - begin) + rows
            places = tf.minimum(batch % self.batches_per_pass * self.batch_size + rows, self.number - 1)
            return self._call(self._order(places, batch // self.batches_per_pass))

        # What one call makes: an example, or all of them that a batch has places for.
        each = 1 if self.batched else stride
        end = (start // self.batches_per_pass + 1) * self.batches_per_pass
        calls = tf.data.Dataset.counter(start * each) if repeat else tf.data.Dataset.range(start * each, end * each)
        if self.batched:
            function = lambda batch: made_at(batch, tf.range(stride, dtype=tf.int64))  # noqa: E731
        else:
            function = lambda place: made_at(place // stride, place % stride)  # noqa: E731
        made = calls.map(function, num_parallel_calls=self._num_parallel_calls, deterministic=True)
        made = made if self.batched else made.batch(stride, drop_remainder=True)
        # By what holds on every worker, so that all of them have batches of the same static shape.
        if self.batch_size % workers or (self.number % self.batch_size and not self.drop_remainder):
            made = made.enumerate(start).map(lambda batch, rows: self._cut(batch, rows, count, last_count))
        return made.prefetch(tf.data.AUTOTUNE)

    def example(self, number):
        """The example of a number, an int64 scalar; with `batched`, a batch of one. Traced."""
        return self._call(number[tf.newaxis] if self.batched else number)

    def in_order(self):
        """The same examples in the order of their numbers."""
        ordered = copy.copy(self)
        ordered.shuffle = False
        return ordered

    def _call(self, index):
        """What the function makes of an index or a vector of them. Traced."""
        try:
            made = self.function(index)
        except (NotImplementedError, TypeError, IndexError) as error:
            if not _TAKES_NO_TENSOR.search(str(error)):
                raise
            raise TypeError(
                "The function of an `IndexedData` indexes with a tensor what takes none, such as a NumPy array or a "
                f"list ({str(error).strip().splitlines()[-1][:200]}). It must be made of TensorFlow's operations: make "
                "tensors of the arrays first, x = tf.constant(x), or put the Python code into `tf.numpy_function`."
            ) from error
        for leaf in tf.nest.flatten(made) if self.batched else ():
            rows = leaf.shape[0] if leaf.shape.rank else leaf.shape.rank
            if leaf.shape.rank is not None and rows not in (None, index.shape[0]):
                raise ValueError(
                    f"The function of an `IndexedData` with `batched=True` got {index.shape[0]} indices and returned "
                    f"a tensor of the shape {leaf.shape}; it must have a row for each index. Use e.g. tf.gather(x, "
                    "indices), or leave `batched` out if the function takes one index."
                )
        return made

    @staticmethod
    def _share(size, rank, workers):
        """(first row, number of rows) of a worker in a batch, as `batches.slice_for_replica` divides it."""
        begin, end = (-(-size * each // workers) for each in (rank, rank + 1))
        return begin, end - begin

    def _cut(self, batch, rows, count, last_count):
        is_last = tf.equal(batch % self.batches_per_pass, self.batches_per_pass - 1)
        kept = tf.where(is_last, last_count, count)
        return tf.nest.map_structure(lambda leaf: leaf[:kept], rows)

    def __repr__(self):
        return (
            f"IndexedData({self.number}, batch_size={self.batch_size}, shuffle={self.shuffle}, seed={self.seed}, "
            f"drop_remainder={self.drop_remainder})"
        )


class Samples:
    """Examples of an `IndexedData` drawn at random, the same ones on each worker, to be compared between them.

    Args:
        data: the `IndexedData`.
    """

    def __init__(self, data):
        self._number = data.number
        self._drawn = 0
        # Not a dataset: one with Python code may deadlock when it is dropped.
        self._checksum = tf.function(lambda number: batches.checksum(data.example(number)))

    def draw(self, count=1):
        """The checksum of as many examples, of other ones each time until each was drawn. Eager."""
        total = 0
        for _ in range(count):
            place = tf.constant(self._drawn % self._number, tf.int64)
            last = tf.constant(self._number - 1, tf.int64)
            number = tf.random.experimental.index_shuffle(place, [0, 1], last)
            total = (total * 1_000_003 + int(self._checksum(number))) % 2**63
            self._drawn += 1
        return total
