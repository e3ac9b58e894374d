"""Checkpoints that a kill, a full disk or a damaged file does not turn into a silent restart.

A checkpoint is a directory `step-…` with TensorFlow's own files and a `manifest.json` that lists their sizes and
checksums. It is written under another name, flushed to the disk, and renamed: it is there entirely or not at all.
"""

import json
import os
import shutil
import warnings
import zlib

import numpy as np
import tensorflow as tf

_PREFIX, _TEMPORARY, _DAMAGED, _MANIFEST = "step-", ".writing-", "damaged-", "manifest.json"
_ARRAYS = "arrays.npz"


class Store:
    """The checkpoints of one work directory.

    Args:
        directory: where they are kept; made when the first one is saved.
        keep: how many of the newest to keep.
    """

    def __init__(self, directory, keep=3):
        self.directory = directory
        self._keep = keep
        self._warned = False

    def save(self, step, state, host, arrays=None):
        """Writes a checkpoint. A full disk warns once and returns False; older checkpoints stay.

        Args:
            step: the number of updates made.
            state: {name: tf.Variable or another trackable}.
            host: what JSON can hold, given back by `restore`.
            arrays: {name: array} of the host, given back by `arrays`.
        """
        final = os.path.join(self.directory, f"{_PREFIX}{step:010d}")
        temporary = os.path.join(self.directory, f"{_TEMPORARY}{step:010d}-{os.getpid()}")
        try:
            os.makedirs(temporary, exist_ok=True)
            tf.train.Checkpoint(**state).write(os.path.join(temporary, "state"))
            if arrays:
                np.savez(os.path.join(temporary, _ARRAYS), **arrays)
            files = {name: _fingerprint(os.path.join(temporary, name)) for name in sorted(os.listdir(temporary))}
            manifest = {"step": step, "files": files, "contents": describe(state), "host": host}
            with open(os.path.join(temporary, _MANIFEST), "w") as file:
                json.dump(manifest, file)
            for name in os.listdir(temporary):
                _flush(os.path.join(temporary, name))
            _flush(temporary)
            if os.path.exists(final):
                shutil.rmtree(final)
            os.rename(temporary, final)
            _flush(self.directory)
        except (tf.errors.OpError, OSError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not self._warned:
                warnings.warn(
                    f"The checkpoint of step {step} could not be written to {self.directory}: {error}. Training goes "
                    "on, older checkpoints are intact; free some space.",
                    stacklevel=2,
                )
            self._warned = True
            return False
        for old in self.names()[: -self._keep]:
            shutil.rmtree(os.path.join(self.directory, old), ignore_errors=True)
        return True

    def names(self):
        """Names of the checkpoints, oldest first."""
        if not os.path.isdir(self.directory):
            return []
        return sorted(name for name in os.listdir(self.directory) if name.startswith(_PREFIX))

    def newest(self):
        """(path, manifest) of the newest good checkpoint, or None if there never was one.

        Damaged ones are moved aside and named; if nothing but damaged ones is left, that is an error.
        """
        self._clean()
        names, damaged = self.names(), []
        for name in reversed(names):
            path = os.path.join(self.directory, name)
            problem = verify(path)
            if problem is None:
                with open(os.path.join(path, _MANIFEST)) as file:
                    return path, json.load(file)
            aside = os.path.join(self.directory, _DAMAGED + name)
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)
            damaged.append(name)
            warnings.warn(f"Checkpoint {name} is damaged ({problem}); it was moved to {aside}.", stacklevel=2)
        if damaged:
            raise RuntimeError(
                f"Every checkpoint in {self.directory} is damaged: {damaged}. Training does not begin anew by itself. "
                "Restore a copy, or use another workdir to start from scratch."
            )
        return None

    def restore(self, state):
        """Restores the newest good checkpoint into `state`. Returns (step, host), or None without checkpoints."""
        found = self.newest()
        if found is None:
            return None
        path, manifest = found
        _compare(manifest["contents"], describe(state), path)
        tf.train.Checkpoint(**state).read(os.path.join(path, "state")).assert_consumed()
        return manifest["step"], manifest["host"]

    def arrays(self):
        """{name: array} saved with the newest checkpoint."""
        found = self.newest()
        path = None if found is None else os.path.join(found[0], _ARRAYS)
        if path is None or not os.path.exists(path):
            return {}
        with np.load(path) as file:
            return dict(file)

    def _clean(self):
        if not os.path.isdir(self.directory):
            return
        for name in os.listdir(self.directory):
            if name.startswith(_TEMPORARY):
                shutil.rmtree(os.path.join(self.directory, name), ignore_errors=True)


def describe(state):
    """{name: [shape, dtype]} of the variables in a state; other trackables by their type."""
    contents = {}
    for name, item in state.items():
        if isinstance(item, tf.Variable):
            contents[name] = [list(item.shape), item.dtype.name]
        else:
            contents[name] = type(item).__name__
    return contents


def verify(path):
    """What is wrong with a checkpoint, in words, or None."""
    try:
        with open(os.path.join(path, _MANIFEST)) as file:
            manifest = json.load(file)
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
