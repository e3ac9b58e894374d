"""Quick looks at a trainer before the long run. They leave it as it was."""

import contextlib
import tempfile

import tensorflow as tf

from trainer.datasets import as_dataset
from trainer.state import raw


@contextlib.contextmanager
def undone(trainer):
    """A context after which the trainer, its model and its optimizer have the state they had before."""
    before = {id(v): (v, tf.identity(trainer.read(v))) for v in _variables(trainer)}
    kept = trainer.host_step, trainer.epoch, trainer.rounds, trainer.best_loss, dict(trainer.sources)
    try:
        yield
    finally:
        for variable in _variables(trainer):
            if id(variable) in before:
                variable.assign(before[id(variable)][1])
            elif variable.dtype.is_floating or variable.dtype.is_integer:
                # Made since: moments, counters. Nearly all begin at zero; averages begin with the weights.
                variable.assign(tf.zeros_like(variable))
        for minimizer in trainer.minimizers.values():
            for variable, mean in zip(getattr(minimizer, "averaged_variables", ()), minimizer.averages, strict=True):
                mean.assign(raw(variable))
        trainer.host_step, trainer.epoch, trainer.rounds, trainer.best_loss = kept[:4]
        trainer.sources.clear()
        trainer.sources.update(kept[4])


def _variables(trainer):
    found = [raw(v) for v in trainer.model.variables] + [raw(v) for v in trainer.forward_state.variables()]
    found.append(trainer.step)
    for minimizer in trainer.minimizers.values():
        # The learning rate and the like are set by the user, not moved by updates.
        found += [raw(v) for v in minimizer.optimizer.variables if "learning_rate" not in v.path]
        found += minimizer.averages
    return found


def fast_dev_run(trainer, dataset, eval_dataset=None, steps=2):
    """A few steps of everything: updates, a probed one, logging, evaluation, a checkpoint, a resume."""
    dataset = as_dataset(dataset, training=True)
    with undone(trainer), tempfile.TemporaryDirectory() as workdir:
        first = trainer.host_step
        dataset = dataset.take(steps * trainer.accumulation_steps).repeat()
        options = {"eval_dataset": eval_dataset, "eval_steps": steps, "log_every": 1, "progress": False}
        trainer.fit(dataset, steps=first + steps, workdir=workdir, checkpoint_every=1, **options)
        trainer.fit(dataset, steps=first + steps + 1, workdir=workdir, **options)
        return trainer.evaluate(eval_dataset if eval_dataset is not None else dataset, steps=steps)


def overfit(trainer, dataset, batches=1, steps=200):
    """{loss: (at the first step, at the last step)} of training on a few batches over and over.

    A model that cannot learn these by heart has a bug: in its losses, its data or its gradients.
    """
    dataset = as_dataset(dataset).take(batches).cache()
    with undone(trainer):
        before = trainer.evaluate(dataset)
        trainer.fit(dataset.repeat(), steps=trainer.host_step + steps, progress=False)
        after = trainer.evaluate(dataset)
    return {name: (before[name], after[name]) for name in before}
