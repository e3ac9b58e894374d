"""Equal shares: the equation that defines them, for matrices of very different scales."""

import numpy as np
import pytest
import tensorflow as tf

from looptape.losses.combiners.numerics.bargaining import equal_shares


@pytest.mark.parametrize("alpha", [0.25, 0.5, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("spread", [1.0, 1e6])
def test_the_defining_equation_holds(alpha, spread):
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(4, 6))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    matrix, sizes = rows @ rows.T, np.array([1.0, spread, 1.0 / spread, 2.0])
    y, exists = equal_shares(tf.constant(matrix), tf.constant(np.log(sizes)), alpha, tf.fill([4], True))
    y = y.numpy()
    assert exists and (y > 0).all()
    np.testing.assert_allclose(matrix @ y, sizes * y ** (-1.0 / alpha), rtol=1e-6, atol=1e-9 * y.max())


def test_a_loss_without_a_gradient_does_not_change_the_others():
    matrix = np.array([[1.0, -0.3, 0.0], [-0.3, 1.0, 0.0], [0.0, 0.0, 0.0]])
    whole = equal_shares(tf.constant(matrix), tf.zeros([3], tf.float64), 2.0, tf.constant([True, True, False]))
    pair = equal_shares(tf.constant(matrix[:2, :2]), tf.zeros([2], tf.float64), 2.0, tf.constant([True, True]))
    np.testing.assert_allclose(whole[0][:2], pair[0], rtol=1e-12)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 10.0])
def test_of_opposed_gradients_none_exists(alpha):
    matrix = np.array([[1.0, -1.0, 0.2], [-1.0, 1.0, -0.2], [0.2, -0.2, 1.0]])
    y, exists = equal_shares(tf.constant(matrix), tf.zeros([3], tf.float64), alpha, tf.fill([3], True))
    assert not exists and np.isfinite(y).all()


def test_weights_may_span_a_hundred_powers_of_ten():
    """Of orthogonal gradients y = sizes^(alpha / (1 + alpha)); of parallel ones alpha 20 nearly ignores the last."""
    logs = np.log([1.0, 1e-12, 1e-30])
    alone, exists = equal_shares(tf.eye(3, dtype=tf.float64), tf.constant(logs), 20.0, tf.fill([3], True))
    np.testing.assert_allclose(np.log(alone), 20 / 21 * logs, rtol=1e-9, atol=1e-9)
    together, found = equal_shares(tf.ones([3, 3], tf.float64), tf.constant(logs), 20.0, tf.fill([3], True))
    assert exists and found and together[1] < 1e-200 and together[0].numpy() == pytest.approx(1.0)
