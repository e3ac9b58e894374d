"""Which session probes this thread, and in which time step of which loop it is. Replicas are threads: each
has its own.
"""

import contextlib
import threading
from typing import Any, NamedTuple

_LOCAL = threading.local()


class Frame(NamedTuple):
    """A time step that is being computed."""

    record: Any  # `LoopRecord`, or None if the loop is not probed
    time: Any  # the loop's own index
    ports: Any  # {key: zeros} of this time step
    discovering: bool  # a trial run whose result is thrown away


def session():
    """The active `ProbeSession`, or None."""
    return getattr(_LOCAL, "session", None)


def frame():
    """The innermost `Frame`, or None."""
    frames = getattr(_LOCAL, "frames", None)
    return frames[-1] if frames else None


@contextlib.contextmanager
def activated(new_session):
    if session() is not None:
        raise RuntimeError("A `ProbeSession` is active already. Leave it before entering another.")
    _LOCAL.session = new_session
    try:
        yield
    finally:
        _LOCAL.session = None


@contextlib.contextmanager
def time_step(record, time, ports):
    """Lets `probe` know that it is called in a time step of one of our loops."""
    with _pushed(Frame(record, time, ports, False)):
        yield


@contextlib.contextmanager
def discovering(record, time):
    """A trial run of a time step: `probe` only tells the record what it would report."""
    with _pushed(Frame(record, time, None, True)):
        yield


def is_discovering():
    return any(item.discovering for item in getattr(_LOCAL, "frames", None) or ())


@contextlib.contextmanager
def _pushed(new_frame):
    if not hasattr(_LOCAL, "frames"):
        _LOCAL.frames = []
    _LOCAL.frames.append(new_frame)
    try:
        yield
    finally:
        _LOCAL.frames.pop()
