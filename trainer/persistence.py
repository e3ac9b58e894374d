"""What a checkpoint of a trainer holds."""

import json
import math
import os
import warnings
from importlib import metadata

import numpy as np
import tensorflow as tf
from absl import logging

from trainer import checkpoints, workers
from trainer.sources import has_clock
from trainer.state import raw


def open_store(workdir, keep=3):
    return checkpoints.Store(os.path.join(workdir, "checkpoints"), keep)


def tracked_state(trainer, source):
    """{name: tf.Variable or iterator}: everything on the device that decides how training goes on.

    Metrics, whose parts lie on several replicas, are there as whole copies; see `WholeCopies`.
    """
    model_variables = [raw(v) for v in (*trainer.model.variables, *trainer.forward_state.variables())]
    model_variables = [trainer.whole_copies.of(v) for v in model_variables]
    sections = {"model": model_variables, "trainer": [trainer.step]}
    sections["trainer"] += trainer.loss_scale.variables
    for index, minimizer in enumerate(trainer.minimizers.values()):
        sections[f"optimizer{index}"] = [raw(v) for v in minimizer.optimizer.variables]
        sections[f"minimizer{index}"] = [minimizer.last, *minimizer.averages, *minimizer.weights.variables]
        sections[f"combiner{index}"] = list(minimizer.combiner.variables)
    state, seen = {}, set()
    for section, variables in sections.items():
        for variable in variables:
            if id(variable) not in seen:
                seen.add(id(variable))
                state[f"{section}_{len(state):04d}"] = variable
    if source.checkpointable():
        state["iterator"] = source.iterator
    return state


def save(trainer, source, store, loop, callbacks, *, score=None, urgent=False):
    """Writes a checkpoint of a trainer in the middle of `fit`. Returns whether it could.

    Args:
        trainer: the trainer.
        source: the data.
        store: where to.
        loop: what the host loop remembers, as JSON can hold it; `restore` gives it back.
        callbacks: the `CallbackBridge`.
        score: see `Store.save`.
        urgent: see `Store.save`.
    """
    arrays = {
        f"{index}:{position}": array
        for index, weights in enumerate(callbacks.best_weights())
        for position, array in enumerate(weights or ())
    }
    host = {
        "epoch": trainer.epoch,
        "rounds": trainer.rounds,
        "position": source.position,
        "passes": source.passes,
        "skips": trainer.calls.skips.state(),
        "restores": trainer.restores,
        "probed": trainer.timesteps.rows,
        "best_loss": trainer.best_loss if math.isfinite(trainer.best_loss) else None,
        "callbacks": callbacks.state(),
        "between_callbacks": callbacks.shared_state(),
        "loop": loop,
        "optimizers": _optimizers(trainer),
        "losses": _losses(trainer),
        "given_learning_rates": trainer.given_learning_rates,
        "environment": environment(),
    }
    step, state = trainer.host_step, tracked_state(trainer, source)
    trainer.whole_copies.take()
    if trainer.workers.count > 1:
        trainer.workers.check_same(weights=workers.bytes_of([raw(variable) for variable in trainer.model.variables]))
    if not trainer.workers.is_chief:
        return True
    saved = store.save(step, state, host, arrays, score=score, urgent=urgent)
    if saved and "iterator" in state:
        source.anchor = source.position, checkpoints.prefix(store.path(step))
    return saved


def restore(trainer, source, store):
    """Restores the newest checkpoint, if it is ahead of the trainer. Returns what the host knew, or None."""
    found = _newest(trainer, store)
    if found is None or found[1]["step"] <= trainer.host_step:
        return None
    path, manifest = found
    host = manifest["host"]
    _compare_optimizers(host, trainer, path)
    _compare_losses(host["losses"], _losses(trainer), path)
    _compare_environment(host["environment"], path)
    trainer.restored_arrays = checkpoints.load(path, tracked_state(trainer, source))
    trainer.whole_copies.give()
    _restore_host(trainer, manifest["step"], host)
    trainer.epoch, trainer.restores = host["epoch"], host["restores"]
    if source.checkpointable():
        source.anchor = host["position"], checkpoints.prefix(path)
    else:
        source.skip_to(host["position"], host["passes"])
    source.position, source.passes = host["position"], host["passes"]
    return host


def _newest(trainer, store, suits=None):
    """(path, manifest) of the newest good checkpoint, or None. Of several workers the chief chooses and cleans up."""
    workers = trainer.workers
    found = store.newest(suits) if workers.is_chief else None
    step = workers.chiefs(-1 if found is None else found[1]["step"])
    if workers.is_chief or step < 0:
        return found
    path = store.path(step)
    if not os.path.isdir(path):
        raise RuntimeError(
            f"The chief resumes from {path}, which {workers.name} does not see. All workers need the same `workdir`, "
            "on a file system that they share: mount it on each, or start with a new one."
        )
    return path, checkpoints.read_manifest(path)


class WholeCopies:
    """Copies of variables whose value lies in parts on several replicas (Keras's metrics), for checkpoints.

    Saving such a variable itself would ask all workers for their parts, and give another file for each number of
    replicas. On one replica nothing is copied.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self._copies = {}

    def of(self, variable):
        """What to save in place of a variable: itself, if it is whole."""
        if self._trainer.replicas == 1 or variable.synchronization != tf.VariableSynchronization.ON_READ:
            return variable
        if id(variable) not in self._copies:
            copy = self._trainer.make_variable(np.zeros(variable.shape, variable.dtype.as_numpy_dtype), "whole")
            self._copies[id(variable)] = variable, copy
        return self._copies[id(variable)][1]

    def take(self):
        """Makes the copies equal to the variables."""
        for variable, copy in self._copies.values():
            copy.assign(self._trainer.read(variable))

    def give(self):
        """Makes the variables equal to the copies."""
        for variable, copy in self._copies.values():
            variable.assign(tf.convert_to_tensor(copy))


def go_back(trainer, source, store):
    """Restores the newest checkpoint before a row of non-finite updates, but goes on with the data that come now.

    Returns (step, what the host knew then), or None if there is no such checkpoint.
    """
    found = _newest(trainer, store, lambda manifest: not manifest["host"]["skips"]["in_a_row"])
    if found is None:
        return None
    path, manifest = found
    state = tracked_state(trainer, source)
    if "iterator" in state:
        # The checkpoint's own iterator is read into one that is thrown away.
        state["iterator"] = iter(source.dataset)
    trainer.restored_arrays = checkpoints.load(path, state)
    trainer.whole_copies.give()
    _restore_host(trainer, manifest["step"], manifest["host"])
    return manifest["step"], manifest["host"]


def _restore_host(trainer, step, host):
    trainer.host_step = step
    trainer.rounds = host["rounds"]
    trainer.calls.skips.restore(host["skips"])
    trainer.best_loss = math.inf if host["best_loss"] is None else host["best_loss"]
    trainer.timesteps.rows = host["probed"]


def restore_callbacks(trainer, host, callbacks):
    """Gives callbacks back what they remembered when the checkpoint was written."""
    callbacks.restore(host["callbacks"])
    callbacks.restore_shared(host["between_callbacks"])
    weights = []
    for index in range(len(host["callbacks"])):
        own = [name for name in trainer.restored_arrays if name.startswith(f"{index}:")]
        weights.append([trainer.restored_arrays[f"{index}:{position}"] for position in range(len(own))] or None)
    callbacks.restore_best_weights(weights)


def windows_state(*windows):
    return [window.values.tolist() for window in windows]


def restore_windows(state, *windows):
    """Puts the sums of the interrupted windows back, so that the next row is what it would have been."""
    for window, values in zip(windows, state, strict=True):
        window.values = np.array(values, np.float64)


# ---- What must be the same for the bits to be the same.


def environment():
    """What the bits depend on beside the state."""
    threads = tf.config.threading
    return {
        **{name: metadata.version(name) for name in ("tensorflow", "keras", "numpy")},
        "threads": [threads.get_intra_op_parallelism_threads(), threads.get_inter_op_parallelism_threads()],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "deterministic": not has_clock(),
    }


def _compare_environment(before, path):
    now = environment()
    changed = [f"{name}: {before.get(name)} → {now[name]}" for name in now if before.get(name) != now[name]]
    if changed:
        warnings.warn(
            f"The checkpoint {path} was made elsewhere ({'; '.join(changed)}). Training goes on from it, but not bit "
            "for bit as it would have gone on there.",
            stacklevel=2,
        )


def learning_rates(trainer):
    """[learning rate as it is now] of every optimizer; None for a schedule."""
    return [_rate(optimizer) for optimizer in _each_optimizer(trainer)]


def _rate(optimizer):
    rate = getattr(optimizer, "_learning_rate", None)  # the public one computes a schedule's value of the step
    return None if callable(rate) and not hasattr(rate, "assign") else float(tf.convert_to_tensor(rate))


def _each_optimizer(trainer):
    for minimizer in trainer.minimizers.values():
        group = minimizer.optimizer
        yield from group.values() if hasattr(group, "values") else [group]


def _optimizers(trainer):
    """[[class, config without the learning rate]] of every optimizer, as JSON gives it back."""
    found = []
    for optimizer in _each_optimizer(trainer):
        config = {k: v for k, v in optimizer.get_config().items() if k not in ("name", "learning_rate")}
        found.append([type(optimizer).__name__, config])
    return json.loads(json.dumps(found, default=str))


def _losses(trainer):
    """[[names of the losses, class of the combiner, its arguments]] of every minimizer, as JSON gives it back."""
    found = []
    for minimizer in trainer.minimizers.values():
        combiner = minimizer.combiner
        options = {name: getattr(combiner, name, None) for name in combiner.arguments()}
        found.append([minimizer.names, type(combiner).__name__, options])
    return json.loads(json.dumps(found, default=str))


def _compare_losses(before, now, path):
    """Weights and the state of combiners are restored by the order of the losses, whatever their names."""
    for (old_names, old_kind, old), (names, kind, new) in zip(before, now, strict=False):
        if old_names != names:
            raise ValueError(
                f"The checkpoint {path} was made with the losses {old_names}, in this order; now they are {names}. "
                "Return the same ones in the same order, or use another workdir and `warm_start` for the weights."
            )
        if old_kind != kind:
            raise ValueError(
                f"The checkpoint {path} was made with the combiner {old_kind}, this trainer has {kind}. Use the same "
                "one, or another workdir and `warm_start` for the weights."
            )
        changed = [f"{name}: {old.get(name)} → {new[name]}" for name in new if old.get(name) != new[name]]
        if changed:
            logging.warning("%s has other options than in the checkpoint (%s); they hold from now on.", kind, changed)


def _compare_optimizers(host, trainer, path):
    """Slots are restored by their order: Adam's would go into another optimizer unnoticed."""
    before, now = host["optimizers"], _optimizers(trainer)
    if [kind for kind, _ in before] != [kind for kind, _ in now]:
        raise ValueError(
            f"The checkpoint {path} was made with {[kind for kind, _ in before]}, this trainer has "
            f"{[kind for kind, _ in now]}. Use the same optimizer, or another workdir and `warm_start` for the weights."
        )
    for (kind, old), (_, new) in zip(before, now, strict=True):
        changed = [f"{name}: {old.get(name)} → {new[name]}" for name in new if old.get(name) != new[name]]
        if changed:
            logging.warning("%s has other options than in the checkpoint (%s); they hold from now on.", kind, changed)
    for old, new in zip(host["given_learning_rates"], trainer.given_learning_rates, strict=True):
        if old != new and None not in (old, new):
            logging.warning(
                "The learning rate was given as %g when the checkpoint was made, and as %g now. The checkpoint's goes "
                "on; set `trainer.optimizer.learning_rate` in a callback's `on_train_begin` to change it.",
                old,
                new,
            )
