"""Random draws: their distribution, and that plain graphs and XLA draw the same numbers."""

import numpy as np
import pytest
import tensorflow as tf

from looptape.losses.combiners.numerics import random


@pytest.mark.parametrize("draw, tolerance", [(random.uniform, 0.0), (random.normal, 1e-5)])
def test_the_same_numbers_eager_traced_and_compiled(draw, tolerance):
    eager = draw(7, tf.constant(3, tf.int64), [64]).numpy()
    for compiled in (False, True):
        traced = tf.function(lambda counter: draw(7, counter, [64]), jit_compile=compiled)
        found = traced(tf.constant(3, tf.int64)).numpy()
        np.testing.assert_allclose(found, eager, rtol=tolerance, atol=tolerance)
    assert (draw(7, tf.constant(4, tf.int64), [64]).numpy() != eager).all()
    assert (draw(8, tf.constant(3, tf.int64), [64]).numpy() != eager).all()


def test_the_distributions():
    uniform = random.uniform(0, tf.constant(0, tf.int64), [20_000]).numpy()
    assert uniform.min() > 0.0 and uniform.max() < 1.0
    np.testing.assert_allclose(np.histogram(uniform, bins=10, range=(0, 1))[0], 2000, atol=200)
    normal = random.normal(0, tf.constant(1, tf.int64), [20_000]).numpy()
    np.testing.assert_allclose([normal.mean(), normal.std()], [0.0, 1.0], atol=0.03)


def test_permutations_are_independent_orders():
    found = random.permutations(0, tf.constant(0, tf.int64), 6).numpy()
    np.testing.assert_array_equal(np.sort(found, axis=1), np.tile(np.arange(6), (6, 1)))
    assert len({tuple(row) for row in found}) > 3
