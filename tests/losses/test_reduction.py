"""The sums and divisors of one loss, traced with shapes that are not all known; against NumPy."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from looptape.losses.reduction import reduce_term

RNG = np.random.default_rng(5)


def unknowns(shape):
    """The shape with every choice of its axes unknown."""
    return itertools.product(*[(size, None) for size in shape])


def traced_term(values, weights, value_shape, weight_shape):
    """(sum, divisor, key without the id, ratio) of a trace that knows no more than these shapes."""
    facts = {}

    def run(v, w):
        term = reduce_term("error", (v, w), tf.constant(float(len(values))))
        facts.update(key=term.divisor_key[0], ratio=term.ratio)
        return term.sum, term.divisor

    specs = [tf.TensorSpec(shape, tf.float32) for shape in (value_shape, weight_shape)]
    total, divisor = tf.function(run, autograph=False, input_signature=specs)(values, weights)
    return float(total), float(divisor), facts["key"], facts["ratio"]


@pytest.mark.parametrize(
    "weight_shape", [[4, 5], [4, 1], [1, 5], [1, 1], [4], [1], [4, 5, 1]], ids=lambda shape: "x".join(map(str, shape))
)
def test_every_element_counts_with_its_weight_whatever_the_trace_knows(weight_shape):
    values = RNG.normal(size=[4, 5]).astype("float32")
    weights = RNG.uniform(0.5, 2.0, size=weight_shape).astype("float32")
    full = weights[..., 0] if weights.ndim == 3 else weights.reshape([*weights.shape, *[1] * (2 - weights.ndim)])
    full = np.broadcast_to(full, [4, 5]).astype("float64")
    for known_values, known_weights in itertools.product(unknowns([4, 5]), unknowns(weight_shape)):
        if len(weight_shape) == 3 and known_weights[-1] is None:
            continue  # refused: it is not known whether the last axis can be taken away
        total, divisor, _, _ = traced_term(values, weights, known_values, known_weights)
        np.testing.assert_allclose([total, divisor], [(values * full).sum(), full.sum()], rtol=1e-5)


def test_ones_that_are_broadcast_at_run_time_give_the_mean():
    total, divisor, _, _ = traced_term(np.ones([4, 5], "f"), np.ones([4, 1], "f"), [4, 5], [None, None])
    assert (total, divisor) == (20.0, 20.0)


@pytest.mark.parametrize("batch", [4, None])
def test_losses_share_a_divisor_where_it_is_known_to_be_alike(batch):
    def term(value_shape, weight_shape):
        sizes = [
            [size or 4 if axis == 0 else size or 5 for axis, size in enumerate(s)] for s in (value_shape, weight_shape)
        ]
        return traced_term(np.ones(sizes[0], "f"), np.ones(sizes[1], "f"), value_shape, weight_shape)[2:]

    assert term([batch], [batch]) == ("weights", 1.0)
    assert term([batch, 5], [batch]) == ("weights", 5.0)
    assert term([batch, 5, 3], [batch, 5]) == ("weights", 3.0)
    assert term([batch, 5, 3], [batch]) == ("weights", 15.0)
    assert term([batch, None], [batch, None]) == ("own", 1.0)
    assert term([batch, None], [batch]) == ("own", 1.0)


def test_weights_of_no_examples():
    total, divisor, _, _ = traced_term(np.ones([0, 5], "f"), np.ones([0, 1], "f"), [None, 5], [None, None])
    assert (total, divisor) == (0.0, 0.0)
