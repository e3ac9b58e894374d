"""Inner products of gradients, against NumPy; norms and cosines, also of what is absent or not finite."""

import numpy as np
import tensorflow as tf

from looptape.losses.combiners.numerics.gramian import directions, gramian, mean_weights


def test_dense_sparse_and_missing_gradients():
    rng = np.random.default_rng(1)
    table, matrix = rng.normal(size=(3, 5, 2)), rng.normal(size=(3, 4))
    table[0, [0, 2, 3, 4]] = 0.0
    sparse = tf.IndexedSlices(tf.constant(table[0, 1:2], tf.float32), tf.constant([1]), tf.constant([5, 2]))
    rest = [[tf.constant(x[loss], tf.float32) for x in (table, matrix)] for loss in (1, 2)]
    rows = [[sparse, None], *rest, [None, None]]
    flat = np.concatenate([table.reshape(3, -1), np.concatenate([np.zeros((1, 4)), matrix[1:]])], axis=1)
    flat = np.concatenate([flat.astype("float32").astype("float64"), np.zeros((1, 14))])
    np.testing.assert_allclose(gramian(rows), flat @ flat.T, rtol=1e-12, atol=1e-14)


def test_norms_are_relative_and_cosines_are_between_unit_gradients():
    rows = np.array([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0], [7.0, 1.0]])
    found = directions(tf.constant(rows @ rows.T), tf.constant([True, True, True, False]))
    np.testing.assert_array_equal(found.alive, [True, True, False, False])
    np.testing.assert_allclose(found.norms, [1.0, 0.4, 1.0, 1.0])
    assert found.largest.numpy() == 5.0
    expected = np.zeros((4, 4))
    expected[:2, :2] = [[1.0, 0.8], [0.8, 1.0]]
    np.testing.assert_allclose(found.cosines, expected)


def test_a_matrix_that_is_not_finite_gives_numbers():
    found = directions(tf.constant([[np.nan, 1.0], [1.0, np.inf]], tf.float64), tf.constant([True, True]))
    np.testing.assert_array_equal(found.cosines, np.eye(2))


def test_mean_weights():
    np.testing.assert_allclose(mean_weights(tf.constant([True, False, True])), [0.5, 0.0, 0.5])
    np.testing.assert_array_equal(mean_weights(tf.constant([False, False])), [0.0, 0.0])
