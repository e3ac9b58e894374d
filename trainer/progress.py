"""What a person sees while training: a bar on a terminal, plain lines elsewhere, a summary at the end."""

import shutil
import sys
import time

_BAR_INTERVAL_SECONDS = 0.2
_LINE_INTERVAL_SECONDS = 10.0
_BAR_WIDTHS = 6, 24


class Progress:
    """Shows how far a run is.

    Args:
        total: the last step, or None if it is not known.
        start: the step at which this run begins.
        shown: False for silence.
        stream: where to, standard error by default.
    """

    def __init__(self, total, start, shown=True, stream=None):
        self._total = total
        self._start_step = start
        self._shown = shown
        self._stream = sys.stderr if stream is None else stream
        self._terminal = shown and self._stream.isatty()
        self._start = self._last = time.monotonic()
        self._width = 0
        self._values = {}
        self._shown_step = None

    @property
    def seconds(self):
        return time.monotonic() - self._start

    def due(self):
        """Whether it is time to show something: reading the loss for it costs a little."""
        interval = _BAR_INTERVAL_SECONDS if self._terminal else _LINE_INTERVAL_SECONDS
        return self._shown and time.monotonic() - self._last >= interval

    def update(self, step, values):
        """Shows a step with values to print, e.g. {"loss": 0.1, "examples/s": 1000.0}."""
        self._values.update(values)
        self._last = time.monotonic()
        if not self._shown:
            return
        self._shown_step = step
        line = self._line(step)
        if self._terminal:
            columns = shutil.get_terminal_size().columns
            line = (self._bar(step, columns - len(line) - 1) + line)[: columns - 1]
            self._stream.write("\r" + line + " " * max(self._width - len(line), 0))
            self._stream.flush()
            self._width = len(line)
        else:
            self._print(line)

    def message(self, text):
        """Says something without tearing the bar."""
        if not self._shown:
            return
        if self._terminal:
            self._stream.write("\r" + " " * self._width + "\r" + text + "\n")
            self._stream.flush()
            self._width = 0
        else:
            self._print(text)

    def _print(self, line):
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self, step, values):
        """Shows the last state, if it is not there yet, and a closing line."""
        if not self._shown:
            return
        if self._shown_step != step:
            self.update(step, values)
        if self._terminal:
            self._stream.write("\n")
            self._stream.flush()
        done = step - self._start_step
        rate = done / self.seconds if self.seconds > 0 else 0.0
        self._width = 0
        self.message(f"{done:,} updates in {_duration(self.seconds)} ({rate:,.1f} per second)")

    def _bar(self, step, columns):
        """A bar that leaves the numbers their place."""
        least, most = _BAR_WIDTHS
        width = min(most, columns - 4)
        if self._total is None or width < least:
            return ""
        filled = round(width * step / self._total)
        return "[" + "█" * filled + "·" * (width - filled) + "]  "

    def _line(self, step):
        done = step - self._start_step
        parts = [f"step {step:,}" if self._total is None else f"step {step:,}/{self._total:,}"]
        if self._total is not None and done > 0 and step < self._total:
            parts.append(f"ETA {_duration(self.seconds / done * (self._total - step))}")
        parts += [f"{name} {_number(value)}" for name, value in self._values.items()]
        return "  ".join(parts)


def _number(value):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _duration(seconds):
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}:{seconds:02d} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d} h"
