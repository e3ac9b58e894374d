"""Checkpoints that a kill, a full disk or a damaged file does not turn into a silent restart.

A checkpoint is a directory `step-…` with TensorFlow's own files and a `manifest.json` that lists their sizes and
checksums. It is written under another name, flushed to the disk, and renamed: it is there entirely or not at all.

`looptape checkpoints <work directory>` prints what is there.
"""

import json
import os
import shutil
import warnings
import zlib

import numpy as np
import tensorflow as tf

from looptape.trainer.checkpoints.contents import snapshot
from looptape.trainer.data.literal_path import literal

PREFIX, TEMPORARY, REPLACED, DAMAGED = "step-", ".writing-", ".replaced-", "damaged-"
MANIFEST, ARRAYS = "manifest.json", "arrays.npz"
# Of what a checkpoint holds. 1 (not written down then): by position, as `model_0000`. 2: by the variables' paths.
FORMAT = 2
OUTSIDE = "outside/"  # begins the names of variables that are not part of the model or of the trainer's own state


class Store:
    """The checkpoints of one work directory.

    Args:
        directory: where they are kept; made when the first one is saved.
        keep: how many of the newest to keep, beside the one with the lowest score.
    """

    def __init__(self, directory, keep=3):
        self.directory = directory
        self._keep = keep
        self._warned = False
        self.run = None  # the name of the run that writes here

    def save(self, step, state, host, arrays=None, *, score=None, urgent=False):
        """Writes a checkpoint. A full disk warns once and returns False; older checkpoints stay.

        Args:
            step: the number of updates made.
            state: {name: tf.Variable or another trackable}.
            host: what JSON can hold; part of the manifest.
            arrays: {name: array} of the host, given back by `load`.
            score: how good it is, smaller is better; the best one is kept beside the newest. None if not known.
            urgent: warn even if the last failure was already reported: there will be no further attempt.
        """
        taken = snapshot.take(step, state, describe(state), host, arrays, score)
        return self.report(step, self.write(taken), urgent=urgent)

    def write(self, taken):
        """Writes a checkpoint from a `Snapshot`, in any thread. Returns None, or the error of a disk that failed."""
        final, step = self.path(taken.step), taken.step
        replaced = os.path.join(self.directory, f"{REPLACED}{PREFIX}{step:010d}")
        temporary = os.path.join(self.directory, f"{TEMPORARY}{step:010d}-{os.getpid()}")
        try:
            os.makedirs(temporary, exist_ok=True)
            tf.train.Checkpoint(**taken.tensors).write(prefix(temporary))
            if taken.arrays:
                np.savez(os.path.join(temporary, ARRAYS), **taken.arrays)
            files = {name: _fingerprint(os.path.join(temporary, name)) for name in sorted(os.listdir(temporary))}
            manifest = {"format": FORMAT, "step": step, "files": files, "score": taken.score, "run": self.run}
            manifest |= {"contents": taken.contents, "host": taken.host}
            with open(os.path.join(temporary, MANIFEST), "w") as file:
                json.dump({**manifest, "checksum": _checksum(manifest)}, file)
            for name in os.listdir(temporary):
                _flush(os.path.join(temporary, name))
            _flush(temporary)
            if os.path.exists(final):
                os.rename(final, replaced)  # put back by `_clean` if the process dies before the next line
            os.rename(temporary, final)
            _flush(self.directory)
            shutil.rmtree(replaced, ignore_errors=True)
        except (tf.errors.OpError, OSError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            return error
        self._prune()
        return None

    def report(self, step, error, *, urgent=False):
        """Warns of an error that `write` returned, unless the last write failed, too. Returns whether there is none."""
        if error is not None and (urgent or not self._warned):
            rest = "Older" if urgent else "Training continues, older"
            warnings.warn(
                f"The checkpoint of step {step} could not be written to {self.directory}: {error}. {rest} "
                "checkpoints are intact; free some space.",
                stacklevel=2,
            )
        self._warned = error is not None
        return error is None

    def path(self, step):
        """The directory of a step's checkpoint."""
        return os.path.join(self.directory, f"{PREFIX}{step:010d}")

    def _prune(self):
        best = self.best()
        for old in self.names()[: -self._keep]:
            if old != best:
                shutil.rmtree(os.path.join(self.directory, old), ignore_errors=True)

    def best(self):
        """Name of the checkpoint with the lowest score, the newest of several; None if none has a score.

        Scores by another result than that of the newest one are left out: they cannot be compared.
        """
        scores, latest = {}, None
        for name in reversed(self.names()):
            try:
                manifest = read_manifest(os.path.join(self.directory, name))
                score, by = manifest.get("score"), manifest["host"].get("loop", {}).get("best_by")
            except (OSError, ValueError, KeyError, AttributeError):
                continue  # damaged: found and named when a run is started again
            if score is not None and score == score and (not scores or by == latest):  # NaN is not a score
                scores[name], latest = score, by
        return min(scores, key=scores.get) if scores else None

    def names(self, prefix=PREFIX):
        """Names of the checkpoints, oldest first."""
        if not os.path.isdir(self.directory):
            return []
        return sorted(name for name in os.listdir(self.directory) if name.startswith(prefix))

    def newest(self, suits=None):
        """(path, manifest) of the newest good checkpoint, or None if there never was one.

        Damaged ones are moved aside and named; if nothing but damaged ones is left, that is an error. `suits(manifest)`
        may say which ones are looked for; None if no good one suits.
        """
        self._clean()
        for name in reversed(self.names()):
            path = os.path.join(self.directory, name)
            problem = verify(path)
            if problem is None:
                manifest = read_manifest(path)
                if suits is None or suits(manifest):
                    return path, manifest
                continue
            aside = os.path.join(self.directory, DAMAGED + name)
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)
            warnings.warn(f"Checkpoint {name} is damaged ({problem}); it was moved to {aside}.", stacklevel=2)
        damaged = self.names(DAMAGED + PREFIX)
        if damaged and not self.names():
            raise RuntimeError(
                f"Every checkpoint in {self.directory} is damaged: {damaged}. Training does not start over by itself. "
                "Restore a copy, or use another workdir to start from scratch."
            )
        return None

    def _clean(self):
        """Removes what a process that was killed while saving left behind."""
        for name in os.listdir(self.directory) if os.path.isdir(self.directory) else ():
            path = os.path.join(self.directory, name)
            original = os.path.join(self.directory, name.removeprefix(REPLACED))
            if name.startswith(REPLACED) and not os.path.exists(original):
                os.rename(path, original)
            elif name.startswith((TEMPORARY, REPLACED)):
                shutil.rmtree(path, ignore_errors=True)


def load(path, state):
    """Reads a good checkpoint into `state`. Returns {name: array} that was saved with it."""
    manifest = read_manifest(path)
    if format_of(manifest) == 1:
        state = by_position(manifest["contents"], state, path)
    _compare(manifest["contents"], describe(state), path)
    with literal(prefix(path)) as readable:
        tf.train.Checkpoint(**state).read(readable).assert_consumed()
    arrays = os.path.join(path, ARRAYS)
    if not os.path.exists(arrays):
        return {}
    with np.load(arrays) as file:
        return dict(file)


def values(path):
    """{name: array} of all variables in a checkpoint, without the trainer that wrote it."""
    with literal(prefix(path)) as readable:
        reader = tf.train.load_checkpoint(readable)
        names = [name for name in read_manifest(path)["contents"] if name != "iterator"]
        # TensorFlow's own way of writing these names.
        keys = [name.replace(".", "..").replace("/", ".S") + "/.ATTRIBUTES/VARIABLE_VALUE" for name in names]
        return {name: reader.get_tensor(key) for name, key in zip(names, keys, strict=True)}


def prefix(path):
    """TensorFlow's name for the checkpoint in this directory."""
    return os.path.join(path, "state")


def read_manifest(path):
    with open(os.path.join(path, MANIFEST)) as file:
        return json.load(file)


def describe(state):
    """{name: [shape, dtype]} of the variables in a state; other trackables by their type."""
    contents = {}
    for name, item in state.items():
        if isinstance(item, tf.Variable):
            contents[name] = [list(item.shape), item.dtype.name]
        else:
            contents[name] = type(item).__name__
    return contents


def format_of(manifest):
    """The format of a checkpoint, if it is one that this version reads."""
    number = manifest.get("format", 1)
    if number > FORMAT:
        raise ValueError(
            f"The checkpoint of step {manifest['step']} has format {number}; this version of Looptape reads formats up "
            f"to {FORMAT}. Install the version that wrote it, or use another workdir."
        )
    return number


def by_position(contents, state, path):
    """A state with the names that format 1 has for it: its variables were numbered in the order of this state."""
    old = [name for name in contents if name != "iterator"]
    missing = [name for name in state if name.startswith(OUTSIDE)]  # not saved then
    new = [item for name, item in state.items() if name != "iterator" and name not in missing]
    if len(old) != len(new):
        raise ValueError(
            f"The checkpoint {path} was written by an earlier version of Looptape, which numbered the variables, and "
            f"has {len(old)} of them; this trainer has {len(new)}: {list(describe(state))}. Use the model, optimizer "
            "and options it was made with, the earlier version, or another workdir and `warm_start` for the weights."
        )
    kept = f" It does not have {missing}, which keep the values they have now." if missing else ""
    warnings.warn(
        f"The checkpoint {path} was written by an earlier version of Looptape, which numbered the variables. They are "
        f"read by their order: make sure that no layer was moved since.{kept} The next checkpoint has their names.",
        stacklevel=2,
    )
    renamed = dict(zip(old, new, strict=True))
    return renamed | ({"iterator": state["iterator"]} if "iterator" in state else {})


def verify(path):
    """Describes what is wrong with a checkpoint; None if nothing is."""
    try:
        manifest = read_manifest(path)
        if manifest.pop("checksum") != _checksum(manifest):
            return f"{MANIFEST} does not have the checksum it was written with"
        for name, expected in manifest["files"].items():
            found = _fingerprint(os.path.join(path, name))
            if found != expected:
                return f"{name} has size and checksum {found} instead of {expected}"
        manifest["step"], manifest["host"], manifest["contents"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _compare(saved, present, path):
    missing = [name for name in present if name not in saved]
    unknown = [name for name in saved if name not in present]
    changed = [
        f"{name}: {saved[name]} → {present[name]}"
        for name in present
        if saved.get(name, present[name]) != present[name]
    ]
    if missing or unknown or changed:
        raise ValueError(
            f"The checkpoint {path} does not fit this trainer. Not in the checkpoint: {missing}; only in the "
            f"checkpoint: {unknown}; different: {changed}. Use the model, optimizer and options it was made with, or "
            "another workdir."
        )


def _checksum(manifest):
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _fingerprint(path):
    checksum, size = 0, 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
    return [size, checksum]


def _flush(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
