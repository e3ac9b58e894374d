"""SIGTERM and Ctrl-C: the present call ends, a checkpoint is written, and the process exits.

A signal only sets a flag; the host loop looks at it between two calls of the traced function. The second Ctrl-C ends
the process at once, also in the middle of a save: a checkpoint is there entirely or not at all.
"""

import atexit
import functools
import gc
import signal
import sys
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}  # 128 + the signal, as a shell reports it

_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")


class Stopped(Exception):
    """A signal came while something long was under way that can be begun again. Internal."""


class Terminated(SystemExit):
    """Raised after SIGTERM, when everything is saved: ends the process with exit code 143 unless it is caught."""


class Watch:
    """A context in which SIGTERM and Ctrl-C are noted in `received` instead of ending the process.

    Only Python's and the system's own reactions are replaced. A handler that a user installed stays in force, an
    ignored signal (`nohup`) stays ignored, and outside the main thread, where Python allows no handlers, nothing
    changes.

    Args:
        active: False for a context that does nothing.
    """

    def __init__(self, active=True):
        self.received = None
        self._active = active
        self._kept = {}

    def __enter__(self):
        if self._active and threading.current_thread() is threading.main_thread():
            for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
                if signal.getsignal(number) == usual:
                    self._kept[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind, error, _):
        if kind is KeyboardInterrupt:  # without a work directory; with one, the interrupt is noted
            without_traceback(error, "Interrupted. Pass `workdir` to `fit` to keep checkpoints and resume.")
        for number, handler in self._kept.items():
            signal.signal(number, handler)
        self._kept.clear()

    def _note(self, number, _):
        self.received = signal.Signals(number)
        if number == signal.SIGINT:
            # In a notebook the process is not ours to end: there the second one is an exception at the next line.
            interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
            signal.signal(signal.SIGINT, signal.default_int_handler if interactive else signal.SIG_DFL)

    @property
    def number(self):
        """Of the signal that came, or 0."""
        return 0 if self.received is None else int(self.received)

    def note(self, number):
        """Takes over the signal that another process received; 0 for none."""
        if number and self.received is None:
            self.received = signal.Signals(int(number))

    def check(self):
        """Raises `Stopped` if a signal came."""
        if self.received is not None:
            raise Stopped


def without_traceback(interrupt, last_words=""):
    """Marks a `KeyboardInterrupt`: if it is not caught, the process ends without a traceback, and soon. Returns it.

    Programs with an `excepthook` of their own (notebooks, debuggers) keep it.

    Args:
        interrupt: the exception. Its type stays, because Python ends by SIGINT for exactly this type.
        last_words: printed in place of the traceback.
    """
    interrupt.last_words = last_words
    _skip_last_collection()
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _excepthook
    return interrupt


def _excepthook(kind, value, traceback):
    if kind is KeyboardInterrupt and hasattr(value, "last_words"):
        if value.last_words:
            print(f"\n{value.last_words}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, value, traceback)


def interruptible(method: Callable[_Parameters, _Returned]) -> Callable[_Parameters, _Returned]:
    """A method that Ctrl-C ends without a traceback if nobody catches the `KeyboardInterrupt`. Keeps its types."""

    @functools.wraps(method)
    def called(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Returned:
        try:
            return method(*arguments, **options)
        except KeyboardInterrupt as interrupt:
            if not hasattr(interrupt, "last_words"):  # `fit` inside it has marked it
                without_traceback(interrupt, "Interrupted.")
            raise

    return called


def leave(received):
    """Ends the process as the signal would have, by an exception: `finally` blocks and exit handlers run."""
    if received == signal.SIGINT:
        raise without_traceback(KeyboardInterrupt(), "Interrupted.")
    _skip_last_collection()
    raise Terminated(EXIT_CODES[received])


def _skip_last_collection():
    """Spares the process Python's last collection of the cycles among TensorFlow's objects, a second or more.

    A program that catches the exception and continues collects as before until its end.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
