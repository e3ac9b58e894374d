"""Data by index: plain arithmetic gives the order and the position, and each worker reads its own rows."""

import tensorflow as tf

from looptape.trainer import arguments
from looptape.trainer.data import record_files

_SEEDS = 2**31


class IndexedData:
    """Data by index: a function makes an example from its number. Shuffled in each pass, and batched.

    Pass it to `Trainer.fit` or `Trainer.evaluate` in place of a dataset. The order of a pass is a stateless
    permutation, so the position is one integer: a checkpoint holds no shuffle buffer, and a run resumes at once. With
    several workers, each makes only its own rows of a batch; the global batches are the same for any number of
    workers.

    Args:
        number: number of examples.
        function: index → example, as in `tf.data.Dataset.map`: traced, called with an int64 scalar, in parallel.
            Examples have equal shapes; pad or cut sequences here.
        batch_size: rows of a global batch.
        shuffle: permute the examples, differently in each pass. Pass False for evaluation.
        seed: seed of the permutations, from 0 to 2³¹ − 1.
        drop_remainder: leave out the last, smaller batch of a pass. Its examples differ from pass to pass.
        num_parallel_calls: parallel calls of `function`; by default `tf.data` chooses.

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

    @classmethod
    def from_records(cls, files, function, **options):
        """Reads TFRecord files; `function` parses each record: serialized record (a string scalar) → example.

        Scans the files once to find where each record begins, which reads a few bytes per record. The files must not
        be compressed.

        Args:
            files: a path or a list of paths, the same on all workers. Records are numbered in this order.
            function: such as `lambda record: tf.io.parse_single_example(record, features)`.
            options: as for `IndexedData`.
        """
        if not callable(function):
            raise TypeError(
                f"`function` is {function!r}; it must be a function that parses a serialized record. "
                "Use e.g. lambda record: tf.io.parse_single_example(record, features)."
            )
        records = record_files.Records(files)
        return cls(len(records), lambda index: function(records.read(index)), **options)

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

        def example(place):
            batch = place // stride
            is_last = tf.equal(batch % self.batches_per_pass, self.batches_per_pass - 1)
            row = begin + tf.cast(is_last, tf.int64) * (last_begin - begin) + place % stride
            place = tf.minimum(batch % self.batches_per_pass * self.batch_size + row, self.number - 1)
            return self.function(self._order(place, batch // self.batches_per_pass))

        if repeat:
            places = tf.data.Dataset.counter(start * stride)
        else:
            end = (start // self.batches_per_pass + 1) * self.batches_per_pass
            places = tf.data.Dataset.range(start * stride, end * stride)
        examples = places.map(example, num_parallel_calls=self._num_parallel_calls, deterministic=True)
        made = examples.batch(stride, drop_remainder=True)
        # By what holds on every worker, so that all of them have batches of the same static shape.
        if self.batch_size % workers or (self.number % self.batch_size and not self.drop_remainder):
            made = made.enumerate(start).map(lambda batch, rows: self._cut(batch, rows, count, last_count))
        return made.prefetch(tf.data.AUTOTUNE)

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
