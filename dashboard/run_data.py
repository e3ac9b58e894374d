"""Reads the work directory of a run into arrays. Needs neither TensorFlow nor a running TensorBoard."""

import dataclasses
import json
import os
from typing import Any

import numpy as np

from looptape.dashboard import events, metadata

_RUNS = {"train": "", "eval": "eval/"}  # directories of event files, and what their tags begin with here


@dataclasses.dataclass(frozen=True)
class RunData:
    """The return value of `looptape.read`. Arrays are copies; changing them changes no file.

    Args:
        path: path of the work directory.
        scalars: {tag: (steps [rows], values [rows])}; tags of the evaluation begin with `eval/`, tags of version 0.1
            have their present names.
        vectors: {tag: (steps [rows], values [rows, time])}, per time step or position; short rows end in NaN.
        config: {flag: value} of a run that was launched with flags, else {}.
        results: the last evaluation of a finished run that was launched with flags, else {}.
    """

    path: str
    scalars: dict[str, tuple[np.ndarray, np.ndarray]]
    vectors: dict[str, tuple[np.ndarray, np.ndarray]]
    config: dict[str, Any]
    results: dict[str, float]

    def frame(self) -> Any:
        """Returns the scalars as a `pandas.DataFrame`: one row per step, one column per tag, NaN for missing values."""
        try:
            import pandas
        except ImportError:
            raise ImportError("A frame needs pandas, which is not installed. Run `pip install pandas`.") from None
        columns = {tag: pandas.Series(values, index=steps) for tag, (steps, values) in self.scalars.items()}
        return pandas.DataFrame(columns).rename_axis("step")

    def __repr__(self) -> str:
        return f"RunData({self.path!r}, {len(self.scalars)} scalars, {len(self.vectors)} vectors)"


def read(workdir: str | os.PathLike) -> RunData:
    """Reads a work directory: scalars, vectors per time step, configuration and results.

    A step that was written twice appears once. It also reads a run that is still training.
    """
    path = os.fspath(workdir)
    if not os.path.isdir(path):
        raise FileNotFoundError(f"There is no directory {path!r} to read a run from. Pass the `workdir` of a `fit`.")
    scalars, vectors = {}, {}
    for name, prefix in _RUNS.items():
        run = events.read_run(os.path.join(path, name))
        for tag, (steps, values) in run.scalars.items():
            scalars[prefix + tag] = np.array(steps, np.int64), np.array(values, np.float64)
        for layer, quantities in run.layers.items():
            for quantity, rows in quantities.items():
                vectors[prefix + metadata.vector_tag(layer, quantity)] = rows.steps, rows.values
        for layer, rows in run.positions.items():
            vectors[prefix + metadata.position_tag(layer)] = rows.steps, rows.values
    config, results = (_json(os.path.join(path, f"{name}.json")) for name in ("config", "results"))
    if not scalars and not vectors and not config:
        raise ValueError(
            f"{path!r} holds no run: there are neither event files in {' or '.join(_RUNS)} nor a config.json. Pass the "
            "`workdir` of a `fit`, not one of its subdirectories."
        )
    return RunData(path, scalars, vectors, config.get("config", {}), results.get("results", {}))


def together(runs: Any, tag: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (steps [rows], values [runs, rows]) of one scalar in several runs, at the steps that all have.

    Args:
        runs: `RunData` objects or work directories.
        tag: tag of the scalar.
    """
    if isinstance(runs, str | os.PathLike | RunData):
        raise TypeError(f"`runs` is the single run {runs!r}; it must be a list of runs. Pass [{runs!r}].")
    runs = [run if isinstance(run, RunData) else read(run) for run in runs]
    if not runs:
        raise ValueError("There are no runs to put together: the list is empty. Pass at least one.")
    for run in runs:
        if tag not in run.scalars:
            raise KeyError(f"The run in {run.path!r} has no scalar {tag!r}; it has {', '.join(sorted(run.scalars))}.")
    steps = sorted(set.intersection(*(set(run.scalars[tag][0].tolist()) for run in runs)))
    if not steps:
        raise ValueError(f"The {len(runs)} runs have no step of {tag!r} in common. Log all of them at the same steps.")
    rows = [dict(zip(*(each.tolist() for each in run.scalars[tag]), strict=True)) for run in runs]
    return np.array(steps, np.int64), np.array([[row[step] for step in steps] for row in rows])


def _json(path):
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{path!r} is damaged: {error}. Restore it or delete it.") from error
