"""Histograms, against NumPy's; values that are not finite are left out."""

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.util import tensor_util

from looptape.trainer.health.histograms import BUCKETS, count, summary

DRAWN = np.random.default_rng(0).normal(size=500).astype("float32")


@pytest.mark.parametrize("values", [DRAWN, np.append(DRAWN, [np.nan, np.inf, -np.inf]).astype("float32")], ids=len)
def test_counts_are_those_of_numpy(values):
    row = count([tf.constant(values)]).numpy()[0]
    expected, edges = np.histogram(DRAWN.astype(np.float64), BUCKETS)
    np.testing.assert_array_equal(row[2:], expected)
    np.testing.assert_allclose(row[:2], edges[[0, -1]], rtol=1e-6)


def test_one_value_and_none():
    same, none = count([tf.fill([3], 2.0), tf.constant([np.nan])]).numpy()
    assert same[:2].tolist() == [2.0, 2.0] and same[-1] == 3 and same[2:].sum() == 3
    assert none.tolist() == [0.0] * (2 + BUCKETS)


def test_the_summary_has_an_edge_on_each_side_of_a_count():
    row = count([tf.constant(DRAWN)]).numpy()[0]
    buckets = tensor_util.make_ndarray(summary("weights", row).tensor)
    assert buckets.shape == (BUCKETS, 3)
    np.testing.assert_allclose(buckets[1:, 0], buckets[:-1, 1])
    np.testing.assert_array_equal(buckets[:, 2], row[2:])
