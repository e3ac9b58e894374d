"""Weights in and out: warm starts with a report of what matched, and what a finished run leaves behind."""

import contextlib
import errno
import os
import warnings
from typing import NamedTuple

import keras
import numpy as np

# What files of HDF5 need beside the numbers, generously.
_BYTES_PER_VARIABLE, _BYTES_PER_FILE = 4096, 65536


class WarmStart(NamedTuple):
    """The weights that a warm start took over, by the model's paths."""

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
    _write(trainer.model.save_weights, workdir, "model.weights.h5", trainer.model)
    _write(trainer.model.save, workdir, "model.keras", trainer.model)
    if trainer.ema_decay is not None:
        with trainer.trainer.averaged_weights():
            _write(trainer.model.save_weights, workdir, "averaged.weights.h5", trainer.model)


def export_best(trainer, workdir, averaged=False):
    """Leaves the weights of the best evaluation as `best.weights.h5`; the averaged ones if these were evaluated."""
    if isinstance(trainer.model, keras.Model):
        with trainer.trainer.averaged_weights() if averaged else contextlib.nullcontext():
            _write(trainer.model.save_weights, workdir, "best.weights.h5", trainer.model)


def export_if_due(trainer, workdir, saved_at):
    """Exports what a process that was killed after its last checkpoint did not. Returns whether it was due.

    Args:
        trainer: in the state of the last checkpoint.
        workdir: where to.
        saved_at: the time when that checkpoint was written, as `os.path.getmtime` gives it.
    """
    names = ["model.weights.h5", "model.keras"] + (["averaged.weights.h5"] if trainer.ema_decay is not None else [])
    paths = [os.path.join(workdir, name) for name in names]
    due = isinstance(trainer.model, keras.Model) and not all(
        os.path.exists(path) and os.path.getmtime(path) >= saved_at for path in paths
    )
    if due:
        export(trainer, workdir)
    return due


def _write(write, workdir, name, model):
    # Under another name first, so that a kill leaves the file of before. Keras wants the ending.
    path, temporary = os.path.join(workdir, name), os.path.join(workdir, "writing." + name)
    try:
        _check_space(temporary, model)
        write(temporary)
        os.replace(temporary, path)
    except Exception as error:  # a model that Keras cannot serialize still has its checkpoints
        with contextlib.suppress(OSError):
            os.remove(temporary)
        reason = " ".join(str(error).split()).split(". ")[0]
        saved = f"The weights are only in the newest checkpoint, if that was written: `looptape checkpoints {workdir}`."
        warnings.warn(f"{name} could not be written: {reason}. {saved}", stacklevel=2)


def _check_space(path, model):
    """Raises an `OSError` if the disk has no room for the model: HDF5 that meets a full disk crashes the process."""
    needed = sum(int(np.prod(v.shape)) * v.value.dtype.size for v in model.variables)
    needed = int(1.1 * needed) + _BYTES_PER_VARIABLE * len(model.variables) + _BYTES_PER_FILE
    with open(path, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, needed)
        except AttributeError:  # not on every system
            return
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(error.errno, f"no room for its {needed / 1e6:,.1f} MB; free some space") from None
