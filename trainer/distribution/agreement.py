"""Makes several workers agree during `fit`: on settings, on data, and on what depends on a clock or a signal."""

import warnings

from looptape.trainer.distribution import workers

_SETTINGS = (
    "accumulation_steps",
    "clip_norm",
    "ema_decay",
    "probe_every",
    "health_every",
    "communication",
    "communication_dtype",
)


class Agreement:
    """Compares the workers and decides for all of them. A process that trains alone agrees with itself.

    Args:
        trainer: the trainer.
        source: the data.
    """

    def __init__(self, trainer, source):
        self._trainer, self._source, self._workers = trainer, source, trainer.workers
        self._compared = False  # whether a batch of this `fit` was
        # What was decided for the next call; None in a process that trains alone.
        self.updates: int | None = None
        self.time_to_save: bool | None = None

    def check_settings(self, asked, intervals):
        """Refuses workers that were started with different settings. A collective call."""
        self._workers.check_same(
            **{name: getattr(self._trainer, name) for name in _SETTINGS},
            shape_of_the_batches=self._source.dataset.element_spec,
            number_of_batches=self._source.length,
            steps_or_epochs=asked,
            intervals=intervals,
        )

    def check_own_rows(self):
        """Refuses workers whose `IndexedData` differ, before the first update. A collective call."""
        if self._source.own_rows:
            arguments, example = self._source.identity()
            self._workers.check_same(data=arguments)
            self._workers.check_same(data=workers.bytes_of(example))

    def check_first_batch(self):
        """Refuses workers that trained on different batches, after the first call of a `fit`. A collective call.

        Later batches are compared by `decide`, without a collective operation of their own. Pipelines that shard
        themselves should give different batches: equal ones cause a warning.
        """
        if self._compared or self._workers.count == 1:
            return
        self._compared = True
        if not self._source.own_rows:
            self._workers.check_same(data=self._trainer.calls.checksum)
        elif self._source.sharded:
            checksums = self._workers.share([self._trainer.calls.checksum])
            if (checksums == checksums[0]).all():
                warnings.warn(
                    f"All {self._workers.count} workers got the same first batch from their `ShardedData`, so each "
                    "example counts several times. Let its function give each worker a part of the data, e.g. "
                    "files.shard(workers, rank) before the examples are made.",
                    stacklevel=2,
                )

    def decide(self, watch, stopped, updates, time_to_save):
        """Lets the workers decide together on the next call. A collective call.

        Args:
            watch: the signals; gets those of all workers.
            stopped: whether a callback stops the training of this worker; one is enough.
            updates: how many this worker would run; the chief's number holds.
            time_to_save: whether a checkpoint is due by this worker's clock; the chief's holds.
        """
        trainer = self._trainer
        self._workers.beat(trainer.counters.step)
        checksum = self._source.sample() if self._source.own_rows else trainer.calls.checksum
        shared = self._workers.share([watch.number, stopped, updates, time_to_save, checksum])
        if (shared[:, 4] != shared[0, 4]).any():
            self._workers.check_same(data=checksum)
        watch.note(shared[:, 0].max())
        trainer.model.stop_training = bool(shared[:, 1].any())
        self.updates, self.time_to_save = int(shared[0, 2]), bool(shared[0, 3])
