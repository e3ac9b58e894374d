"""The contents of a checkpoint, by name."""

import os

import numpy as np
import tensorflow as tf

from looptape.trainer.checkpoints import store as checkpoints
from looptape.trainer.checkpoints.contents import compatibility, layer_paths, snapshot, state_names
from looptape.trainer.distribution import workers
from looptape.trainer.optim.optimizer_groups import trained_by
from looptape.trainer.variables import path_of, raw


def open_store(workdir, keep=3):
    return checkpoints.Store(os.path.join(workdir, "checkpoints"), keep)


def tracked_state(trainer, source):
    """{name: tf.Variable or iterator}: everything on the device that decides how training continues.

    Names are stable paths, see `state_names`. Metrics, whose parts lie on several replicas, are there as whole copies;
    see `WholeCopies`.
    """
    state = state_names.unique((name, trainer.whole_copies.of(raw(v))) for name, v in _pieces(trainer))
    if source.checkpointable():
        state["iterator"] = source.iterator
    return state


def device_state(trainer):
    """[tf.Variable]: as `tracked_state`, without the place in the data."""
    return [trainer.whole_copies.of(raw(v)) for v in {id(v): v for _, v in _pieces(trainer)}.values()]


def _pieces(trainer):
    """(name, variable) of every piece of state. A new piece is one line here. Format 1 relies on this order."""
    model, forward, outside = trainer.model, trainer.forward_state.variables(), trainer.outside
    names = _names(trainer)
    metrics = {id(v): f"metrics/{n}/{v.name}" for n, metric in trainer.metrics.items() for v in metric.variables}
    yield from ((f"model/{names.of(v)}", v) for v in model.variables)
    yield from ((metrics.get(id(v)) or f"forward/{names.of(v)}", v) for v in forward)
    yield "trainer/step", trainer.step
    yield from ((f"trainer/{path_of(v)}", v) for v in trainer.loss_scale.variables)
    for minimizer in trainer.minimizers.values():
        # The main one has no name.
        label = f"[{minimizer.name}]" if minimizer.name else ""
        trained = trained_by(minimizer.optimizer)
        yield from ((f"optimizer{label}/{names.slot(v, trained)}", v) for v in minimizer.optimizer.variables)
        yield f"minimizer{label}/last", minimizer.last
        yield from ((f"average{label}/{names.of(v)}", mean) for v, mean in minimizer.pipeline.averaged())
        yield from ((f"loss_weight{label}/{name}", v) for name, v in minimizer.weights.named_variables())
        yield from ((f"stages{label}/{name}", v) for name, v in minimizer.pipeline.own_stages.named_variables())
        yield from ((f"combiner{label}/{path_of(v)}", v) for v in minimizer.combiner.variables)
        guard = minimizer.spikes
        yield from ((f"spikes{label}/{path_of(v)}", v) for v in (guard.variables if guard else ()))
    for attribute, v in outside.pieces:
        yield checkpoints.OUTSIDE + (f"{attribute}/" if attribute else "") + names.of(v), v


def _names(trainer):
    outside = trainer.outside
    further = [*trainer.forward_state.variables(), *(v for _, v in outside.pieces)]
    return state_names.Names([trainer.model, *outside.roots], further)


def _layer_paths(trainer, state):
    return layer_paths.describe(trainer.model, trainer.outside, _names(trainer), state)


def take(trainer, source, loop, callbacks, *, score=None):
    """A `Snapshot` of a trainer in the middle of `fit`. A collective call of several workers.

    Args:
        trainer: the trainer.
        source: the data.
        loop: what the host loop remembers, as JSON can hold it; `restore` gives it back.
        callbacks: the `CallbackBridge`.
        score: see `Store.save`.
    """
    arrays = {
        f"{index}:{position}": array
        for index, weights in enumerate(callbacks.best_weights())
        for position, array in enumerate(weights or ())
    }
    host = {
        **trainer.counters.state(),
        "position": source.position,
        "passes": source.passes,
        "health": trainer.health_log.state(),
        "callbacks": callbacks.state(arrays),
        "between_callbacks": callbacks.shared_state(),
        "loop": loop,
        "optimizers": compatibility.describe_optimizers(trainer),
        "losses": compatibility.describe_losses(trainer),
        "settings": compatibility.describe_settings(trainer, source),
        "given_frozen": trainer.given_frozen,
        "layers": compatibility.describe_layers(trainer.model),
        "given_learning_rates": trainer.given_learning_rates,
        "environment": compatibility.environment(),
    }
    step, state = trainer.counters.step, tracked_state(trainer, source)
    host["layer_paths"] = _layer_paths(trainer, state)
    trainer.whole_copies.take()
    if trainer.workers.count > 1:
        trainer.workers.check_same(weights=workers.bytes_of([raw(variable) for variable in trainer.model.variables]))
    return snapshot.take(step, state, checkpoints.describe(state), host, arrays, score)


def restore(trainer, source, store):
    """Restores the newest checkpoint, if it is ahead of the trainer. Returns what the host knew, or None."""
    compatibility.note_hooks(trainer)
    found = _newest(trainer, store)
    if found is None or found[1]["step"] <= trainer.counters.step:
        return None
    path, manifest = found
    host = manifest["host"]
    compatibility.restore_frozen(host, trainer)
    latest = manifest["step"] - 1  # the update that led there: its state is restored
    # `minimize(variables=…)` names its variables in each trace: an optimizer knows those of all phases so far.
    named = any(minimizer.asked.variables is not None for minimizer in trainer.minimizers.values())
    for step in trainer.freezing.changes_until(latest) if named else [latest]:
        trainer.freezing.follow(step)
        if trainer.freezing_changed:
            trainer.prepare(*source.for_trace())
    compatibility.compare_optimizers(host, trainer, path)
    compatibility.compare_losses(host["losses"], compatibility.describe_losses(trainer), path)
    compatibility.compare_environment(host["environment"], path)
    compatibility.compare_settings(host.get("settings"), trainer, source, path)
    state = tracked_state(trainer, source)
    compatibility.compare_order(manifest, state, path)
    layer_paths.compare(host.get("layer_paths"), _layer_paths(trainer, state), path)
    try:
        trainer.restored_arrays = checkpoints.load(path, state)
    except tf.errors.NotFoundError as error:  # the only part whose contents are not compared before
        raise ValueError(compatibility.other_data(host.get("settings"), source, path)) from error
    compatibility.compare_layers(host.get("layers", {}), trainer.model, path)
    trainer.whole_copies.give()
    store.run, host["run"] = manifest.get("run"), manifest.get("run")
    trainer.counters.restore(manifest["step"], host)
    trainer.health_log.restore(host.get("health"))
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
        """The tensor to save for a variable: the variable itself if it is whole."""
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
    """Restores the newest checkpoint before a row of non-finite updates, but continues with the data that follow it.

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
    # The passes over the data and the restores so far keep counting.
    trainer.counters.restore(manifest["step"], manifest["host"], keep=("epoch", "restores"))
    trainer.health_log.restore(manifest["host"].get("health"))
    return manifest["step"], manifest["host"]


def restore_callbacks(trainer, host, callbacks):
    """Gives callbacks back what they remembered when the checkpoint was written."""
    callbacks.restore(host["callbacks"], trainer.restored_arrays)
    callbacks.restore_shared(host["between_callbacks"])
    weights = []
    for index in range(len(host["callbacks"])):
        own = [name for name in trainer.restored_arrays if name.startswith(f"{index}:")]
        weights.append([trainer.restored_arrays[f"{index}:{position}"] for position in range(len(own))] or None)
    callbacks.restore_best_weights(host["callbacks"], weights)


def windows_state(*windows):
    return [window.values.tolist() for window in windows]


def restore_windows(state, *windows):
    """Puts the sums of the interrupted windows back, so that the next row is what it would have been."""
    for window, values in zip(windows, state, strict=True):
        window.values = np.array(values, np.float64)
