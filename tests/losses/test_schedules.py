import dataclasses
import inspect
import math

import numpy as np
import pytest
import tensorflow as tf

from looptape import losses
from looptape.losses import (
    Constant,
    CosineRamp,
    CyclicalKL,
    DisabledAfter,
    EnabledFrom,
    KLWarmup,
    LinearRamp,
    Piecewise,
    SigmoidRamp,
)


def ramp(shape, start, end, steps, begin):
    def value(t):
        return start + (end - start) * shape(min(max((t - begin) / steps, 0), 1))

    return value


def sigmoid(steepness):
    def raw(x):
        return 1 / (1 + math.exp(-steepness * (x - 0.5)))

    return lambda x: (raw(x) - raw(0)) / (raw(1) - raw(0))


CASES = [  # schedule, the same in plain Python, final
    (Constant(0.3), lambda t: 0.3, 0.3),
    (LinearRamp(0.2, 2.0, steps=40, begin=10), ramp(lambda x: x, 0.2, 2.0, 40, 10), 2.0),
    (LinearRamp(2.0, 0.0, steps=40), ramp(lambda x: x, 2.0, 0.0, 40, 0), 0.0),
    (
        CosineRamp(0.0, 3.0, steps=40, begin=5),
        ramp(lambda x: (1 - math.cos(math.pi * x)) / 2, 0, 3, 40, 5),
        3.0,
    ),
    (SigmoidRamp(0.5, 1.0, steps=40, begin=5), ramp(sigmoid(10), 0.5, 1.0, 40, 5), 1.0),
    (SigmoidRamp(0.0, 1.0, steps=40, steepness=3.0), ramp(sigmoid(3), 0, 1.0, 40, 0), 1.0),
    (Piecewise([10, 20], [1.0, 0.5, 2.0]), lambda t: 1.0 if t < 10 else 0.5 if t < 20 else 2.0, 2.0),
    (Piecewise([], [4.0]), lambda t: 4.0, 4.0),
    (KLWarmup(30, weight=0.5, delay=10), lambda t: 0.5 * min(max((t - 10) / 30, 0), 1), 0.5),
    (CyclicalKL(20, weight=2.0, ramp=0.25), lambda t: 2.0 * min((t % 20) / 5, 1), 2.0),
    (CyclicalKL(2), lambda t: float(t % 2), 1.0),
    (CyclicalKL(20, cycles=2), lambda t: min((t % 20) / 10, 1) if t < 40 else 1.0, 1.0),
    (EnabledFrom(15, 0.5), lambda t: 0.5 if t >= 15 else 0.0, 0.5),
    (EnabledFrom(15, LinearRamp(0.0, 3.0, steps=30)), lambda t: min(t / 10, 3) if t >= 15 else 0.0, 3.0),
    (DisabledAfter(15, 0.5), lambda t: 0.5 if t <= 15 else 0.0, 0.0),
    (DisabledAfter(15, KLWarmup(10)), lambda t: min(t / 10, 1) if t <= 15 else 0.0, 0.0),
]
STEPS = [0, 1, 4, 9, 10, 11, 15, 16, 19, 20, 21, 25, 35, 39, 40, 41, 50, 1000]
IDS = [repr(schedule) for schedule, _, _ in CASES]


@pytest.mark.parametrize(("schedule", "python", "final"), CASES, ids=IDS)
def test_values(schedule, python, final):
    values = [schedule(step) for step in STEPS]
    assert all(v.dtype == tf.float32 and v.shape == [] for v in values)
    np.testing.assert_allclose(values, [python(t) for t in STEPS], rtol=1e-5, atol=1e-6)
    assert schedule.final == final and isinstance(schedule.final, float)
    if not (isinstance(schedule, CyclicalKL) and schedule.cycles is None):
        np.testing.assert_allclose(schedule(10**6), final, rtol=1e-6)


@pytest.mark.parametrize(("schedule", "python", "final"), CASES, ids=IDS)
def test_traced_once_and_by_xla(schedule, python, final):
    traces = []

    def value(step):
        traces.append(1)
        return schedule(step)

    plain = tf.function(value, autograph=False)
    compiled = tf.function(value, autograph=False, jit_compile=True)
    steps = [tf.constant(step, tf.int64) for step in STEPS]
    np.testing.assert_allclose([plain(s) for s in steps], [python(t) for t in STEPS], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([compiled(s) for s in steps], [plain(s) for s in steps], rtol=1e-6, atol=1e-7)
    assert len(traces) == 2


def test_every_schedule_is_in_the_table():
    exported = {
        value
        for value in (getattr(losses, name) for name in losses.__all__)
        if inspect.isclass(value) and issubclass(value, losses.Schedule) and value is not losses.Schedule
    }
    assert exported == {type(schedule) for schedule, _, _ in CASES}


@pytest.mark.parametrize("offset", [0, 1, 9, 10])
def test_large_step_counts_are_exact(offset):
    """A float32 step is off by up to 64 at 10^9."""
    begin = 10**9
    np.testing.assert_allclose(LinearRamp(0.0, 1.0, steps=10, begin=begin)(begin + offset), offset / 10, rtol=1e-6)
    np.testing.assert_allclose(CyclicalKL(20)(begin + offset), min(offset / 10, 1.0), rtol=1e-6)
    assert float(EnabledFrom(begin + 5)(begin + offset)) == (offset >= 5)
    assert float(Piecewise([begin + 5], [0.0, 1.0])(begin + offset)) == (offset >= 5)


def test_frozen_and_comparable():
    schedule = KLWarmup(10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.steps = 20
    assert schedule == KLWarmup(10) != KLWarmup(11)
    assert hash(Piecewise([1], [0, 1])) == hash(Piecewise((1,), (0, 1)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(float("nan")), "`value` of Constant is nan; it must be a finite number"),
        (lambda: Constant("one"), "`value` of Constant is 'one'"),
        (
            lambda: LinearRamp(0.0, 1.0, steps=0),
            "`steps` of LinearRamp is 0; it must be a whole number, at least 1",
        ),
        (lambda: LinearRamp(0.0, 1.0, steps=1.5), "`steps` of LinearRamp is 1.5"),
        (lambda: LinearRamp(0.0, 1.0, steps=5, begin=-1), "`begin` of LinearRamp is -1"),
        (lambda: CosineRamp(0.0, math.inf, steps=5), "`end` of CosineRamp is inf"),
        (lambda: SigmoidRamp(0.0, 1.0, steps=5, steepness=0), "`steepness` is 0; it must be above 0"),
        (lambda: Piecewise([1, 2], [0.0, 1.0]), "2 boundaries and 2 values"),
        (lambda: Piecewise([2, 1], [0.0, 1.0, 2.0]), r"`boundaries` is \[2, 1\]; it must be increasing"),
        (lambda: Piecewise([1], [0.0, math.nan]), "`values` is"),
        (lambda: Piecewise([1.5], [1.0, 2.0]), "`boundaries` is 1.5; it must be a whole number"),
        (lambda: Piecewise([True], [1.0, 2.0]), "`boundaries` is True; it must be a whole number"),
        (lambda: CyclicalKL(1), "`period` of CyclicalKL is 1; it must be a whole number, at least 2"),
        (lambda: KLWarmup(0), "`steps` of KLWarmup is 0"),
        (lambda: CyclicalKL(10, ramp=0.0), "`ramp` is 0.0; it must be above 0"),
        (lambda: CyclicalKL(10, cycles=0), "`cycles` of CyclicalKL is 0"),
        (lambda: EnabledFrom(-1), "`step` of EnabledFrom is -1"),
        (lambda: DisabledAfter(5, "x"), "`weight` of DisabledAfter is 'x'"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("steepness", [0.5, 5.0, 10.0, 23.0])
@pytest.mark.parametrize(("start", "end"), [(0.0, 1.0), (0.0, 1e-3), (2.0, 0.0)])
def test_a_sigmoid_ramp_begins_and_ends_exactly(steepness, start, end):
    """A weight of -6e-8 is refused as negative by whoever checks it."""
    schedule = SigmoidRamp(start, end, 100, steepness=steepness)
    values = [float(schedule(tf.constant(t, tf.int64))) for t in (0, 100, 1000)]
    assert values == [np.float32(start), np.float32(end), np.float32(end)]
