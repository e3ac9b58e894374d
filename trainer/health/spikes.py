"""Spikes: updates whose loss or gradient norm is finite but far above its recent median.

An update is a spike if a value exceeds median + threshold · max(1.4826 · MAD, |median| / 10) of the last updates that
were applied; 1.4826 · MAD, the median of the absolute deviations, is the standard deviation of normal noise. Both are
robust: spikes that were let through do not hide the next one.
"""

import dataclasses

import numpy as np
import tensorflow as tf

POLICIES = ("ignore", "record", "skip", "raise", "restore")
LEAST = 10  # updates before anything is called a spike
QUANTITIES = ("loss", "gradient norm")
_NORMAL, _FLOOR = 1.4826, 0.1


def limits(window, filled, threshold):
    """[2, 2]: (median, limit) of each row of a window [2, size] of which `filled` columns are used. Traced."""
    used = tf.range(tf.shape(window)[1]) < filled
    middle = tf.maximum(filled - 1, 0) // 2
    medians = tf.sort(tf.where(used, window, float("inf")), axis=1)[:, middle]
    deviations = tf.where(used, tf.abs(window - medians[:, tf.newaxis]), float("inf"))
    spread = _NORMAL * tf.sort(deviations, axis=1)[:, middle]
    return tf.stack([medians, medians + threshold * tf.maximum(spread, _FLOOR * tf.abs(medians))], axis=1)


class SpikeGuard:
    """Watches the losses and gradient norms of one minimizer.

    Args:
        make_variable: `(value, name) -> tf.Variable` of the trainer.
        window: how many updates the median is taken of.
        threshold: see above.
    """

    def __init__(self, make_variable, window, threshold):
        self._threshold = threshold
        self._window = make_variable(np.zeros([2, window], np.float32), "spike_window")
        self._count = make_variable(np.int32(0), "spike_count")
        self._found = make_variable(np.zeros([4], np.float32), "spike")  # which quantity + 1, value, median, limit
        self._open = make_variable(False, "spike_passes")  # the next one is let through

    @classmethod
    def of(cls, owner):
        """A guard as a trainer wants it, or None if it ignores spikes."""
        if owner.on_spike == "ignore":
            return None
        check(owner.on_spike, owner.spike_threshold, owner.spike_window)
        return cls(owner.make_variable, owner.spike_window, owner.spike_threshold)

    @property
    def variables(self):
        """The state for a checkpoint."""
        return [self._window, self._count]

    def guard(self, number, loss, norm):
        """`number`, or NaN if this update is a spike. Traced or eager; nothing is remembered yet."""
        filled = tf.minimum(self._count, self._window.shape[1])
        values = tf.stack([tf.cast(loss, tf.float32), tf.cast(norm, tf.float32)])
        bounds = limits(tf.convert_to_tensor(self._window), filled, self._threshold)
        above = (values > bounds[:, 1]) & tf.math.is_finite(values) & (filled >= LEAST) & ~self._open.read_value()
        which = tf.where(above[0], 0, 1)
        found = tf.concat([[tf.cast(which + 1, tf.float32), values[which]], bounds[which]], axis=0)
        spiked = tf.reduce_any(above)
        with tf.control_dependencies([self._found.assign(tf.where(spiked, found, self._found))]):
            return tf.where(spiked, tf.constant(float("nan"), number.dtype), number)

    def remember(self, loss, norm):
        """Takes an update that is applied into the window."""
        place = self._count % self._window.shape[1]
        column = tf.one_hot(place, self._window.shape[1])
        values = tf.stack([tf.cast(loss, tf.float32), tf.cast(norm, tf.float32)])[:, tf.newaxis]
        self._window.assign(tf.where(column > 0, values, self._window))
        self._count.assign_add(1)

    def take(self):
        """(quantity, value, median, limit) if an update was a spike since the last time, else None. On the host."""
        which, value, median, limit = self._found.numpy().tolist()
        self._found.assign(tf.zeros([4]))
        return (QUANTITIES[int(which) - 1], value, median, limit) if which else None

    def let_pass(self, open_):
        self._open.assign(open_)


@dataclasses.dataclass(frozen=True)
class Spike:
    """One spike, as it was recorded."""

    step: int  # updates made before it
    position: int  # of its last batch in this pass over the data
    quantity: str
    value: float
    median: float
    action: str
    details: str  # examples, layers and time steps that carried it, in lines

    @property
    def text(self):
        times = f", {self.value / self.median:,.1f} times its recent median" if self.median > 0 else ""
        done = {"record": "let through", "skip": "skipped", "restore": "rolled back", "raise": "the run ends"}
        head = (
            f"Spike after step {self.step:,} (batch {self.position:,}): the {self.quantity} was {self.value:.4g}{times}"
        )
        return f"{head}; {done[self.action]}.\n{self.details}".rstrip()


def in_a_row(spikes):
    """How many of the latest spikes were skipped one update after the other."""
    count = 0
    for later, earlier in zip(spikes[::-1], [*spikes[-2::-1], None], strict=True):
        if later.action != "skip":
            break
        count += 1
        if earlier is None or earlier.step != later.step - 1:
            break
    return count


class SpikedUpdate(Exception):
    """An update was a spike and was not applied. Internal: the host decides what becomes of it.

    Args:
        step: updates made before it.
        found: what `SpikeGuard.take` gave.
        minimizer: whose update it was.
        parts: its micro-batches, or None if they were not kept.
        reports: what `run_observed` would have returned, or None.
    """

    def __init__(self, step, found, minimizer, parts=None, reports=None):
        super().__init__(f"a spike after step {step}: {found}")
        self.step, self.found, self.minimizer, self.parts, self.reports = step, found, minimizer, parts, reports


def check(policy, threshold, window):
    """Checks the three attributes of a trainer."""
    if policy not in POLICIES:
        raise ValueError(f"`on_spike` is {policy!r}; it must be one of {', '.join(POLICIES)}.")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not threshold > 0:
        raise ValueError(f"`spike_threshold` is {threshold!r}; it must be a positive number. Use e.g. 10.")
    if isinstance(window, bool) or not isinstance(window, int) or window < LEAST:
        raise ValueError(f"`spike_window` is {window!r}; it must be an integer of at least {LEAST}. Use e.g. 100.")
