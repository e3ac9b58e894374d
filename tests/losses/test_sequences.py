import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import losses

RNG = np.random.default_rng(2)
LOGITS = RNG.normal(size=(2, 4, 5)).astype("float32")
TOKENS = np.array([[3, 1, 0, 0], [2, 4, 1, 0]])


def log_softmax(x):
    x = x.astype("float64")
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


PER_TOKEN = -np.take_along_axis(log_softmax(LOGITS), TOKENS[..., None], -1)[..., 0]


def test_masked_cross_entropy_leaves_padding_out():
    values, weights = losses.masked_cross_entropy(TOKENS, LOGITS)
    mask = (TOKENS != 0).astype("float64")
    np.testing.assert_array_equal(weights, mask)
    np.testing.assert_allclose(values, PER_TOKEN * mask, rtol=1e-5)


def test_masked_cross_entropy_with_a_mask_of_its_own():
    mask = np.array([[1, 0, 1, 1], [0, 0, 1, 1]], bool)
    values, weights = losses.masked_cross_entropy(padding=None)((TOKENS, mask), LOGITS)
    np.testing.assert_array_equal(weights, mask)
    np.testing.assert_allclose(values, PER_TOKEN * mask, rtol=1e-5)


def test_masked_cross_entropy_counts_all_without_padding():
    values, weights = losses.masked_cross_entropy(padding=None)(TOKENS, LOGITS)
    np.testing.assert_array_equal(weights, np.ones((2, 4)))
    np.testing.assert_allclose(values, PER_TOKEN, rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_that_is_no_class_number_has_no_gradient(smoothing):
    tokens = np.where(TOKENS == 0, -1, TOKENS)
    logits = tf.constant(LOGITS)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        values, weights = losses.masked_cross_entropy(padding=-1, label_smoothing=smoothing)(tokens, logits)
        total = tf.reduce_sum(values * weights)
    gradient = tape.gradient(total, logits).numpy()
    assert np.isfinite(gradient).all()
    assert (gradient[tokens == -1] == 0).all() and (gradient[tokens != -1] != 0).all()


@pytest.mark.parametrize("padding", [np.nan, -7.0])
def test_masked_squared_error(padding):
    targets = RNG.normal(size=(2, 3, 2)).astype("float32")
    outputs = RNG.normal(size=(2, 3, 2)).astype("float32")
    expected = ((targets - outputs) ** 2).mean(-1)
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    expected = expected * mask
    targets[mask == 0, 0] = padding
    loss = losses.masked_squared_error(padding=padding)
    variable = tf.Variable(outputs)
    with tf.GradientTape() as tape:
        values, weights = loss(targets, tf.convert_to_tensor(variable))
        total = tf.reduce_sum(values * weights)
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    np.testing.assert_array_equal(weights, mask)
    gradient = tape.gradient(total, variable).numpy()
    assert np.isfinite(gradient).all() and (gradient[mask == 0] == 0).all()


def test_masked_squared_error_without_a_feature_axis():
    values, weights = losses.masked_squared_error(padding=None)(
        (np.ones((2, 3), "f"), np.eye(2, 3)), np.zeros((2, 3), "f")
    )
    np.testing.assert_array_equal(values, np.eye(2, 3))
    np.testing.assert_array_equal(weights, np.eye(2, 3))


def ctc_by_enumeration(labels, logits, blank=0):
    """-log of the summed probability of all paths that collapse to the labels."""
    logp = log_softmax(logits)
    total = -np.inf
    for path in itertools.product(range(logits.shape[1]), repeat=logits.shape[0]):
        collapsed = [k for k, _ in itertools.groupby(path) if k != blank]
        if collapsed == list(labels):
            total = np.logaddexp(total, sum(logp[t, k] for t, k in enumerate(path)))
    return -total


def test_ctc_against_all_alignments():
    logits = RNG.normal(size=(2, 4, 3)).astype("float32")
    labels = np.array([[1, 2], [2, 0]])
    expected = [ctc_by_enumeration([1, 2], logits[0]), ctc_by_enumeration([2], logits[1])]
    np.testing.assert_allclose(losses.ctc(labels, logits), expected, rtol=1e-5)
    np.testing.assert_allclose(losses.ctc(labels, logits), keras.losses.CTC().call(labels, logits), rtol=1e-6)


def test_ctc_with_output_lengths_and_another_blank():
    logits = RNG.normal(size=(1, 5, 3)).astype("float32")
    expected = [ctc_by_enumeration([1, 0], logits[0, :3], blank=2)]
    labels = np.array([[1, 0, 2, 2]])
    np.testing.assert_allclose(losses.ctc(blank=2)((labels, np.array([3])), logits), expected, rtol=1e-5)


def test_ctc_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"`ctc` got labels of shape \(2,\)"):
        losses.ctc(np.array([1, 2]), LOGITS)
