"""Lines at the bottom of a terminal that are rewritten in place."""

import shutil
import time

_INTERVAL_SECONDS = 0.5


class LiveLines:
    """Shows lines below the printed output and removes them again. Does nothing without a terminal.

    Args:
        stream: stream to write to.
    """

    def __init__(self, stream):
        self._stream = stream
        self._terminal = stream.isatty()
        self._count = 0
        self._last = float("-inf")

    def show(self, make_lines):
        """Replaces the shown lines by those of `make_lines()`, at most a few times per second."""
        if not self._terminal or time.monotonic() - self._last < _INTERVAL_SECONDS:
            return
        self._last = time.monotonic()
        width = shutil.get_terminal_size().columns - 1
        self._erase()
        lines = [line[:width] for line in make_lines()]
        self._stream.write("".join(line + "\n" for line in lines))
        self._stream.flush()
        self._count = len(lines)

    def clear(self):
        """Removes the lines, so that other output can follow."""
        if self._terminal:
            self._erase()
            self._stream.flush()
            self._last = float("-inf")

    def _erase(self):
        if self._count:
            # Up so many lines, then erase to the end of the screen.
            self._stream.write(f"\x1b[{self._count}A\x1b[J")
            self._count = 0
