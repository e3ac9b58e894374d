import numpy as np
import pytest
import tensorflow as tf

from looptape import losses
from looptape.losses.reduction import reduce_term

X = np.random.default_rng(5).normal(size=(2, 5, 3)).astype("float32")


def test_activity():
    np.testing.assert_allclose(losses.activity(None, X), (X**2).mean(-1), rtol=1e-6)
    np.testing.assert_allclose(losses.activity(power=1)(None, X), np.abs(X).mean(-1), rtol=1e-6)
    np.testing.assert_allclose(losses.activity(None, X[0, 0]), X[0, 0] ** 2, rtol=1e-6)


@pytest.mark.parametrize("order", [1, 2])
def test_temporal_smoothness(order):
    values, weights = losses.temporal_smoothness(order=order)(None, X)
    expected = (np.diff(X, n=order, axis=1) ** 2).mean(-1)
    np.testing.assert_allclose(values[:, order:], expected, rtol=1e-5)
    np.testing.assert_array_equal(values[:, :order], 0)
    np.testing.assert_array_equal(weights, np.broadcast_to(np.arange(5) >= order, (2, 5)))
    term = reduce_term("smooth", (values, weights), tf.constant(2.0))
    np.testing.assert_allclose(term.sum / term.divisor, expected.mean(), rtol=1e-5)


def test_temporal_smoothness_with_unknown_time():
    traced = tf.function(losses.temporal_smoothness.__wrapped__, autograph=False)
    concrete = traced.get_concrete_function(None, tf.TensorSpec([None, None, 3]))
    np.testing.assert_allclose(concrete(tf.constant(X))[0], losses.temporal_smoothness(None, X)[0], rtol=1e-6)


def test_a_constant_sequence_is_smooth_and_a_line_has_no_curvature():
    line = tf.reshape(tf.range(6.0), [1, 6, 1])
    assert float(tf.reduce_sum(losses.temporal_smoothness(None, tf.ones_like(line))[0])) == 0
    assert float(tf.reduce_sum(losses.temporal_smoothness(order=2)(None, line)[0])) == 0


def test_a_vector_has_no_time():
    with pytest.raises(ValueError, match=r"outputs of shape \(3,\)"):
        losses.temporal_smoothness(None, X[0, 0])
