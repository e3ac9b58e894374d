import itertools

import numpy as np
import pytest
import tensorflow as tf

from looptape import losses

RNG = np.random.default_rng(3)
MEAN, LOG_VARIANCE, PRIOR_MEAN, PRIOR_LOG_VARIANCE = RNG.normal(size=(4, 3, 2)).astype("float32")


def log_normal(x, mean, log_variance):
    return -0.5 * ((x - mean) ** 2 / np.exp(log_variance) + log_variance + np.log(2 * np.pi))


def kl_by_quadrature(mean, log_variance, prior_mean, prior_log_variance):
    """The integral of q (log q - log p), on a grid."""
    x = np.linspace(-40, 40, 400_001)
    q = log_normal(x, mean, log_variance)
    return np.sum(np.exp(q) * (q - log_normal(x, prior_mean, prior_log_variance))) * (x[1] - x[0])


def test_gaussian_kl_against_the_integral():
    expected = [
        sum(
            kl_by_quadrature(*(float(a[b, i]) for a in (MEAN, LOG_VARIANCE, PRIOR_MEAN, PRIOR_LOG_VARIANCE)))
            for i in (0, 1)
        )
        for b in range(3)
    ]
    value = losses.gaussian_kl((PRIOR_MEAN, PRIOR_LOG_VARIANCE), (MEAN, LOG_VARIANCE))
    np.testing.assert_allclose(value, expected, rtol=1e-4)


def test_standard_normal_kl_is_the_case_of_a_standard_prior():
    zero = np.zeros_like(MEAN)
    expected = losses.gaussian_kl((zero, zero), (MEAN, LOG_VARIANCE))
    np.testing.assert_allclose(losses.standard_normal_kl(None, (MEAN, LOG_VARIANCE)), expected, rtol=1e-6)
    side_by_side = np.concatenate([MEAN, LOG_VARIANCE], -1)
    np.testing.assert_allclose(losses.standard_normal_kl(None, side_by_side), expected, rtol=1e-6)


@pytest.mark.parametrize("shapes", list(itertools.product([(4,), (4, 1)], repeat=4)))
def test_kl_of_one_dimension_never_broadcasts_over_the_batch(shapes):
    parts = [np.random.default_rng(i).normal(size=4).astype("float32") for i in range(4)]
    mean, log_variance, prior_mean, prior_log_variance = (x.astype("float64") for x in parts)
    ratio = log_variance - prior_log_variance
    expected = 0.5 * ((mean - prior_mean) ** 2 / np.exp(prior_log_variance) + np.exp(ratio) - 1 - ratio)
    mean, log_variance, *prior = (tf.constant(x.reshape(shape)) for x, shape in zip(parts, shapes, strict=True))
    np.testing.assert_allclose(losses.gaussian_kl(prior, (mean, log_variance)), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_kl_to_a_prior_of_one_row_in_any_precision(dtype):
    prior = PRIOR_MEAN[0].astype(dtype), PRIOR_LOG_VARIANCE[0].astype(dtype)
    rows = [np.tile(part.astype("float32"), (3, 1)) for part in prior]
    expected = losses.gaussian_kl(rows, (MEAN, LOG_VARIANCE))
    outputs = MEAN.astype("float64"), LOG_VARIANCE.astype("float64")
    values = losses.gaussian_kl(prior, outputs)
    assert values.dtype == tf.float64
    np.testing.assert_allclose(values, expected, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 2, 2)], ids=str)
def test_a_prior_of_another_shape_is_refused(shape):
    message = r"`gaussian_kl` got a mean of shape \(3, 2\) with a log-variance or prior of shape .*must be equal shapes"
    with pytest.raises(ValueError, match=message):
        losses.gaussian_kl((np.zeros(shape, "f"), PRIOR_LOG_VARIANCE), (MEAN, LOG_VARIANCE))


def test_kl_of_equal_gaussians_is_zero_and_never_negative():
    np.testing.assert_array_equal(losses.gaussian_kl((MEAN, LOG_VARIANCE), (MEAN, LOG_VARIANCE)), np.zeros(3))
    near = (np.zeros((1, 1), "f"), np.full((1, 1), 1e-3, "f"))
    np.testing.assert_allclose(losses.standard_normal_kl(None, near), [1e-6 / 4], rtol=1e-2)


def test_free_bits_are_a_floor_per_dimension_without_gradient():
    mean = tf.constant([[0.1, 2.0]])
    with tf.GradientTape() as tape:
        tape.watch(mean)
        value = losses.standard_normal_kl(free_bits=0.5)(None, (mean, tf.zeros([1, 2])))
    np.testing.assert_allclose(value, [0.5 + 2.0])
    np.testing.assert_allclose(tape.gradient(value, mean), [[0.0, 2.0]])


def test_gaussian_likelihood():
    targets = RNG.normal(size=(3, 2)).astype("float32")
    expected = -log_normal(targets, MEAN, LOG_VARIANCE).sum(-1)
    value = losses.gaussian_negative_log_likelihood(targets, (MEAN, LOG_VARIANCE))
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_bernoulli_likelihood_sums_over_the_image():
    logits = RNG.normal(size=(2, 3, 4)).astype("float32")
    targets = RNG.uniform(size=(2, 3, 4)).astype("float32")
    p = 1 / (1 + np.exp(-logits.astype("float64")))
    expected = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum((1, 2))
    np.testing.assert_allclose(losses.bernoulli_negative_log_likelihood(targets, logits), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [((MEAN,), "got 1 tensors"), (np.ones((2, 3), "f"), r"one tensor of shape \(2, 3\)")],
)
def test_what_is_no_gaussian_is_refused(outputs, message):
    with pytest.raises(ValueError, match=message):
        losses.standard_normal_kl(None, outputs)


@pytest.mark.parametrize("shape", [(4, 3), (4, 1), (1, 3), (1, 1), ()], ids=str)
def test_a_log_variance_that_is_the_same_along_some_axes(shape):
    rng = np.random.default_rng(3)
    targets, mean = rng.normal(size=(2, 4, 3)).astype("float32")
    log_variance = rng.normal(size=shape).astype("float32")
    full = np.broadcast_to(log_variance, (4, 3)).astype("float64")
    expected = 0.5 * ((targets - mean) ** 2 / np.exp(full) + full + np.log(2 * np.pi)).sum(-1)
    values = losses.gaussian_negative_log_likelihood(targets, (mean, log_variance))
    np.testing.assert_allclose(values, expected, rtol=1e-5)


def test_a_log_variance_of_one_number_per_example_may_miss_the_last_axis():
    rng = np.random.default_rng(3)
    targets, mean, log_variance = rng.normal(size=(3, 4)).astype("float32")
    expected = 0.5 * ((targets - mean) ** 2 / np.exp(log_variance) + log_variance + np.log(2 * np.pi))
    for shapes in itertools.product([(4,), (4, 1)], repeat=3):
        parts = [part.reshape(shape) for part, shape in zip((targets, mean, log_variance), shapes, strict=True)]
        values = losses.gaussian_negative_log_likelihood(parts[0], tuple(parts[1:]))
        np.testing.assert_allclose(values, expected, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, 4), (12,), (2, 6), (4, 3, 2), (4, 6)], ids=str)
def test_a_log_variance_of_another_shape_is_refused(shape):
    message = r"got a mean of shape \(4, 3\) and a log-variance of shape .*; it must be equal shapes.*Correct the layer"
    with pytest.raises(ValueError, match=message):
        losses.gaussian_negative_log_likelihood(tf.zeros([4, 3]), (tf.zeros([4, 3]), tf.zeros(shape)))


def test_gaussian_likelihood_of_tiny_variances():
    """exp(89) is beyond float32: no difference times infinity was NaN, and a tiny one infinite."""
    difference, log_variance = np.float32([[0.0], [1e-20], [0.0]]), np.float32([[-100.0], [-92.0], [-1000.0]])
    outputs = (tf.constant(difference), tf.constant(log_variance))
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        values = losses.gaussian_negative_log_likelihood(tf.zeros([3, 1]), outputs)
    expected = -log_normal(0.0, difference[:2, 0].astype("float64"), log_variance[:2, 0].astype("float64"))
    np.testing.assert_allclose(values[:2], expected, rtol=1e-4)
    assert np.isfinite(values).all() and all(np.isfinite(g).all() for g in tape.gradient(values, outputs))


def test_kl_to_a_prior_of_tiny_variance():
    mean, log_variance = np.float32([[0.0, 1e-20]]), np.float32([[-95.0, -95.0]])
    prior = (np.zeros_like(mean), log_variance + np.float32(1))
    values = losses.gaussian_kl(tuple(map(tf.constant, prior)), (tf.constant(mean), tf.constant(log_variance)))
    ratio, squares = -1.0, mean.astype("float64") ** 2 * np.exp(94.0)
    np.testing.assert_allclose(values, 0.5 * (squares + np.exp(ratio) - 1 - ratio).sum(-1), rtol=1e-4)
