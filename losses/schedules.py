"""Loss weights that change with the step. A schedule is immutable; `schedule(step)` returns a float32 scalar tensor.

The step is an int or an int64 tensor; nothing retraces when it changes. `final` is the Python float that a
schedule settles at. Sums of losses use it as the weight, so that they stay comparable over time.

    loss_weights={"error": 1.0, "kl": KLWarmup(10_000)}
"""

import dataclasses
import math

import tensorflow as tf

from looptape.losses.convention import require, whole


class Schedule:
    """Base class of schedules: `schedule(step)` returns a float32 scalar. Pure; works in traced code and under XLA."""

    @property
    def final(self) -> float:
        """The value that the schedule settles at."""
        raise NotImplementedError

    def __call__(self, step):
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """A constant weight.

    >>> float(Constant(0.5)(1000))
    0.5
    """

    value: float

    def __post_init__(self):
        finite(self, "value")

    @property
    def final(self):
        return float(self.value)

    def __call__(self, step):
        return tf.constant(self.value, tf.float32)


@dataclasses.dataclass(frozen=True)
class LinearRamp(Schedule):
    """Moves linearly from `start` to `end` over `steps` steps, starting at step `begin`.

    >>> float(LinearRamp(0.0, 2.0, steps=100, begin=50)(75))
    0.5
    """

    start: float
    end: float
    steps: int
    begin: int = 0

    def __post_init__(self):
        finite(self, "start", "end")
        counts(self, steps=1, begin=0)

    @property
    def final(self):
        return float(self.end)

    def __call__(self, step):
        return mix(self.start, self.end, self.shape(progress(step, self.begin, self.steps)))

    def shape(self, fraction):
        """Maps the fraction of steps done to the progress of the weight, both from 0 to 1."""
        return fraction


@dataclasses.dataclass(frozen=True)
class CosineRamp(LinearRamp):
    """Moves from `start` to `end` along half a cosine, flat at both ends. Arguments as for `LinearRamp`.

    >>> round(float(CosineRamp(0.0, 1.0, steps=100)(50)), 5)
    0.5
    """

    def shape(self, fraction):
        return 0.5 - 0.5 * tf.cos(math.pi * fraction)


@dataclasses.dataclass(frozen=True)
class SigmoidRamp(LinearRamp):
    """Moves along a logistic curve, stretched so that it reaches both ends. Arguments as for `LinearRamp`.

    >>> round(float(SigmoidRamp(0.0, 1.0, steps=100)(50)), 5)
    0.5
    """

    steepness: float = 10.0

    def __post_init__(self):
        super().__post_init__()
        finite(self, "steepness")
        require(self.steepness > 0, f"`steepness` is {self.steepness}", "above 0", "The default is 10.")

    def shape(self, fraction):
        # Both by the same function: the quotient is then exactly -1 and 1 at the ends.
        edge = tf.tanh(tf.constant(self.steepness / 4.0, fraction.dtype))
        along = tf.tanh(self.steepness / 2.0 * (fraction - 0.5)) / edge
        return tf.clip_by_value(0.5 + 0.5 * along, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Piecewise(Schedule):
    """Piecewise constant: `values[i]` from step `boundaries[i - 1]` until before step `boundaries[i]`.

    >>> schedule = Piecewise([100, 200], [1.0, 0.5, 0.1])
    >>> [round(float(schedule(step)), 3) for step in (99, 100, 200)]
    [1.0, 0.5, 0.1]
    """

    boundaries: tuple
    values: tuple

    def __post_init__(self):
        advice = "It counts steps (optimizer updates)."
        boundaries = tuple(whole("boundaries", boundary, 0, advice) for boundary in self.boundaries)
        object.__setattr__(self, "boundaries", boundaries)
        object.__setattr__(self, "values", tuple(self.values))
        require(
            len(self.values) == len(self.boundaries) + 1,
            f"There are {len(self.boundaries)} boundaries and {len(self.values)} values",
            "one value more than boundaries",
            "The first value holds before the first boundary.",
        )
        rising = all(a < b for a, b in zip(self.boundaries, self.boundaries[1:], strict=False))
        require(rising, f"`boundaries` is {list(self.boundaries)}", "increasing", "Sort them.")
        require(
            all(math.isfinite(v) for v in self.values),
            f"`values` is {list(self.values)}",
            "finite",
            "Correct them.",
        )

    @property
    def final(self):
        return float(self.values[-1])

    def __call__(self, step):
        passed = tf.cast(as_step(step) >= tf.constant(self.boundaries, tf.int64), tf.int32)
        return tf.gather(tf.constant(self.values, tf.float32), tf.reduce_sum(passed))


@dataclasses.dataclass(frozen=True)
class KLWarmup(Schedule):
    """Stays at 0 for `delay` steps, then rises linearly to `weight` over `steps` steps (Bowman 2016).

    It helps against posterior collapse.

    >>> float(KLWarmup(100)(25)), float(KLWarmup(100)(1000))
    (0.25, 1.0)
    """

    steps: int
    weight: float = 1.0
    delay: int = 0

    def __post_init__(self):
        finite(self, "weight")
        counts(self, steps=1, delay=0)

    @property
    def final(self):
        return float(self.weight)

    def __call__(self, step):
        return mix(0.0, self.weight, progress(step, self.delay, self.steps))


@dataclasses.dataclass(frozen=True)
class CyclicalKL(Schedule):
    """Rises from 0 to `weight` once per `period` (Fu 2019), over the first `ramp` share of it, and then holds.

    After `cycles` cycles it stays at `weight`; with `cycles=None` it repeats forever. `final` is `weight`, the
    maximum.

    >>> schedule = CyclicalKL(100)
    >>> [round(float(schedule(step)), 3) for step in (0, 25, 50, 99, 100)]
    [0.0, 0.5, 1.0, 1.0, 0.0]
    """

    period: int
    weight: float = 1.0
    ramp: float = 0.5
    cycles: int | None = None

    def __post_init__(self):
        finite(self, "weight", "ramp")
        counts(self, period=2)  # the first step of each period has the weight 0: with one step, all have
        require(0 < self.ramp <= 1, f"`ramp` is {self.ramp}", "above 0 and at most 1", "The paper's is 0.5.")
        if self.cycles is not None:
            counts(self, cycles=1)

    @property
    def final(self):
        return float(self.weight)

    def __call__(self, step):
        step = tf.maximum(as_step(step), 0)
        # The remainder is taken of integers: as a float32 the step is inexact beyond 2^24.
        fraction = tf.cast(step % self.period, tf.float32) / (self.period * self.ramp)
        value = self.weight * tf.minimum(fraction, 1.0)
        return value if self.cycles is None else tf.where(step < self.period * self.cycles, value, self.weight)


@dataclasses.dataclass(frozen=True)
class EnabledFrom(Schedule):
    """0 before `step`, then `weight`, which is a number or another schedule. That schedule sees the same step.

    >>> [float(EnabledFrom(100, 0.5)(step)) for step in (99, 100)]
    [0.0, 0.5]
    """

    step: int
    weight: float | Schedule = 1.0

    def __post_init__(self):
        counts(self, step=0)
        if not isinstance(self.weight, Schedule):
            finite(self, "weight")

    @property
    def final(self):
        return self.weight.final if isinstance(self.weight, Schedule) else float(self.weight)

    def __call__(self, step):
        return tf.where(as_step(step) >= self.step, self.inner(step), 0.0)

    def inner(self, step):
        """The weight while enabled."""
        return self.weight(step) if isinstance(self.weight, Schedule) else tf.constant(self.weight, tf.float32)


@dataclasses.dataclass(frozen=True)
class DisabledAfter(EnabledFrom):
    """`weight`, a number or a schedule, up to and including `step`, then 0. `final` is 0.

    >>> [float(DisabledAfter(100, 0.5)(step)) for step in (100, 101)]
    [0.5, 0.0]
    """

    @property
    def final(self):
        return 0.0

    def __call__(self, step):
        return tf.where(as_step(step) <= self.step, self.inner(step), 0.0)


def as_step(step):
    """The step as an int64 tensor."""
    return tf.cast(step, tf.int64)


def progress(step, begin, steps):
    """Returns the fraction of `steps` done since `begin`, from 0 to 1, exact at any step count."""
    done = tf.clip_by_value(as_step(step) - begin, 0, steps)
    return tf.cast(done, tf.float32) / float(steps)


def mix(start, end, fraction):
    """Interpolates from start (at 0) to end (at 1), exact at both ends."""
    return start * (1.0 - fraction) + end * fraction


def finite(schedule, *names):
    """Checks that fields are finite numbers."""
    for name in names:
        value = getattr(schedule, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        require(number, f"`{name}` of {type(schedule).__name__} is {value!r}", "a finite number", "Correct it.")


def counts(schedule, **minimum):
    """Checks that fields are whole numbers, each at least its minimum."""
    for name, least in minimum.items():
        value = getattr(schedule, name)
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
        received = f"`{name}` of {type(schedule).__name__} is {value!r}"
        require(whole, received, f"a whole number, at least {least}", "It counts steps (optimizer updates).")
