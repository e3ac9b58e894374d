"""Several processes that train one model: who is the chief, and what all of them must agree on.

`tf.distribute.MultiWorkerMirroredStrategy` runs the same program in each process. Its collective operations meet in the
order in which each process calls them, so every decision of the host that leads to a call (how many updates, a stop, a
checkpoint) has to be the same everywhere. What depends on a clock or a signal is therefore decided together, by one
small collective operation per call of the traced function.
"""

import hashlib
import os
import re

import numpy as np
import tensorflow as tf

from looptape.trainer.distribution import meetings


class WorkerLost(RuntimeError):
    """Another worker died or froze. This process cannot continue; restart all workers."""


# The heartbeat among the workers of this process, if there is one: `hears_all(seconds)` says whether it hears them.
heartbeats: list = []
_HEARD_SECONDS = 10.0  # that the first heartbeats may take

_SAME_DATA = (
    "All must be started by the same command with the same files, and make the same batches (seed every shuffle): "
    "correct that and start all again."
)
# What TensorFlow raises when a collective operation has lost a peer.
LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.FailedPreconditionError,
)
# What an `Exchange` raises, inside the error of another type that TensorFlow makes of it.
_BETWEEN = re.compile(r"UnavailableError: (between worker \d+ and \d+ or \d+: [^\n]*)")


def is_loss(error):
    """Whether an error says that another worker is lost."""
    return isinstance(error, LOST) or (isinstance(error, tf.errors.UnknownError) and bool(_BETWEEN.search(str(error))))


def of(strategy):
    """The `Workers` of a strategy; a single one unless it is a `MultiWorkerMirroredStrategy` over several."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return Workers(strategy)
    return Alone()


class Alone:
    """One process: it is the chief, and agrees with itself."""

    count, rank, is_chief = 1, 0, True
    name = "the only worker"

    def share(self, numbers):
        """[[number of each worker] of each worker], from this one's. A collective call."""
        return np.array([numbers], np.int64)

    def share_texts(self, text):
        """The text of each worker, from this one's. A collective call."""
        return [text]

    def chiefs(self, *numbers):
        """The chief's whole numbers, on every worker. A collective call."""
        return numbers if len(numbers) > 1 else numbers[0]

    def largest(self, number):
        """The largest of all workers' whole numbers. A collective call."""
        return number

    def check_same(self, **things):
        """Raises an error on every worker if one of the things differs between them. A collective call."""

    def meet(self):
        """Waits for all workers. A collective call."""

    def all_have(self, available):
        """Whether this worker has a next batch, and so all have. Raises an error on all if only some have.

        A collective call.
        """
        return available

    def heard(self):
        """Whether a heartbeat ends this process when another worker hangs."""
        return all(each.hears_all(_HEARD_SECONDS) for each in heartbeats) if heartbeats else False

    def beat(self, step):
        """Leaves a sign of life for whoever started this worker, with the number of updates made."""


class Workers(Alone):
    """The processes of a `MultiWorkerMirroredStrategy`. Their collective calls must come in the same order on each.

    Args:
        strategy: the strategy.
    """

    def __init__(self, strategy):
        self._strategy = strategy
        resolver = strategy.cluster_resolver
        cluster = resolver.cluster_spec().as_dict()
        # The chief, if it is named so, comes before the workers, as TensorFlow counts them.
        tasks = [(kind, i) for kind in ("chief", "worker") for i in range(len(cluster.get(kind, ())))]
        self.count = max(len(tasks), 1)
        own = resolver.task_type, resolver.task_id
        self.rank = tasks.index(own) if own in tasks else 0
        self.is_chief = self.rank == 0
        addresses = [cluster[kind][index] for kind, index in tasks]
        self.hosts = [each.rpartition(":")[0].strip("[]") for each in addresses]
        address = cluster[own[0]][own[1]] if own in tasks else "this process"
        self.name = f"worker {self.rank} of {self.count} ({address})"
        self._per_worker = strategy.num_replicas_in_sync // self.count
        devices = strategy.extended.worker_devices
        self.on_one_cpu_each = len(devices) == 1 and "CPU" in devices[0]
        self._sign_of_life = os.environ.get("LOOPTAPE_HEARTBEAT")
        self.beat("")
        self._gather = tf.function(self.gathered, autograph=False, reduce_retracing=True)

    def gathered(self, numbers):
        """[workers, n] from the [n] int64 of this one. Traced. A collective call."""

        def replica(numbers):
            context = tf.distribute.get_replica_context()
            first = tf.equal(context.replica_id_in_sync_group % self._per_worker, 0)
            row = tf.one_hot(self.rank, self.count, dtype=tf.int64)[:, tf.newaxis] * numbers
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(first, row, tf.zeros_like(row)))

        return self._strategy.experimental_local_results(self._strategy.run(replica, args=(numbers,)))[0]

    def share(self, numbers):
        if self.count == 1:
            return super().share(numbers)
        with meetings.own.one_more():
            return self._gather(tf.constant(np.asarray(numbers, np.int64))).numpy()

    def share_texts(self, text):
        content = text.encode()
        lengths = self.share([len(content)])[:, 0]
        padded = np.zeros(lengths.max(), np.int64)
        padded[: len(content)] = np.frombuffer(content, np.uint8)
        rows = self.share(padded)
        return [row[:size].astype(np.uint8).tobytes().decode() for row, size in zip(rows, lengths, strict=True)]

    def chiefs(self, *numbers):
        found = [int(number) for number in self.share(numbers)[0]]
        return found if len(found) > 1 else found[0]

    def largest(self, number):
        return int(self.share([number]).max())

    def check_same(self, **things):
        if self.count == 1:
            return
        rows = self.share([_number(thing) for thing in things.values()])
        for index, (name, own) in enumerate(things.items()):
            others = [rank for rank in range(self.count) if rows[rank, index] != rows[0, index]]
            if others:
                raise ValueError(
                    f"The workers differ in {name.replace('_', ' ')}: workers {others} differ from "
                    f"worker 0; on {self.name} it is {_short(own)}. {_SAME_DATA}"
                )

    def all_have(self, available):
        found = self.share([available])
        if found.any() and not found.all():
            raise self.uneven()
        return available

    def have_next(self, available):
        """(whether all workers have a next batch, whether only some have). Traced. A collective call."""
        found = self.gathered(tf.cast([available], tf.int64)) > 0
        everyone = tf.reduce_all(found)
        return everyone, tf.reduce_any(found) & ~everyone

    def uneven(self):
        """The error to raise on every worker if some run out of data before the others."""
        return ValueError(
            f"The workers differ in the number of batches: the data of some end before those of the others (this is "
            f"{self.name}). {_SAME_DATA}"
        )

    def meet(self):
        self.share([0])

    def beat(self, step):
        if self._sign_of_life:
            with open(self._sign_of_life, "w") as file:
                file.write(str(step))

    def lost(self, error, step, resumes_at):
        """The error to raise after a failed collective operation: who noticed it, after which step, what to do."""
        between = _BETWEEN.search(str(error))
        told = " ".join(str(getattr(error, "message", error)).split())
        told = told.partition("aborted by:")[2].strip() or told  # before it: where in the program it happened
        told = f"Lost {between.group(1)}" if between else f"TensorFlow says: {type(error).__name__}: {told[:300]}"
        again = "from the beginning" if resumes_at is None else f"at the checkpoint of step {resumes_at:,}"
        return WorkerLost(
            f"{self.name} has lost another worker after step {step:,}. Start all workers again with the same command: "
            f"they resume {again}. {told}"
        )


def _number(thing):
    content = thing if isinstance(thing, bytes) else repr(thing).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:7], "big")


def _short(thing):
    return f"{len(thing)} bytes that hash to {_number(thing):x}" if isinstance(thing, bytes) else repr(thing)[:300]


def bytes_of(structure):
    """The contents of a structure of tensors, to be compared between workers."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return b"".join(hashlib.sha256(np.ascontiguousarray(leaf).tobytes()).digest() for leaf in leaves)
