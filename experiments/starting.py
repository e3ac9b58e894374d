"""Where a run starts from: weights of another run, and flags that were changed since its checkpoint."""

import os

import keras

from experiments import building
from experiments.workdirs import Refused


def warm_start(experiment, path):
    """Loads weights into the model that is to be trained: of a finished run's workdir, or a file of Keras."""
    trainer = experiment.trainer
    trainer.build(experiment.dataset.element_spec)
    file = os.path.join(path, "model.weights.h5") if os.path.isdir(path) else path
    if not os.path.isfile(file) or not file.endswith((".weights.h5", ".keras")):
        raise Refused(
            f"`init_from` is {path!r}, where no weights are; it must be the workdir of a finished run, a *.weights.h5 "
            "or a *.keras file. Finish that run, or correct the path."
        )
    try:
        trainer.model.load_weights(file)
    except (ValueError, KeyError, OSError) as error:
        raise Refused(f"`init_from` is {file!r}, which does not fit this model: {error}") from error


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
