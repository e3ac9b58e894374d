"""What the updates amount to between two looks of the host: one vector of sums, added to once per update.

One packed variable costs a microsecond per update; a Keras `Mean` metric per loss costs ten per cent of a small one.
"""

import numpy as np
import tensorflow as tf


class Entry:
    """One update's numbers of one minimizer, as recorded while tracing."""

    def __init__(self, minimizer, names, logged):
        self.minimizer = minimizer
        self.names = list(names)
        self.logged = list(logged)
        self.length = 2 * len(self.names) + len(self.logged) + 3


class Window:
    """Sums over some updates, and the means they stand for. On the host, in float64."""

    def __init__(self, entries, values):
        self._entries = entries
        self.values = np.array(values, np.float64)

    @property
    def updates(self):
        return int(self.values[0])

    @property
    def examples(self):
        return float(self.values[1 + self._entries[0].length - 3]) if self._entries else 0.0

    def add(self, other):
        self.values = self.values + other.values

    def clear(self):
        self.values = np.zeros_like(self.values)

    def parts(self):
        """[(minimizer, {"loss": {name: mean}, "logged": {name: mean}, "total": mean, "norm": mean})], absent ones left out."""
        if not self.updates:
            return []
        parts, start = [], 1
        for entry in self._entries:
            row = self.values[start : start + entry.length]
            start += entry.length
            count = len(entry.names)
            sums, divisors = row[:count], row[count : 2 * count]
            logged = row[2 * count : 2 * count + len(entry.logged)]
            examples, total, norm = row[-3:]
            parts.append(
                (
                    entry.minimizer,
                    {
                        "loss": {n: s / d for n, s, d in zip(entry.names, sums, divisors, strict=True) if d > 0},
                        "logged": {n: x / examples for n, x in zip(entry.logged, logged, strict=True)},
                        "total": total / examples,
                        "norm": norm / self.updates,
                    },
                )
            )
        return parts


class Ledger:
    """Collects the rows of one update while it is traced, adds them up on the device, hands them to the host."""

    def __init__(self, make_variable):
        self._make_variable = make_variable
        self._pending = []
        self.entries = None
        self.sums = None

    def begin(self):
        self._pending = []

    def record(self, minimizer, names, logged_names, result, total, norm):
        """Notes one minimizer's part of the present update. `result.sums`, … are over the whole update."""
        row = [result.sums, result.divisors]
        if logged_names:
            row.append(result.logged)
        row.append(tf.stack([result.examples, total * result.examples, norm]))
        self._pending.append((Entry(minimizer, names, logged_names), row))

    def commit(self, extra=None, examples=None):
        """Adds the update's row to the sums. `extra`: further {name: scalar} that `train_step` returned."""
        if extra:
            names = list(extra)
            values = tf.stack([tf.cast(tf.reduce_mean(extra[name]), tf.float32) for name in names])
            tail = tf.stack([examples, tf.zeros([]), tf.zeros([])])
            self._pending.append((Entry(None, [], names), [values * examples, tail]))
        row = tf.concat([tf.ones([1])] + [part for _, parts in self._pending for part in parts], axis=0)
        entries = [entry for entry, _ in self._pending]
        if self.sums is None:
            self.entries = entries
            self.sums = self._make_variable(np.zeros(row.shape, np.float32), "sums")
        elif [(e.names, e.logged) for e in entries] != [(e.names, e.logged) for e in self.entries]:
            raise ValueError(
                f"An update reported {[e.names + e.logged for e in entries]}, an earlier one "
                f"{[e.names + e.logged for e in self.entries]}; the names must not change. "
                "Return and `log` the same names in every call."
            )
        self.sums.assign_add(row)

    def window(self):
        """An empty window."""
        return Window(self.entries, np.zeros(self.sums.shape))

    def take(self):
        """The sums since the last time, as a window; starts from zero again. On the host."""
        window = Window(self.entries, self.sums.numpy())
        self.sums.assign(tf.zeros(self.sums.shape))
        return window
