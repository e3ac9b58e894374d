"""The warm-up schedule, against its formula in NumPy, and after serialization."""

import keras
import numpy as np
import pytest

from looptape import WarmupSchedule


def by_hand(step, peak, warmup, shape, steps):
    if step < warmup:
        return peak * (step + 1) / warmup
    if shape == "cosine":
        done = min((step - warmup) / (steps - warmup), 1.0)
        return peak * (0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * done)))
    return peak * (0.9 ** ((step - warmup) / 1000) if shape == "exponential" else 1.0)


@pytest.mark.parametrize("shape", ["constant", "cosine", "exponential"])
@pytest.mark.parametrize("warmup", [0, 10])
def test_every_shape_is_its_formula_also_after_saving(shape, warmup):
    schedule = WarmupSchedule(0.2, warmup, shape, steps=100)
    loaded = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    for step in (0, 4, 9, 10, 11, 50, 99, 100, 3000):
        expected = by_hand(step, 0.2, warmup, shape, 100)
        assert float(schedule(step)) == pytest.approx(expected, rel=1e-5)
        assert float(loaded(step)) == float(schedule(step))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0,), "`peak` is 0.0"),
        ((0.1, -1), "`warmup_steps` is -1"),
        ((0.1, 0, "linear"), "`shape` is 'linear'"),
        ((0.1, 10, "cosine", 10), "`steps` is 10; a cosine must know"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        WarmupSchedule(*arguments)
