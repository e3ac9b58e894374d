"""Running sums that the host reads between calls: one vector, added to once per update.

One packed variable costs a microsecond or two per update; a Keras `Mean` metric per loss costs ten per cent of a
small one.
"""

import numpy as np
import tensorflow as tf

from looptape.trainer.step.reports.packed_row import Entry, pack_logged


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
        """[(minimizer or None, means)] of every minimizer; see `Entry.read`. Its calls in one update are averaged."""
        if not self.updates:
            return []
        rows, start = {}, 2
        for entry in self._entries:
            row = self.values[start : start + entry.length]
            first, total, calls = rows.get(id(entry.minimizer), (entry, np.zeros_like(row), 0))
            rows[id(entry.minimizer)] = first, total + row, calls + 1
            start += entry.length
        return [(entry.minimizer, entry.read(row, self.updates * calls)) for entry, row, calls in rows.values()]


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
        """Adds the update's row to the sums.

        Args:
            extra: further {name: tensor} that `train_step` returned or a hook logged.
            examples: number of examples that they are about; that of the first minimizer if None.
        """
        if extra:
            if examples is None:
                entry, row = self._tracing.rows[0]
                examples = row[entry.examples_at]
            self._tracing.rows.append((Entry(None, [], extra), pack_logged(extra.values(), examples)))
        waited = sum(self._tracing.waits, tf.zeros([]))
        row = tf.concat([tf.stack([1.0, waited])] + [row for _, row in self._tracing.rows], axis=0)
        entries = [entry for entry, _ in self._tracing.rows]
        if self.sums is None:
            self.entries = entries
            # In float64 the sums of float32 numbers are exact, so they do not depend on how many updates a call makes.
            self.sums = self._make_variable(np.zeros(row.shape, np.float64), "sums")
        elif [entry.layout() for entry in entries] != [entry.layout() for entry in self.entries]:
            raise ValueError(
                f"An update reported {[e.names + e.logged for e in entries]}, an earlier one "
                f"{[e.names + e.logged for e in self.entries]}; the names must not change. "
                "Return and `log` the same names in every call."
            )
        self.sums.assign_add(tf.cast(row, tf.float64))

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
            self.sums.assign(tf.zeros(self.sums.shape, self.sums.dtype))
        return values

    def receive(self, values):
        """Takes what a call returned to the host."""
        values = values.numpy().astype(np.float64)
        self._received = values if self._received is None else self._received + values

    def take(self):
        """Everything received since the last time, as a window."""
        values, self._received = self._received, None
        return self.window() if values is None else Window(self.entries, values)
