"""Equal shares: the equation that defines them, for matrices of very different scales."""

import numpy as np
import pytest
import tensorflow as tf

from looptape.losses.combiners.numerics.bargaining import equal_shares


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("spread", [1.0, 1e6])
def test_the_defining_equation_holds(alpha, spread):
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(4, 6))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    matrix, sizes = rows @ rows.T, np.array([1.0, spread, 1.0 / spread, 2.0])
    y = equal_shares(tf.constant(matrix), tf.constant(sizes), alpha, tf.fill([4], True)).numpy()
    assert (y > 0).all()
    np.testing.assert_allclose(matrix @ y, sizes * y ** (-1.0 / alpha), rtol=1e-6, atol=1e-9 * y.max())


def test_a_loss_without_a_gradient_does_not_change_the_others():
    matrix = np.array([[1.0, -0.3, 0.0], [-0.3, 1.0, 0.0], [0.0, 0.0, 0.0]])
    whole = equal_shares(tf.constant(matrix), tf.ones([3], tf.float64), 1.0, tf.constant([True, True, False]))
    pair = equal_shares(tf.constant(matrix[:2, :2]), tf.ones([2], tf.float64), 1.0, tf.constant([True, True]))
    np.testing.assert_allclose(whole[:2], pair, rtol=1e-12)
