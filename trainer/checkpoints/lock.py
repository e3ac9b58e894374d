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
_held: dict = {}  # {real path: (identity of the thread that holds it, the locked file)}


@contextlib.contextmanager
def hold(workdir):
    """A context in which this process alone uses the directory; a thread may nest it.

    The operating system keeps the lock and drops it when the process ends, however it ends: the file that is left
    behind means nothing. Forked children, such as workers of a data loader, have no part in it.
    """
    path = os.path.realpath(workdir)
    thread = threading.get_ident()
    if path in _held and _held[path][0] == thread:
        yield
        return
    with _opened(path) as file:
        _lock(file, path)
        _held[path] = thread, file
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


def _leave_to_the_parent():
    """Closes a forked child's copies of the locked files: they would keep the locks after the parent's death."""
    for _, file in _held.values():
        with contextlib.suppress(OSError):
            file.close()  # without unlocking: the parent's lock stays
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


def _opened(path):
    try:
        return open(os.path.join(path, FILE), "a+")
    except OSError as error:
        raise ValueError(
            f"`workdir` {path!r} cannot be used: {error.strerror}. Free some space there, or choose a directory that "
            "this user may write to."
        ) from error


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
