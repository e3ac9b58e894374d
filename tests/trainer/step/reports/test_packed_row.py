"""The packed row of an update: what is packed is read back, as means over updates."""

import math

import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.step.plan import MicroResult
from looptape.trainer.step.reports.packed_row import Entry, pack, pack_logged


def result(sums, divisors, logged, examples):
    parts = {"sums": sums, "divisors": divisors, "logged": logged, "examples": examples}
    tensors = tf.nest.map_structure(tf.constant, parts)
    return MicroResult(**{**dict.fromkeys(MicroResult._fields), **tensors})


@pytest.mark.parametrize("coefficients", [None, [0.5, 2.0]], ids=str)
def test_two_updates_are_read_as_means(coefficients):
    """Σ sums / Σ divisors for a loss; totals and logged values weighted by the examples; the norm by the updates."""
    given = None if coefficients is None else tf.constant(coefficients)
    first = pack(result([6.0, 1.0], [3.0, 0.0], [8.0], 4.0), tf.constant(2.0), tf.constant(1.0), given)
    second = pack(result([2.0, 0.0], [1.0, 0.0], [2.0], 2.0), tf.constant(5.0), tf.constant(3.0), given)
    entry = Entry(None, ["a", "b"], ["x"], adaptive=coefficients is not None)
    assert first.shape == (entry.length,)
    row = (first + second).numpy().astype(np.float64)
    assert entry.read(row, updates=2) == {
        "loss": {"a": 2.0},  # b has no valid element
        "logged": {"x": 10 / 6},
        "total": (2 * 4 + 5 * 2) / 6,
        "norm": 2.0,
        "coefficient": dict(zip("ab", coefficients or [1.0, 1.0], strict=True)),
    }
    assert entry.examples(row) == 6.0


def test_without_any_valid_element_the_total_is_nan():
    row = pack(result([0.0], [0.0], [], 4.0), tf.constant(0.0), tf.constant(0.0), None).numpy()
    found = Entry(None, ["a"], []).read(row, updates=1)
    assert found["loss"] == {} and math.isnan(found["total"])


def test_logged_values_alone():
    entry = Entry(None, [], ["x", "y"])
    rows = [pack_logged([tf.constant([1.0, 3.0]), tf.constant(5)], tf.constant(4.0)), pack_logged([8.0, 2.0], 2.0)]
    assert rows[0].shape == (entry.length,)
    found = entry.read(sum(row.numpy().astype(np.float64) for row in rows), updates=2)
    assert found["logged"] == {"x": (2 * 4 + 8 * 2) / 6, "y": (5 * 4 + 2 * 2) / 6} and found["loss"] == {}
    assert entry.examples(rows[0].numpy()) == 4.0
