"""The stages of an update as pure functions, against NumPy; gradients of an embedding are sparse."""

import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.step.gradients import stages

DENSE = np.array([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]], "float32")
# The same as rows, one of them in two parts.
SPARSE = tf.IndexedSlices(
    tf.constant([[1.0, 0.0], [0.0, 4.0], [2.0, 0.0]]), tf.constant([0, 1, 0]), tf.constant([3, 2])
)


def test_rows_of_one_index_are_summed_before_a_norm_is_taken():
    summed = stages.deduplicate(SPARSE)
    assert sorted(summed.indices.numpy()) == [0, 1]
    np.testing.assert_array_equal(stages.to_dense(summed), DENSE)
    assert stages.global_norm([summed]).numpy() == pytest.approx(5.0)


def test_division_unscaling_and_a_group_without_elements():
    divided = stages.divide([[tf.constant(DENSE)], [tf.constant(DENSE)]], [tf.constant(2.0), tf.constant(0.0)], 4.0)
    np.testing.assert_allclose(divided[0][0], DENSE / 8)
    np.testing.assert_array_equal(divided[1][0], np.zeros_like(DENSE))
    np.testing.assert_allclose(stages.unscale([[tf.constant(DENSE)]], 4.0)[0][0], DENSE / 4)
    assert stages.unscale(divided, None) is divided


def test_combination_weights_only_what_is_shared():
    first, second = [tf.constant([1.0]), tf.constant([2.0])], [tf.constant([10.0]), tf.constant([20.0])]
    found = stages.combine([first, second], [0.5, 3.0], shared=[True, False])
    assert [float(gradient[0]) for gradient in found] == [0.5 * 1 + 3 * 10, 2 + 20]


@pytest.mark.parametrize(("limit", "factor"), [(1.0, 1 / 5), (5.0, 1.0), (9.0, 1.0)])
def test_clipping_to_a_global_norm(limit, factor):
    gradients = [tf.constant([3.0]), tf.constant([4.0])]
    found = stages.clip(gradients, stages.global_norm(gradients), limit)
    np.testing.assert_allclose([float(g[0]) for g in found], [3 * factor, 4 * factor], rtol=1e-6)


def test_a_norm_of_half_precision_is_taken_in_float32():
    assert stages.global_norm([tf.fill([4], tf.constant(300.0, tf.float16))]).numpy() == pytest.approx(600.0)


@pytest.mark.parametrize("size", [1e20, 1e38])
def test_an_exact_norm_takes_gradients_whose_squares_overflow(size):
    gradients = [tf.constant([3.0, 0.0]) * size, tf.IndexedSlices(tf.constant([[2.0]]) * size, [1], [3, 1])]
    norm = tf.function(lambda: stages.global_norm(gradients, exact=True), autograph=False)()
    if size == 1e20:
        assert norm.numpy() == pytest.approx(13**0.5 * size) and np.isinf(stages.global_norm(gradients).numpy())
        np.testing.assert_allclose(stages.clip(gradients[:1], norm, 1.0)[0], [3 / 13**0.5, 0.0], rtol=1e-6)
    else:
        assert np.isinf(norm.numpy())  # the norm itself is above the range of float32
    assert np.isnan(stages.global_norm([tf.constant([np.nan])], exact=True).numpy())


def test_averages_follow_their_variables():
    mean, variable = tf.Variable([1.0]), tf.Variable([3.0])
    for _ in range(3):
        stages.average([mean], [variable], 0.9)
    assert mean.numpy()[0] == pytest.approx(3 - 2 * 0.9**3)
