"""Weights in and out: warm starts with a report of what matched, and what a finished run leaves behind."""

import os
import warnings
from typing import NamedTuple

import keras


class WarmStart(NamedTuple):
    """What a warm start took over. Paths are the model's."""

    matched: list
    missing: list  # in the model, not in the source
    mismatched: list  # of another shape: "path: (2, 3) in the source, (2, 4) here"
    unused: list  # in the source, not in the model

    def __str__(self):
        lines = [f"{len(self.matched)} weights taken over"]
        for title, paths in (
            ("not in the source, left as they are", self.missing),
            ("of another shape, left as they are", self.mismatched),
            ("in the source only", self.unused),
        ):
            if paths:
                lines.append(f"{len(paths)} {title}: {', '.join(paths)}")
        return "; ".join(lines)


def warm_start(model, source):
    """Copies weights into a built model by the layer's name and the variable's name. Returns a `WarmStart`.

    Args:
        model: a built Keras model.
        source: a Keras model, a `.keras` file, or a work directory of an earlier run.
    """
    if not isinstance(source, keras.Model):
        source = _load(os.fspath(source))
    offered = {_key(variable, source): variable for variable in source.weights}
    matched, missing, mismatched = [], [], []
    for variable in model.weights:
        other = offered.pop(_key(variable, model), None)
        if other is None:
            missing.append(variable.path)
        elif tuple(other.shape) != tuple(variable.shape):
            mismatched.append(f"{variable.path}: {tuple(other.shape)} in the source, {tuple(variable.shape)} here")
        else:
            variable.assign(other)
            matched.append(variable.path)
    if not matched:
        raise ValueError(
            f"Nothing in the source fits the model. The model has {[v.path for v in model.weights]}, the source "
            f"{[v.path for v in source.weights]}. Give the layers the same names."
        )
    return WarmStart(matched, missing, mismatched, [variable.path for variable in offered.values()])


def _key(variable, model):
    """The path without the model's own name, which Keras makes up as a rule, and leaves out in a loaded model."""
    return variable.path.removeprefix(model.name + "/")


def _load(path):
    if os.path.isdir(path):
        path = os.path.join(path, "model.keras")
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"There is nothing to start from at {path!r}. Give a .keras file, or the work directory of a finished run."
        )
    return keras.models.load_model(path, compile=False)


def export(trainer, workdir):
    """Leaves `model.weights.h5` and `model.keras` in the work directory; with averages also `averaged.weights.h5`."""
    if not isinstance(trainer.model, keras.Model):
        return
    _write(trainer.model.save_weights, workdir, "model.weights.h5")
    _write(trainer.model.save, workdir, "model.keras")
    if trainer.ema_decay is not None:
        with trainer.averaged_weights():
            _write(trainer.model.save_weights, workdir, "averaged.weights.h5")


def export_best(trainer, workdir):
    """Leaves the weights of the best evaluation as `best.weights.h5`."""
    if isinstance(trainer.model, keras.Model):
        _write(trainer.model.save_weights, workdir, "best.weights.h5")


def _write(write, workdir, name):
    # Under another name first, so that a kill leaves the file of before. Keras wants the ending.
    path, temporary = os.path.join(workdir, name), os.path.join(workdir, "writing." + name)
    try:
        write(temporary)
        os.replace(temporary, path)
    except Exception as error:  # a model that Keras cannot serialize still has its checkpoints
        reason = " ".join(str(error).split()).split(". ")[0]
        warnings.warn(f"{name} could not be written: {reason}. The checkpoints hold all weights.", stacklevel=2)
