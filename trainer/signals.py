"""SIGTERM and Ctrl-C: the present call ends, a checkpoint is written, and the process exits.

A signal only sets a flag; the host loop looks at it between two calls of the traced function. The second Ctrl-C ends
the process at once, also in the middle of a save: a checkpoint is there entirely or not at all.
"""

import signal
import sys
import threading

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}  # 128 + the signal, as a shell reports it


class Stopped(Exception):
    """A signal came while something long was under way that can be begun again. Internal."""


class Terminated(SystemExit):
    """SIGTERM came, and everything is saved: ends the process with exit code 143 unless somebody catches it."""


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

    def __exit__(self, *_):
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


def leave(received):
    """Ends the process as the signal would have, by an exception: `finally` blocks and exit handlers run."""
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(EXIT_CODES[received])
