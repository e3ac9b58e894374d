"""Quick looks at a trainer before the long run. They leave it as it was."""

import contextlib
import tempfile

import tensorflow as tf

from trainer import persistence
from trainer.datasets import as_dataset
from trainer.skips import Skips
from trainer.sources import Source
from trainer.timesteps import TimestepLog

# What the host knows of the training beside the variables, as far as it is plain numbers.
_COUNTED = ("host_step", "epoch", "rounds", "best_loss", "restores")


@contextlib.contextmanager
def undone(trainer, dataset):
    """A context after which the trainer has the state it had before: all that a checkpoint of it would hold.

    Args:
        trainer: the trainer.
        dataset: the `tf.data.Dataset` that is trained on inside. The orders that its shuffles draw are not put back.
    """
    host = {name: getattr(trainer, name) for name in _COUNTED}
    skips, timesteps, sources = trainer.calls.skips, trainer.timesteps, dict(trainer.sources)
    trainer.calls.skips, trainer.timesteps = Skips(trainer), TimestepLog(trainer)
    try:
        source = trainer.sources[id(dataset)] = Source(dataset, dataset)  # where `fit` looks for it
        # Makes every variable of the update, and runs none: what is not there yet could not be put back.
        trainer.prepare(source.iterator)
        with _restored(trainer):
            yield
    finally:
        for name, value in host.items():
            setattr(trainer, name, value)
        trainer.calls.skips, trainer.timesteps = skips, timesteps
        trainer.sources.clear()
        trainer.sources.update(sources)


@contextlib.contextmanager
def _restored(trainer):
    """A context after which every variable of a prepared trainer has the value it had before."""
    variables = persistence.tracked_state(trainer, _NoData()).values()
    trainer.whole_copies.take()
    before = [(variable, tf.identity(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
        trainer.whole_copies.give()
        trainer.ledger.take()  # sums that an error left behind


class _NoData:
    """In place of a `Source`: a position in the data that is not kept."""

    def checkpointable(self):
        return False


def fast_dev_run(trainer, dataset, eval_dataset=None, steps=2):
    """A few steps of everything: updates, a probed one, logging, evaluation, a checkpoint, a resume."""
    dataset = as_dataset(dataset, training=True).take(steps * trainer.accumulation_steps).repeat()
    with undone(trainer, dataset), tempfile.TemporaryDirectory() as workdir:
        first = trainer.host_step
        options = {"eval_dataset": eval_dataset, "eval_steps": steps, "log_every": 1, "progress": False}
        trainer.fit(dataset, steps=first + steps, workdir=workdir, checkpoint_every=1, **options)
        trainer.fit(dataset, steps=first + steps + 1, workdir=workdir, **options)
        return trainer.evaluate(eval_dataset if eval_dataset is not None else dataset, steps=steps)


def overfit(trainer, dataset, batches=1, steps=200):
    """{loss: (at the first step, at the last step)} of training on a few batches over and over.

    A model that cannot learn these by heart has a bug: in its losses, its data or its gradients.
    """
    dataset = as_dataset(dataset).take(batches).cache()
    repeated = dataset.repeat()
    with undone(trainer, repeated):
        before = trainer.evaluate(dataset)
        trainer.fit(repeated, steps=trainer.host_step + steps, progress=False)
        after = trainer.evaluate(dataset)
    return {name: (before[name], after[name]) for name in before}
