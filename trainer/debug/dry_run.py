"""Quick looks at a trainer before the long run. They leave it as it was."""

import contextlib
import dataclasses
import os
import tempfile

import tensorflow as tf

from looptape.trainer.arguments import check_integer
from looptape.trainer.data import pipeline
from looptape.trainer.data.adapters import as_dataset
from looptape.trainer.data.source import Source, open_source
from looptape.trainer.step.nonfinite import Skips
from looptape.trainer.summaries.health_summaries import HealthLog
from looptape.trainer.summaries.timestep_summaries import TimestepLog


@contextlib.contextmanager
def undone(trainer):
    """A context after which a prepared trainer has the state it had before: all that a checkpoint would hold."""
    counters, timesteps, health_log = trainer.counters, trainer.timesteps, trainer.health_log
    trainer.counters = dataclasses.replace(counters, skips=Skips(trainer), probed=0)
    trainer.timesteps, trainer.health_log = TimestepLog(trainer), HealthLog(trainer)
    variables = trainer.device_state()
    trainer.whole_copies.take()
    before = [(variable, tf.identity(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
        trainer.whole_copies.give()
        trainer.counters, trainer.timesteps, trainer.health_log = counters, timesteps, health_log


@contextlib.contextmanager
def trial(trainer, dataset, given=None):
    """A context with a `Source` to train on for a while, then `undone`.

    Args:
        trainer: the engine.
        dataset: to train on.
        given: what it was made of. If it is a `tf.data.Dataset`, a later `fit` on it gets the batches that it would
            have got without the trial.
    """
    if isinstance(given, tf.data.Dataset) and _shuffles(given):
        open_source(trainer.sources, given, 1, False, trainer.workers, trainer.in_windows)
    sources = dict(trainer.sources)
    with _keeping_orders(sources.values()):
        yield from _trial(trainer, dataset, sources)


@contextlib.contextmanager
def _keeping_orders(sources):
    """A context after which shuffles continue as before. All iterators over a dataset draw orders from one generator.

    An iterator that is restored puts that generator back, too.
    """
    with tempfile.TemporaryDirectory() as directory:
        kept = []
        for index, source in enumerate(sources):
            if type(source) is Source and _shuffles(source.dataset) and source.checkpointable(warn=False):
                checkpoint = tf.train.Checkpoint(iterator=source.iterator)
                kept.append((checkpoint, checkpoint.write(os.path.join(directory, str(index)))))
        try:
            yield
        finally:
            for checkpoint, prefix in kept:
                checkpoint.read(prefix).expect_partial()


def _shuffles(dataset):
    return "Shuffle" in pipeline.operations(pipeline.describe(dataset))


def _trial(trainer, dataset, sources):
    try:
        source = trainer.sources[id(dataset)] = Source(dataset, trainer.in_windows(dataset))  # where `fit` looks for it
        # Makes every variable of the update, and runs none: what is not there yet could not be put back.
        trainer.prepare(source.iterator)
        trainer.calls.check_lost_state()
        with undone(trainer):
            yield source
    finally:
        if trainer.ledger.sums is not None:
            trainer.ledger.take()  # what an error left behind
        trainer.sources.clear()
        trainer.sources.update(sources)


def fast_dev_run(trainer, dataset, eval_dataset=None, steps=2):
    """A few steps of everything: updates, a probed one, logging, evaluation, a checkpoint, a resume."""
    given, dataset = dataset, as_dataset(dataset, training=True, trial=True)
    dataset = dataset.take(steps * trainer.accumulation_steps).repeat()
    with trial(trainer, dataset, given), tempfile.TemporaryDirectory() as workdir:
        first = trainer.counters.step
        options = {"eval_dataset": eval_dataset, "eval_steps": steps, "log_every": 1, "progress": False}
        trainer.trainer.fit(dataset, steps=first + steps, workdir=workdir, checkpoint_every=1, **options)
        trainer.trainer.fit(dataset, steps=first + steps + 1, workdir=workdir, **options)
        return trainer.trainer.evaluate(eval_dataset if eval_dataset is not None else dataset, steps=steps)


def overfit(trainer, dataset, batches=1, steps=200):
    """{loss: (at the first step, at the last step)} of training on a few batches over and over.

    A model that cannot learn these by heart has a bug: in its losses, its data or its gradients.
    """
    check_integer("batches", batches, 1, "It is the number of batches to train on.")
    check_integer("steps", steps, 1, "It is the number of updates.")
    given, dataset = dataset, as_dataset(dataset, trial=True).take(batches).cache()
    repeated = dataset.repeat()
    with trial(trainer, repeated, given):
        before = trainer.trainer.evaluate(dataset)
        trainer.trainer.fit(repeated, steps=trainer.counters.step + steps, progress=False)
        after = trainer.trainer.evaluate(dataset)
    return {name: (before[name], after[name]) for name in before}
