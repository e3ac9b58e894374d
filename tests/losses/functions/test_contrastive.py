import numpy as np
import pytest
import tensorflow as tf

from looptape import losses

RNG = np.random.default_rng(4)
A, B = RNG.normal(size=(2, 5, 3)).astype("float32")


def info_nce(a, b, temperature):
    a = a / np.linalg.norm(a, axis=-1, keepdims=True)
    b = b / np.linalg.norm(b, axis=-1, keepdims=True)
    logits = (a @ b.T).astype("float64") / temperature
    return np.log(np.exp(logits).sum(-1)) - np.diag(logits)


def test_info_nce():
    loss = losses.info_nce(temperature=0.5)
    np.testing.assert_allclose(loss(B, A), info_nce(A, B, 0.5), rtol=1e-4)
    np.testing.assert_allclose(loss(None, (A, B)), info_nce(A, B, 0.5), rtol=1e-4)
    both = 0.5 * (info_nce(A, B, 0.5) + info_nce(B, A, 0.5))
    np.testing.assert_allclose(loss(symmetric=True)(B, A), both, rtol=1e-4)


def test_info_nce_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"shapes \(5, 3\) and \(5, 2\)"):
        losses.info_nce(B[:, :2], A)


def test_triplet():
    c = RNG.normal(size=(5, 3)).astype("float32")
    near, far = ((A - B) ** 2).sum(-1), ((A - c) ** 2).sum(-1)
    euclidean = np.maximum(np.sqrt(near) - np.sqrt(far) + 0.7, 0)
    squared = np.maximum(near - far + 0.7, 0)
    np.testing.assert_allclose(losses.triplet(margin=0.7)(None, (A, B, c)), euclidean, rtol=1e-5, atol=1e-6)
    stacked = np.stack([A, B, c], 1)
    loss = losses.triplet(margin=0.7, distance="squared")
    np.testing.assert_allclose(loss(None, stacked), squared, rtol=1e-5, atol=1e-6)
    assert 0 < (euclidean > 0).sum() < 5  # both branches


def test_triplet_gradient_is_finite_where_anchor_and_positive_coincide():
    a = tf.constant(A)
    with tf.GradientTape() as tape:
        tape.watch(a)
        value = losses.triplet(margin=9.0)(None, (a, a, tf.constant(B)))
    assert np.isfinite(tape.gradient(value, a).numpy()).all()


def test_triplet_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"one tensor of shape \(5, 3\)"):
        losses.triplet(None, A)
    with pytest.raises(ValueError, match="got 2 tensors"):
        losses.triplet(None, (A, B))
