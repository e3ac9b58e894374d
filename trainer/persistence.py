"""What a checkpoint of a trainer holds."""

import math
import os

import numpy as np

from trainer.checkpoints import Store
from trainer.state import raw


def open_store(workdir):
    return Store(os.path.join(workdir, "checkpoints"))


def tracked_state(trainer, source):
    """{name: tf.Variable or iterator}: everything that decides how training goes on."""
    model_variables = [raw(v) for v in (*trainer.model.variables, *trainer.forward_state.variables())]
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


def save(trainer, source, store, log_window, epoch_window, callbacks):
    """Writes a checkpoint of a trainer in the middle of `fit`."""
    arrays = {
        f"{index}:{position}": array
        for index, weights in enumerate(callbacks.best_weights())
        for position, array in enumerate(weights or ())
    }
    host = {
        "epoch": trainer.epoch,
        "rounds": trainer.rounds,
        "position": source.position,
        "skipped": trainer.calls.skipped,
        "probed": trainer.timesteps.rows,
        "best_loss": trainer.best_loss if math.isfinite(trainer.best_loss) else None,
        "callbacks": callbacks.state(),
        "windows": [log_window.values.tolist(), epoch_window.values.tolist()],
    }
    return store.save(trainer.host_step, tracked_state(trainer, source), host, arrays)


def restore(trainer, source, store):
    """Restores the newest checkpoint, if it is ahead of the trainer. Returns whether it did."""
    found = store.newest()
    if found is None or found[1]["step"] <= trainer.host_step:
        return False
    step, host = store.restore(tracked_state(trainer, source))
    trainer.host_step = step
    trainer.epoch, trainer.rounds = host["epoch"], host["rounds"]
    trainer.calls.skipped = host["skipped"]
    trainer.restored_callbacks = host["callbacks"], store.arrays()
    trainer.best_loss = math.inf if host["best_loss"] is None else host["best_loss"]
    trainer.restored_windows, trainer.timesteps.rows = host["windows"], host["probed"]
    if not source.checkpointable():
        source.skip_to(host["position"])
    source.position = host["position"]
    return True


def restore_callbacks(trainer, callbacks):
    """Gives callbacks back what they remembered when the checkpoint was written."""
    state, arrays = trainer.restored_callbacks
    callbacks.restore(state)
    weights = []
    for index in range(len(state)):
        own = [name for name in arrays if name.startswith(f"{index}:")]
        weights.append([arrays[f"{index}:{position}"] for position in range(len(own))] or None)
    callbacks.restore_best_weights(weights)


def restore_windows(trainer, log_window, epoch_window):
    """Puts the sums of the interrupted window back, so that the next row is what it would have been."""
    for window, values in zip((log_window, epoch_window), trainer.restored_windows, strict=True):
        window.values = np.array(values, np.float64)
