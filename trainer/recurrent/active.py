"""Tracks what runs and what probes the recurrent layers of this thread, and the time step of the current loop.

Replicas are threads: each has its own.
"""

import contextlib
import threading
from typing import Any, NamedTuple

_LOCAL = threading.local()


class Frame(NamedTuple):
    """A time step that is being computed."""

    record: Any  # `LoopRecord`, or None if the loop is not probed
    time: Any  # the loop's own index
    marks: Any  # {key: tensor} of this time step whose gradients are reported
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


def runners():
    """Who may run a recurrent layer, the latest first; see `trainer.recurrent.layers.run_by`."""
    return list(reversed(getattr(_LOCAL, "runners", ())))


@contextlib.contextmanager
def runner(new_runner):
    """Asks `new_runner` first, from now on."""
    if not hasattr(_LOCAL, "runners"):
        _LOCAL.runners = []
    _LOCAL.runners.append(new_runner)
    try:
        yield
    finally:
        _LOCAL.runners.remove(new_runner)


@contextlib.contextmanager
def ran_by(kept):
    """Asks the runners that `runners` gave, and no other, while time steps that they saw are computed again."""
    present, _LOCAL.runners = getattr(_LOCAL, "runners", []), list(reversed(kept))
    try:
        yield
    finally:
        _LOCAL.runners = present


def action(name):
    """The action on the gradient of a loop of this name, according to the innermost runner that knows it; or None."""
    found = (runner.action(name) for runner in runners() if hasattr(runner, "action"))
    return None if name is None else next(found, None)


def moment_of():
    """`(name, t) -> Moment` of the trainer that trains here, see `Steering.moments`; or None."""
    found = (getattr(runner, "moment_of", None) for runner in runners())
    return next((function for function in found if function is not None), None)


def keeper():
    """Who keeps the states of recurrent layers between updates: a `carrying.Carrying`, or None."""
    return getattr(_LOCAL, "keeper", None)


def carries(layer):
    """Whether a layer begins with states that it ended with before."""
    return layer.stateful if keeper() is None else keeper().carries(layer)


@contextlib.contextmanager
def keeping(new_keeper):
    present, _LOCAL.keeper = keeper(), new_keeper
    try:
        yield
    finally:
        _LOCAL.keeper = present


def in_time_step():
    """Whether a time step of one of our loops is being computed."""
    return bool(getattr(_LOCAL, "frames", None))


@contextlib.contextmanager
def time_step(record, time, marks):
    """Lets `probe` know that it is called in a time step of one of our loops."""
    with _pushed(Frame(record, time, marks, False)):
        yield


@contextlib.contextmanager
def discovering(record, time):
    """A trial run of a time step: `probe` only tells the record what it would report."""
    with _pushed(Frame(record, time, None, True)):
        yield


def is_discovering():
    return any(item.discovering for item in getattr(_LOCAL, "frames", None) or ())


@contextlib.contextmanager
def reactivated(old_session):
    """Lets `probe` find a session that was left, while its time steps are computed again."""
    present, _LOCAL.session = session(), old_session
    try:
        yield
    finally:
        _LOCAL.session = present


@contextlib.contextmanager
def _pushed(new_frame):
    if not hasattr(_LOCAL, "frames"):
        _LOCAL.frames = []
    _LOCAL.frames.append(new_frame)
    try:
        yield
    finally:
        _LOCAL.frames.pop()
