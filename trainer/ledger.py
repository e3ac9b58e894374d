"""What the updates amount to between two looks of the host: one vector of sums, added to once per update.

One packed variable costs a microsecond or two per update; a Keras `Mean` metric per loss costs ten per cent of a
small one.
"""

import numpy as np
import tensorflow as tf


class Entry:
    """The place of one minimizer's numbers in the vector.

    [sums K, divisors K, logged M, examples, total · examples, gradient norm, coefficients K if the combiner has any]
    """

    def __init__(self, minimizer, names, logged, adaptive=False):
        self.minimizer = minimizer
        self.names = list(names)
        self.logged = list(logged)
        self._adaptive = adaptive
        self.length = (3 if adaptive else 2) * len(self.names) + len(self.logged) + 3

    def layout(self):
        return (self.names, self.logged, self._adaptive)

    def read(self, row, updates):
        """Means of a row of sums over some updates: {"loss": {name: value}, "logged", "total", "norm", "coefficient"}.

        Losses without a valid element are left out.
        """
        count, extra = len(self.names), 2 * len(self.names) + len(self.logged)
        sums, divisors, logged = row[:count], row[count : 2 * count], row[2 * count : extra]
        examples, total, norm = row[extra : extra + 3]
        coefficients = row[extra + 3 :] / updates if self._adaptive else np.ones(count)
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "loss": {n: float(s / d) for n, s, d in zip(self.names, sums, divisors, strict=True) if d != 0},
                "logged": {n: float(x / examples) for n, x in zip(self.logged, logged, strict=True)},
                "total": float(total / examples),
                "norm": float(norm / updates),
                "coefficient": dict(zip(self.names, coefficients.tolist(), strict=True)),
            }

    def examples(self, row):
        return float(row[2 * len(self.names) + len(self.logged)])


class Window:
    """Sums over some updates, and the means they stand for. On the host, in float64."""

    def __init__(self, entries, values):
        self._entries = entries
        self.values = np.array(values, np.float64)

    @property
    def updates(self):
        return int(self.values[0])

    @property
    def seconds_waited(self):
        """Seconds in which updates waited for data."""
        return float(self.values[1])

    @property
    def examples(self):
        return self._entries[0].examples(self.values[2:]) if self._entries else 0.0

    def add(self, other):
        self.values = self.values + other.values

    def clear(self):
        self.values = np.zeros_like(self.values)

    def parts(self):
        """[(minimizer or None, means)] of every entry; see `Entry.read`."""
        if not self.updates:
            return []
        parts, start = [], 2
        for entry in self._entries:
            parts.append((entry.minimizer, entry.read(self.values[start : start + entry.length], self.updates)))
            start += entry.length
        return parts


class Ledger:
    """Collects the rows of one update while it is traced, adds them up on the device, hands them to the host."""

    def __init__(self, make_variable, tracing):
        self._make_variable = make_variable
        self._tracing = tracing
        self.entries = None
        self.sums = None
        self._received = None

    def waited(self, seconds):
        """Notes that the present update waited for data."""
        self._tracing.waits.append(seconds)

    def record(self, minimizer, row, logged, adaptive):
        """Notes one minimizer's part of the present update: a vector as `Entry` describes it."""
        self._tracing.rows.append((Entry(minimizer, minimizer.names, logged, adaptive), row))

    def commit(self, extra=None, examples=None):
        """Adds the update's row to the sums. `extra`: further {name: tensor} that `train_step` returned or logged."""
        if extra:
            values = [tf.cast(tf.reduce_mean(value), tf.float32) * examples for value in extra.values()]
            row = tf.stack([*values, examples, tf.zeros([]), tf.zeros([])])
            self._tracing.rows.append((Entry(None, [], extra), row))
        waited = sum(self._tracing.waits, tf.zeros([]))
        row = tf.concat([tf.stack([1.0, waited])] + [row for _, row in self._tracing.rows], axis=0)
        entries = [entry for entry, _ in self._tracing.rows]
        if self.sums is None:
            self.entries = entries
            self.sums = self._make_variable(np.zeros(row.shape, np.float32), "sums")
        elif [entry.layout() for entry in entries] != [entry.layout() for entry in self.entries]:
            raise ValueError(
                f"An update reported {[e.names + e.logged for e in entries]}, an earlier one "
                f"{[e.names + e.logged for e in self.entries]}; the names must not change. "
                "Return and `log` the same names in every call."
            )
        self.sums.assign_add(row)

    def last(self, minimizer):
        """Means of the latest update of a minimizer, also of one that was not finite. On the host."""
        entry = next(entry for entry in self.entries if entry.minimizer is minimizer)
        return entry.read(minimizer.last.numpy().astype(np.float64), 1)

    def window(self):
        """An empty window."""
        return Window(self.entries, np.zeros(self.sums.shape))

    def drain(self):
        """The sums as a tensor, and zero from now on. Traced at the end of a call, or eager after one that failed."""
        values = tf.identity(self.sums)
        with tf.control_dependencies([values]):
            self.sums.assign(tf.zeros(self.sums.shape))
        return values

    def receive(self, values):
        """Takes what a call returned to the host."""
        values = values.numpy().astype(np.float64)
        self._received = values if self._received is None else self._received + values

    def take(self):
        """Everything received since the last time, as a window."""
        values, self._received = self._received, None
        return self.window() if values is None else Window(self.entries, values)
