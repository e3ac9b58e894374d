"""The worst-off loss within a ball, against every direction of a disc."""

import numpy as np
import pytest
import tensorflow as tf

from looptape.losses.combiners.numerics.ball import worst_off


@pytest.mark.parametrize("radius", [0.3, 0.7])
@pytest.mark.parametrize("angles, norms", [((0.1, 1.9), (1.0, 3.0)), ((0.0, 0.8, 2.0), (1.0, 50.0, 2.0))])
def test_no_direction_of_the_disc_is_better(angles, norms, radius):
    units = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    gradients = units * np.array(norms)[:, None]
    centre = gradients.mean(axis=0)
    centre /= np.linalg.norm(centre)
    y, level = worst_off(
        *(tf.constant(x) for x in (units @ units.T, units @ centre, 1.0 / np.array(norms))),
        radius,
        tf.fill([len(norms)], True),
    )
    around = np.linspace(0, 2 * np.pi, 200_001)
    disc = centre + radius * np.stack([np.cos(around), np.sin(around)], axis=1)
    best = (disc @ gradients.T).min(axis=1).max()
    direction = centre + y.numpy() @ units
    assert best - 1e-9 <= level.numpy() <= best + 1e-3 * radius  # the best lies at a corner, between two of these
    assert (gradients @ direction).min() == pytest.approx(level.numpy(), rel=1e-8)
    assert np.linalg.norm(direction - centre) == pytest.approx(radius)


def test_a_loss_without_a_gradient_is_left_out():
    cosines = tf.constant([[1.0, 0.0, 0.5], [0.0, 0.0, 0.0], [0.5, 0.0, 1.0]], tf.float64)
    inner, ones = tf.constant([0.8, 0.0, 0.9], tf.float64), tf.ones([3], tf.float64)
    y, level = worst_off(cosines, inner, ones, 0.5, tf.constant([True, False, True]))
    pair = [0, 2]
    small, expected = worst_off(
        *(tf.gather(x, pair) for x in (tf.gather(cosines, pair, axis=1), inner, ones)), 0.5, tf.constant([True, True])
    )
    assert y.numpy()[1] == 0.0 and level.numpy() == pytest.approx(expected.numpy())
    np.testing.assert_allclose(y.numpy()[pair], small, rtol=1e-12)
