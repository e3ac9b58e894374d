"""Pipelines that each worker shards for itself."""

import tensorflow as tf


class ShardedData:
    """Batches that each worker makes for itself, by a pipeline that shards its files or examples. For `Trainer.fit`.

    The global batch of an update is the union of the workers' batches; their sizes may differ. A pipeline that ends is
    repeated. A resumed run recreates the pipelines and skips the batches that were used, so they must yield the same
    batches each time; it needs as many workers as before. Prefer `IndexedData` if examples have indices.

    Args:
        function: (rank, workers) → `tf.data.Dataset` of this worker's batches; a single process gets (0, 1).
    """

    def __init__(self, function):
        if not callable(function):
            raise TypeError(
                f"`function` is {function!r}; it must be a function (rank, workers) → tf.data.Dataset of batches. "
                "Use e.g. looptape.ShardedData(lambda rank, workers: data.shard(workers, rank).batch(8))."
            )
        self.function = function

    def dataset(self, workers):
        """The endless dataset of one of the `Workers`."""
        made = self.function(workers.rank, workers.count)
        if not isinstance(made, tf.data.Dataset):
            raise TypeError(
                f"The function of a `ShardedData` returned {type(made).__name__} for worker {workers.rank} of "
                f"{workers.count}; it must return a tf.data.Dataset of batches."
            )
        return made if made.cardinality() == tf.data.INFINITE_CARDINALITY else made.repeat()
