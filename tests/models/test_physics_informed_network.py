"""Derivatives of the network, against finite differences."""

import numpy as np
import pytest
import tensorflow as tf

from looptape.models import (
    PhysicsInformedNetwork,
)


def numpy_network(model, points, mean, scale):
    """The network in float64, from its weights."""
    values = (points - mean) / scale
    weights = [w.astype(np.float64) for w in model.get_weights()]
    for kernel, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        values = np.tanh(values @ kernel + bias)
    return values @ weights[-2] + weights[-1]


def test_the_derivatives_of_a_physics_informed_network_are_those_of_finite_differences():
    mean, scale = [0.5, -1.0], [2.0, 0.25]
    model = PhysicsInformedNetwork(2, (6, 5), mean, scale)
    points = np.random.default_rng(0).normal(size=(4, 2))
    values, first, second = model.derivatives(tf.constant(points, tf.float32))
    network = lambda x: numpy_network(model, x, mean, scale)[:, 0]  # noqa: E731
    np.testing.assert_allclose(values[:, 0], network(points), atol=1e-5)
    for axis, step in enumerate(1e-4 * np.eye(2)):
        slope = (network(points + step) - network(points - step)) / 2e-4
        curvature = (network(points + step) - 2 * network(points) + network(points - step)) / 1e-8
        np.testing.assert_allclose(first[:, axis], slope, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(second[:, axis], curvature, rtol=1e-3, atol=1e-3)


def test_a_residual_trains_every_weight_of_a_physics_informed_network():
    model = PhysicsInformedNetwork(2, (6, 5))

    @tf.function
    def gradients(points):
        with tf.GradientTape() as tape:
            values, first, second = model.derivatives(points)
            loss = tf.reduce_mean(tf.square(tf.reduce_sum(second, axis=1) + values[:, 0] + first[:, 0]))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    for variable, gradient in zip(model.trainable_variables, gradients(tf.random.normal([5, 2])), strict=True):
        assert np.any(gradient.numpy() != 0), variable.path


def test_points_and_their_statistics_must_agree():
    with pytest.raises(ValueError, match=r"\[1.0, 2.0, 3.0\] has 3 numbers for 2 dimensions. Give one, or one per"):
        PhysicsInformedNetwork(2, mean=[1.0, 2.0, 3.0])
