"""Loggers that write rows into a file: CSV and JSON lines."""

import csv
import json
import math
import os

import numpy as np

from looptape.trainer.loggers.interface import Audio, Histogram, Logger, Picture


class RowFile(Logger):
    """A file of one line per row, in which no row comes twice after a resume.

    Args:
        path: of the file; by default `metrics` with the kind's ending in the work directory.
        config: {name: value} of the run, written as the rows of a run `config`.
    """

    ending = ""
    header: str | None = None
    begins = ""  # every file of this kind

    def __init__(self, path=None, config=None):
        self._path, self._file = None if path is None else os.fspath(path), None
        self._again = -1, set()  # the step after which rows come again, and (run, tag) of those of this very step
        self.config = dict(config or {})

    def check(self, workdir):
        if self._path is None and workdir is None:
            raise ValueError(
                f"{type(self).__name__}() writes into the work directory, and there is none. Pass `workdir` to `fit`, "
                f'or a path, as in {type(self).__name__}("metrics{self.ending}").'
            )

    def open(self, workdir, step):
        path = self._path
        if path is None:
            path = os.path.join(workdir, f"metrics{self.ending}")
        self.close()
        kept = self._kept(path, step) if os.path.exists(path) else []
        rows = [self._read(line) for line in kept]
        self._again = step, {(run, tag) for run, at, tags in rows if at == step for tag in tags}
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path + ".tmp", "w", newline="") as file:
            file.writelines(line + "\n" for line in ([self.header] if self.header else []) + kept)
        os.replace(path + ".tmp", path)
        self._file = open(path, "a", newline="")  # noqa: SIM115 closed by `close`

    def _kept(self, path, step):
        """The whole lines of rows up to a step. The last line of a process that was killed may be cut off.

        The configuration is written anew. A run that begins anew keeps nothing.
        """
        with open(path, newline="") as file:
            content = file.read()
        if not (content.startswith(self.begins) or self.begins.startswith(content)):
            raise ValueError(
                f"{path!r} is not a file that {type(self).__name__} wrote: it begins with {content[:40]!r}. It is left "
                "as it is. Choose another path, or remove it"
            )
        lines = [line.rstrip("\r\n") for line in content.splitlines(keepends=True) if line.endswith("\n")]
        rows = [(line, *self._read(line)[:2]) for line in lines if step and line != self.header]
        return [line for line, run, at in rows if at <= step and not (run == "config" and self.config)]

    def _new(self, run, step, values):
        """The values that the file does not have yet: of the step of a checkpoint some may come again."""
        last, tags = self._again
        return {tag: value for tag, value in values.items() if step != last or (run, tag) not in tags}

    def _read(self, line):
        """(run, step, [tag]) of a line."""
        raise TypeError(f"{type(self).__name__} cannot read its lines. Write `_read(line)`.")

    def close(self):
        if self._file is not None:
            self._file.close()
            self._file = None


class CSV(RowFile):
    """Scalars and the configuration as lines of `run,step,tag,value`; other values are left out.

    Args:
        path: of the file; by default `metrics.csv` in the work directory.
        config: {name: value} of the run, written as the rows of a run `config`.
    """

    ending, header, begins = ".csv", "run,step,tag,value", "run,step,tag,value\n"

    def write(self, run, step, values):
        values = self._new(run, step, values)
        rows = [
            (run, step, tag, repr(value) if isinstance(value, float) else value)
            for tag, value in values.items()
            if isinstance(value, float) or run == "config"
        ]
        csv.writer(self._file, lineterminator="\n").writerows([_one_line(each) for each in row] for row in rows)
        self._file.flush()

    def _read(self, line):
        run, step, tag, _ = next(csv.reader([line]))
        return run, int(step), [tag]


def _one_line(value):
    """A value without line breaks: every row is one line."""
    return " ".join(value.splitlines()) if isinstance(value, str) else value


class JSONLines(RowFile):
    """A line `{"run": …, "step": …, "values": {tag: value}}` per row: numbers, texts, vectors as lists, histograms.

    A histogram is a list of [left edge, right edge, count]. JSON has no non-finite numbers, so they are the strings
    "NaN", "Infinity" and "-Infinity", which `Number` in JavaScript and `float` in Python convert back. Pictures and
    sounds are left out.

    Args:
        path: of the file; by default `metrics.jsonl` in the work directory.
        config: {name: value} of the run, written as the row of a run `config`.
    """

    ending, begins = ".jsonl", '{"run": '

    def write(self, run, step, values):
        values = self._new(run, step, values)
        plain = {tag: _jsonable(value) for tag, value in values.items() if not isinstance(value, Picture | Audio)}
        if plain:
            self._file.write(json.dumps({"run": run, "step": step, "values": plain}, default=str) + "\n")
            self._file.flush()

    def _read(self, line):
        row = json.loads(line)
        return row["run"], row["step"], list(row["values"])


def _jsonable(value):
    if isinstance(value, Histogram):
        value = value.buckets
    if isinstance(value, np.ndarray):
        return [_jsonable(each) for each in value.tolist()]
    if isinstance(value, list | tuple):
        return [_jsonable(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
