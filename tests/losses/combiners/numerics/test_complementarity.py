"""The complementarity problem, against non-negative least squares of SciPy."""

import numpy as np
import pytest
import tensorflow as tf
from scipy.optimize import nnls

from looptape.losses.combiners.numerics.complementarity import complementary


@pytest.mark.parametrize("count", [1, 3, 8])
def test_it_is_non_negative_least_squares(count):
    rng = np.random.default_rng(count)
    a = rng.normal(size=(12, count))
    a /= np.linalg.norm(a, axis=0)
    sides = rng.normal(size=(5, 12))
    found = complementary(tf.constant(a.T @ a), tf.constant(-sides @ a), tf.fill([count], True)).numpy()
    expected = np.stack([nnls(a, side)[0] for side in sides])
    np.testing.assert_allclose(found, expected, atol=1e-10)


def test_entries_that_are_not_allowed_stay_at_zero():
    rng = np.random.default_rng(0)
    a, side = rng.normal(size=(6, 4)), rng.normal(size=6)
    allowed = np.array([True, False, True, True])
    matrix, linear = np.where(np.outer(allowed, allowed), a.T @ a, 0.0), np.where(allowed, -side @ a, -5.0)
    found = complementary(tf.constant(matrix), tf.constant(linear[None]), tf.constant(allowed)).numpy()[0]
    assert found[1] == 0.0
    np.testing.assert_allclose(found[allowed], nnls(a[:, allowed], side)[0], atol=1e-10)
