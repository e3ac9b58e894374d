"""Progress of a run: a bar on a terminal, one output in a notebook, plain lines elsewhere, a summary at the end."""

import collections
import html
import shutil
import sys
import time

_BAR_INTERVAL_SECONDS = 0.2
_LINE_INTERVAL_SECONDS = 10.0
_BAR_WIDTHS = 6, 24
_RECENT_SECONDS = 30.0  # over which the speed for the ETA is measured
_COMPILING = "compiling …"

# The share of waiting for data from which on a hint is given.
_SLOW_INPUT = 0.3
_INPUT = (
    "the input is the bottleneck. Cache what fits into memory (`dataset.cache()`), map with "
    "`num_parallel_calls=tf.data.AUTOTUNE`, end with `.prefetch(tf.data.AUTOTUNE)`."
)
_IN_PYTHON = (
    "the Python code that makes the batches is the bottleneck, and no option of `tf.data` makes it faster. Make a "
    "whole batch at once (NumPy, several environments side by side), make batches beforehand and pass them as arrays, "
    "or make them inside the update (`compute_losses`)."
)
_MOST_MESSAGES = 50  # lines that stay below the bar in a notebook


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
        self._recent = collections.deque()  # (seconds, step) after each of the latest calls
        if self._terminal:
            self._write_line(self._bar(start, 40) + _COMPILING)

    @property
    def seconds(self):
        return time.monotonic() - self._start

    def due(self, step):
        """Whether it is time to show something, after a call that reached `step`. Reading the loss costs a little."""
        if self._shown:
            self._note(step)
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
            self._write_line((self._bar(step, columns - len(line) - 1) + line)[: columns - 1])
        else:
            self._print(line)

    def _write_line(self, line):
        """Writes a line over the one before."""
        self._stream.write("\r" + line + " " * max(self._width - len(line), 0))
        self._stream.flush()
        self._width = len(line)

    def _note(self, step):
        now = time.monotonic()
        self._recent.append((now, step))
        while len(self._recent) > 2 and now - self._recent[0][0] > _RECENT_SECONDS:
            self._recent.popleft()

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
        self._width = 0
        self.message(self._closing_line(step))

    def _closing_line(self, step):
        done = step - self._start_step
        rate = done / self.seconds if self.seconds > 0 else 0.0
        return f"{done:,} updates in {_duration(self.seconds)} ({rate:,.1f} per second)"

    def evaluated(self, step, results):
        """Says what an evaluation gave; `results` as {name: number}."""
        self.message(f"evaluation at step {step:,}: " + "  ".join(f"{k} {number(v)}" for k, v in results.items()))

    def remark_on_waiting(self, waited, in_python=False):
        """Advises on the input if updates spent a large share of the time waiting for it.

        Args:
            waited: seconds.
            in_python: whether batches come from a generator or an environment in Python.
        """
        share = waited / (self.seconds or 1.0)
        if share > _SLOW_INPUT and self.seconds > 1.0:
            self.message(f"{share:.0%} of the time was spent waiting for data: {_IN_PYTHON if in_python else _INPUT}")

    def remark_on_skips(self, skipped, step):
        """Says how many updates were skipped, if any."""
        if skipped:
            self.message(f"{skipped:,} of {step:,} updates were skipped: a loss or a gradient was not finite.")

    def _bar(self, step, columns):
        """A bar that leaves the numbers their place."""
        least, most = _BAR_WIDTHS
        width = min(most, columns - 4)
        if self._total is None or width < least:
            return ""
        filled = round(width * step / self._total)
        return "[" + "█" * filled + "·" * (width - filled) + "]  "

    def _line(self, step):
        parts = [f"step {step:,}" if self._total is None else f"step {step:,}/{self._total:,}"]
        if self._total is not None and step < self._total:
            parts.append(self._eta(step))
        parts += [f"{name} {number(value)}" for name, value in self._values.items()]
        return "  ".join(parts)

    def _eta(self, step):
        """From the speed since the oldest recent call: the first one includes tracing and compiling."""
        (began, first), (ended, last) = (self._recent[0], self._recent[-1]) if self._recent else ((0, 0), (0, 0))
        if last == first:
            return _COMPILING
        return f"ETA {_duration((ended - began) / (last - first) * (self._total - step))}"


def number(value):
    """A value as it is shown; words stay as they are."""
    if isinstance(value, str):
        return value
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


def in_notebook():
    """Whether this process is a Jupyter kernel, whose cells show HTML. Imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class NotebookProgress(Progress):
    """Shows how far a run is in the output of a cell. Arguments as for `Progress`."""

    def __init__(self, total, start, shown=True):
        self._messages, self._bar_line, self._table = [], "", ""
        self._step, self._display, self._evaluated = start, None, {}
        super().__init__(total, start, shown)
        self._terminal = shown  # often, and over what was there

    def __repr__(self):
        """For programs that show no HTML."""
        return "\n".join([self._bar_line, *self._messages])

    def _repr_html_(self):
        attributes = "" if self._total is None else f' value="{self._step}" max="{self._total}"'
        messages = "".join(f"<div>{html.escape(line)}</div>" for line in self._messages)
        bar = "" if self._table else f"<progress{attributes}></progress> "
        return f"<div>{bar}{html.escape(self._bar_line)}</div>{messages}{self._table}"

    def update(self, step, values):
        self._step = step
        super().update(step, values)

    def message(self, text):
        if self._shown:
            self._messages = [*self._messages, text][-_MOST_MESSAGES:]
            self._show()

    def evaluated(self, step, results):
        self._evaluated = results
        super().evaluated(step, results)

    def close(self, step, values):
        if not self._shown:
            return
        self.update(step, values)
        self._table = _table(values, self._evaluated)
        self.message(self._closing_line(step))

    def _bar(self, step, columns):
        return ""

    def _write_line(self, line):
        self._bar_line = line
        self._show()

    def _show(self):
        if self._display is None:
            from IPython.display import display  # there is one: see `in_notebook`

            self._display = display(self, display_id=True)
        else:
            self._display.update(self)


def _table(training, evaluation):
    """An HTML table of the last values, a row for each name."""
    names = [*training, *(name for name in evaluation if name not in training)]
    heads = ["", "training", *(["evaluation"] if evaluation else [])]
    rows = ["".join(f"<th>{head}</th>" for head in heads)]
    for name in names:
        cells = [training.get(name), *([evaluation.get(name)] if evaluation else [])]
        shown = "".join(f"<td>{'' if cell is None else html.escape(number(cell))}</td>" for cell in cells)
        rows.append(f"<th>{html.escape(name)}</th>{shown}")
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
