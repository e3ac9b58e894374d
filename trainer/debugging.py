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
def undone(trainer):
    """A context after which a prepared trainer has the state it had before: all that a checkpoint would hold."""
    host = {name: getattr(trainer, name) for name in _COUNTED}
    skips, timesteps = trainer.calls.skips, trainer.timesteps
    trainer.calls.skips, trainer.timesteps = Skips(trainer), TimestepLog(trainer)
    variables = persistence.tracked_state(trainer, _NoData()).values()
    trainer.whole_copies.take()
    before = [(variable, tf.identity(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
        trainer.whole_copies.give()
        for name, value in host.items():
            setattr(trainer, name, value)
        trainer.calls.skips, trainer.timesteps = skips, timesteps


@contextlib.contextmanager
def _trial(trainer, dataset):
    """A context to train in for a while, then `undone`. Orders that shuffles of the dataset draw are not put back."""
    sources = dict(trainer.sources)
    try:
        source = trainer.sources[id(dataset)] = Source(dataset, dataset)  # where `fit` looks for it
        # Makes every variable of the update, and runs none: what is not there yet could not be put back.
        trainer.prepare(source.iterator)
        with undone(trainer):
            yield
    finally:
        if trainer.ledger.sums is not None:
            trainer.ledger.take()  # what an error left behind
        trainer.sources.clear()
        trainer.sources.update(sources)


class _NoData:
    """In place of a `Source`: a position in the data that is not kept."""

    def checkpointable(self):
        return False


def fast_dev_run(trainer, dataset, eval_dataset=None, steps=2):
    """A few steps of everything: updates, a probed one, logging, evaluation, a checkpoint, a resume."""
    dataset = as_dataset(dataset, training=True).take(steps * trainer.accumulation_steps).repeat()
    with _trial(trainer, dataset), tempfile.TemporaryDirectory() as workdir:
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
    with _trial(trainer, repeated):
        before = trainer.evaluate(dataset)
        trainer.fit(repeated, steps=trainer.host_step + steps, progress=False)
        after = trainer.evaluate(dataset)
    return {name: (before[name], after[name]) for name in before}
