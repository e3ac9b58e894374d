"""Where a run starts from: weights of another run, and flags that were changed since its checkpoint."""

import os

import keras

from experiments import building
from experiments.workdirs import Refused

# What a workdir may hold, the first that is there is taken. An unfinished run has only what its evaluations left.
_IN_WORKDIR = ("model.keras", "model.weights.h5", "best.weights.h5")


def warm_start(experiment, path):
    """Loads weights into the model that is to be trained, and says in words what was taken over.

    From a `.keras` file (that of a workdir included) every variable is taken whose layer, name and shape fit; the
    weights of a `*.weights.h5` file must fit the model as a whole.
    """
    trainer = experiment.trainer
    trainer.build(experiment.dataset.element_spec)
    files = [os.path.join(path, name) for name in _IN_WORKDIR] if os.path.isdir(path) else [path]
    file = next((file for file in files if os.path.isfile(file)), "")
    if not file.endswith((".weights.h5", ".keras")):
        raise Refused(
            f"`init_from` is {path!r}, where no weights are; it must be the workdir of a run that was finished or "
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
    """Callbacks that put changed flags in force once the checkpoint, which holds the old values, is restored."""
    actions, trainer = [], experiment.trainer
    if "learning_rate" in changed and isinstance(building.learning_rate(config), float):
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
