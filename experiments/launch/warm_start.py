"""Starting points of a run: weights of another run, and flags that changed since its checkpoint."""

import os

import keras

from looptape.experiments.launch import factories
from looptape.experiments.launch.options import Refused

# What a workdir may hold, the first that is there is taken. An unfinished run has only what its evaluations left.
_IN_WORKDIR = ("model.keras", "model.weights.h5", "best.weights.h5")


def warm_start(experiment, path):
    """Loads weights into the model before training, and returns a sentence about what it loaded.

    From a `.keras` file, also that of a workdir, it loads every variable whose layer, name and shape match. The weights
    of a `*.weights.h5` file must match the whole model.
    """
    trainer = experiment.trainer
    trainer.build(experiment.dataset)
    files = [os.path.join(path, name) for name in _IN_WORKDIR] if os.path.isdir(path) else [path]
    file = next((file for file in files if os.path.isfile(file)), "")
    if not file.endswith((".weights.h5", ".keras")):
        raise Refused(
            f"`init_from` is {path!r}, which has no weights; it must be the workdir of a run that finished or was "
            "evaluated, a *.weights.h5 or a *.keras file. Finish that run, or correct the path."
        )
    try:
        if file.endswith(".keras"):
            return f"{file}: {trainer.warm_start(file)}"
        trainer.model.load_weights(file)
    except (ValueError, KeyError, OSError) as error:
        raise Refused(f"`init_from` is {file!r}, which does not fit this model: {error}") from error
    return f"{file}: {len(trainer.model.weights)} weights taken over"


def overrides(config, experiment, changed):
    """Returns callbacks that apply changed flags after the restore of a checkpoint, which holds the old values."""
    actions, trainer = [], experiment.trainer
    if "learning_rate" in changed and isinstance(factories.learning_rate(config), float):
        actions.append(lambda: setattr(trainer.optimizer, "learning_rate", config.learning_rate))
    if "loss_weights" in changed:
        given = {name: trainer.loss_weights[name] for name in trainer.loss_weights}
        actions.append(lambda: _set_weights(trainer.loss_weights, given))
    return [_AfterRestore(actions)] if actions else []


def _set_weights(weights, given):
    for name in weights:
        if not callable(weights[name]):
            weights[name] = given.get(name, 1.0)


class _AfterRestore(keras.callbacks.Callback):
    def __init__(self, actions):
        super().__init__()
        self._actions = actions

    def on_train_begin(self, logs=None):
        for action in self._actions:
            action()
