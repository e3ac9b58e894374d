"""One update on a batch that is at hand, for loops of one's own: environments and other data made in Python."""

import collections

import tensorflow as tf

from looptape.trainer.data import batches
from looptape.trainer.data.adapters import converted, is_arrays
from looptape.trainer.health.spikes import SpikedUpdate
from looptape.trainer.step.nonfinite import NonFiniteUpdates
from looptape.trainer.summaries import scalars


class BatchFeed:
    """Gives the traced update batches one by one, through one iterator that serves all of them.

    Args:
        spec: the specification of the batches.
    """

    def __init__(self, spec):
        self.spec = spec
        self.waiting = collections.deque()
        self.open()

    def open(self):
        """Begins anew: an iterator that has found nothing waiting is at its end for good."""
        self.waiting.clear()
        dataset = tf.data.Dataset.from_generator(self._batches, output_signature=self.spec)
        options = tf.data.Options()
        options.autotune.enabled = False  # nothing is fetched before it is asked for
        self.iterator = iter(dataset.with_options(options))

    def _batches(self):
        while self.waiting:
            yield self.waiting.popleft()


def train_on_batch(trainer, batch):
    """See `Trainer.train_on_batch`. `trainer` is its engine."""
    _check(trainer)
    batch = trainer.take_batch(_checked(batch))
    spec = tf.nest.map_structure(_any_number, batch)
    feed = trainer.batch_feed
    if feed is None or feed.spec != spec:
        feed = trainer.batch_feed = BatchFeed(spec)
        trainer.prepare(feed.iterator)
    elif trainer.outdated:
        trainer.prepare(feed.iterator)
    rows = int(batches.count_examples(batch))
    count = min(trainer.accumulation_steps, rows)
    parts = [batches.slice_for_replica(batch, index, count) for index in range(count)] if count > 1 else [batch]
    for metric in trainer.metrics.values():
        metric.reset_state()
    trainer.ledger.take()
    feed.waiting.extend(parts)
    try:
        trainer.calls.run(feed.iterator, 1)
    except SpikedUpdate as spike:
        raise NonFiniteUpdates(f"The update of step {spike.step} is a spike, which only `fit` can handle.") from None
    finally:
        if feed.waiting or count < trainer.accumulation_steps:
            feed.open()
    return scalars.callback_logs(trainer, trainer.ledger.take())


def _checked(batch):
    """The batch, a list as a tuple, if it is arrays with equally many rows."""
    batch = tuple(batch) if isinstance(batch, list) else batch
    batch = tf.nest.map_structure(converted, batch)
    if not is_arrays(batch) or any(isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) for leaf in _leaves(batch)):
        raise TypeError(
            f"The batch is a {type(batch).__name__} that does not hold only dense arrays and tensors; it must be "
            "one batch, such as (inputs, targets). Use np.asarray on lists; pass datasets to `fit`."
        )
    rows = sorted({int(leaf.shape[0]) for leaf in _leaves(batch) if len(leaf.shape)})
    if len(rows) > 1 or rows == [0]:
        raise ValueError(
            f"The parts of the batch have {' and '.join(map(str, rows))} examples; all must have the same number, at "
            "least 1. Check which of them was cut or joined."
        )
    return batch


def _leaves(batch):
    return tf.nest.flatten(batch, expand_composites=False)


def _any_number(leaf):
    """The specification of a tensor with any number of examples."""
    shape = leaf.shape if leaf.shape.rank in (None, 0) else [None, *leaf.shape[1:]]
    return tf.TensorSpec(shape, leaf.dtype)


def _check(trainer):
    """Refuses settings that need the data before or after the batch, which only `fit` has."""
    needing = {"bptt_updates": trainer.bptt_updates, "on_spike": trainer.on_spike != "ignore"}
    needing['accumulation_steps="auto"'] = trainer.division.auto
    found = [name for name, used in needing.items() if used]
    if found:
        raise ValueError(
            f"`train_on_batch` makes one update on one batch; {', '.join(found)} may need the batches around it. Use "
            "`fit` with a function that gives an iterator, or a trainer without this setting."
        )
    if trainer.workers.count > 1:
        raise ValueError(
            f"`train_on_batch` was called with {trainer.workers.count} workers; they need batches that they agree on. "
            "Use `fit` with a dataset."
        )
