"""Orthogonal rows: against NumPy's decomposition, and against matrices whose decomposition is known."""

import numpy as np
import pytest
import tensorflow as tf

from looptape.losses.combiners.numerics.polar import orthogonal_rows, sum_of_aligned


def ones(singular, kept, rank):
    return tf.ones_like(singular)


def orthonormal(count, columns, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(columns, count)))[0].T


def test_all_singular_values_become_one():
    rng = np.random.default_rng(5)
    rows, weights = rng.normal(size=(4, 6)), rng.normal(size=4)
    left, _, right = np.linalg.svd(rows, full_matrices=False)
    found = sum_of_aligned(tf.constant(rows), tf.constant(weights), tf.constant(4), ones)
    np.testing.assert_allclose(found, weights @ left @ right, rtol=1e-10)


@pytest.mark.parametrize("spread", [1e6, 1e12])
def test_rows_that_differ_by_many_orders_of_magnitude(spread):
    """Orthogonal rows of any length are aligned already: each becomes its unit vector."""
    unit, lengths = orthonormal(3, 5), np.array([1.0, 1.0 / spread, np.sqrt(1.0 / spread)])
    weights = np.array([0.5, -2.0, 1.0])
    found = sum_of_aligned(tf.constant(unit * lengths[:, None]), tf.constant(weights), tf.constant(3), ones)
    np.testing.assert_allclose(found, weights @ unit, atol=1e-9)


def test_rotations_keep_products_and_make_rows_orthogonal():
    rng = np.random.default_rng(2)
    rows, weights = rng.normal(size=(5, 7)) * np.logspace(0, -8, 5)[:, None], rng.normal(size=5)
    turned, parts = (x.numpy() for x in orthogonal_rows(tf.constant(rows), tf.constant(weights)))
    np.testing.assert_allclose(turned.T @ turned, rows.T @ rows, atol=1e-13)
    np.testing.assert_allclose(parts @ turned, weights @ rows, atol=1e-13)
    lengths = np.linalg.norm(turned, axis=1)
    scale = np.where(lengths > 0, lengths, 1.0)
    cosines = turned @ turned.T / scale[:, None] / scale[None, :]
    assert np.abs(cosines - np.diag(np.diag(cosines))).max() < 1e-12
