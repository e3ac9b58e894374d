"""Paths that TensorFlow reads as patterns."""

import contextlib
import os
import tempfile

_SPECIAL = set("*?[") | ({"\\"} if os.sep == "/" else set())


@contextlib.contextmanager
def literal(prefix):
    """A context that gives another name of a checkpoint's prefix, for reading, without characters of patterns.

    TensorFlow writes `runs/[lr=0.1]/state` under this very name, but looks for files that match it when it reads. The
    other name leads through a temporary link to the directory. An ordinary prefix is given back as it is.
    """
    if not _SPECIAL & set(prefix):
        yield prefix
        return
    directory, name = os.path.split(os.path.abspath(prefix))
    with tempfile.TemporaryDirectory() as temporary:
        link = os.path.join(temporary, "checkpoint")
        os.symlink(directory, link, target_is_directory=True)
        yield os.path.join(link, name)
