"""What must hold for every loss function that `losses` exports; a new one fails until it has inputs here."""

import numpy as np
import pytest
import tensorflow as tf

from looptape import losses
from looptape.losses.convention import LossFunction

RNG = np.random.default_rng(0)
X, Y, Z = (tf.constant(RNG.normal(size=(4, 3)), tf.float32) for _ in range(3))
SEQUENCE = tf.constant(RNG.normal(size=(4, 5, 3)), tf.float32)
BITS = tf.constant(RNG.integers(0, 2, size=(4, 3)), tf.float32)
ONE_HOT = tf.one_hot([0, 2, 1, 1], 3)
TOKENS = tf.constant([[1, 2, 0, 0, 0], [2, 2, 2, 2, 2], [1, 1, 2, 0, 0], [1, 0, 0, 0, 0]])

INPUTS = {
    "absolute_error": (X, Y),
    "activity": (None, X),
    "bernoulli_negative_log_likelihood": (BITS, X),
    "binary_cross_entropy": (BITS, X),
    "binary_focal": (BITS, X),
    "categorical_cross_entropy": (ONE_HOT, X),
    "categorical_focal": (ONE_HOT, X),
    "categorical_hinge": (ONE_HOT, X),
    "ctc": (TOKENS[:, :2], SEQUENCE),
    "gaussian_kl": ((X, Y), (Y, Z)),
    "gaussian_negative_log_likelihood": (X, (Y, Z)),
    "hinge": (2 * BITS - 1, X),
    "huber": (X, Y),
    "info_nce": (X, Y),
    "log_cosh": (X, Y),
    "masked_cross_entropy": (TOKENS, SEQUENCE),
    "masked_squared_error": (SEQUENCE, 2 * SEQUENCE),
    "quantile": (X, Y),
    "sparse_categorical_cross_entropy": (tf.constant([0, 2, 1, 1]), X),
    "squared_error": (X, Y),
    "standard_normal_kl": (None, (X, Y)),
    "temporal_smoothness": (None, SEQUENCE),
    "triplet": (None, (X, Y, Z)),
}
ACROSS_THE_BATCH = {"info_nce"}
every_loss = pytest.mark.parametrize("name", sorted(INPUTS))


def values_of(result):
    return result[0] if isinstance(result, tuple) else result


def test_every_exported_loss_is_here():
    exported = {name for name in losses.__all__ if isinstance(getattr(losses, name), LossFunction)}
    assert exported == set(INPUTS)


@every_loss
def test_float32_and_one_value_per_example_at_least(name):
    result = getattr(losses, name)(*INPUTS[name])
    values = values_of(result)
    assert values.dtype == tf.float32 and values.shape[0] == 4
    if isinstance(result, tuple):
        assert result[1].shape == values.shape and result[1].dtype == tf.float32
    assert np.isfinite(values.numpy()).all()


@every_loss
def test_traced_and_by_xla(name):
    loss, (targets, outputs) = getattr(losses, name), INPUTS[name]
    expected = values_of(loss(targets, outputs))
    traced = tf.function(lambda a, b: values_of(loss(a, b)), autograph=False)
    np.testing.assert_allclose(traced(targets, outputs), expected, rtol=1e-5, atol=1e-6)
    compiled = tf.function(lambda a, b: values_of(loss(a, b)), autograph=False, jit_compile=True)
    np.testing.assert_allclose(compiled(targets, outputs), expected, rtol=1e-4, atol=1e-5)


@every_loss
def test_an_example_does_not_depend_on_the_others(name):
    if name in ACROSS_THE_BATCH:
        pytest.skip("compares across the batch by nature")
    loss, (targets, outputs) = getattr(losses, name), INPUTS[name]

    def part(piece):
        return loss(*tf.nest.map_structure(lambda x: None if x is None else x[piece], (targets, outputs)))

    parts = np.concatenate([values_of(part(piece)).numpy() for piece in (slice(0, 1), slice(1, 4))])
    np.testing.assert_allclose(parts, values_of(loss(targets, outputs)), rtol=1e-5, atol=1e-6)


@every_loss
def test_gradients_are_finite_and_reach_the_outputs(name):
    loss, (targets, outputs) = getattr(losses, name), INPUTS[name]
    flat = tf.nest.flatten(outputs)
    with tf.GradientTape() as tape:
        tape.watch(flat)
        total = tf.reduce_sum(values_of(loss(targets, outputs)))
    for gradient in tape.gradient(total, flat):
        assert np.isfinite(gradient.numpy()).all() and (gradient.numpy() != 0).any()


@every_loss
def test_half_precision_outputs_give_float32(name):
    loss, (targets, outputs) = getattr(losses, name), INPUTS[name]
    half = tf.nest.map_structure(lambda x: tf.cast(x, tf.float16), outputs)
    values = values_of(loss(targets, half))
    assert values.dtype == tf.float32
    np.testing.assert_allclose(values, values_of(loss(targets, outputs)), rtol=0.05, atol=0.05)
