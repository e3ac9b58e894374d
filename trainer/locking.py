"""One process per work directory: two would mix their event files and delete each other's checkpoints."""

import contextlib
import errno
import os
import socket
import threading
import warnings

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FILE = "lock"
_held: dict = {}  # {real path: identity of the thread that holds it}


@contextlib.contextmanager
def hold(workdir):
    """A context in which this process alone uses the directory; a thread may nest it.

    The operating system keeps the lock and drops it when the process ends, however it ends: the file that is left
    behind means nothing.
    """
    path = os.path.realpath(workdir)
    thread = threading.get_ident()
    if _held.get(path) == thread:
        yield
        return
    with open(os.path.join(path, FILE), "a+") as file:
        _lock(file, path)
        _held[path] = thread
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        except OSError:
            pass  # a full disk: the words are lost, the lock is not
        try:
            yield
        finally:
            _held.pop(path, None)


def _lock(file, path):
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            warnings.warn(
                f"The file system of {path} has no locks ({error}). Nothing prevents a second process from using this "
                "work directory; take care that none does.",
                stacklevel=4,
            )
            return
        file.seek(0)
        holder = file.read() or "another process"
        raise RuntimeError(
            f"The work directory {path} is in use by {holder}. Two runs in one directory would destroy each other's "
            "checkpoints. Wait for it, end it, or use another `workdir`."
        ) from None
