"""Parts of a batch, and products over all time steps, against NumPy's sums."""

import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.recurrent.hoisted import parts

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("batch", [1, 7, 8])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_parts_are_nearly_equal_and_join_again(number, batch):
    whole = tf.constant(RNG.normal(size=(5, batch, 2)))
    for size in (batch, tf.constant(batch)):
        cut = parts.Parts(number, size)
        pieces = cut.cut_all([whole, None], axis=1)
        sizes = [piece.shape[1] for piece, nothing in pieces if nothing is None]
        assert len(sizes) == number and sum(sizes) == batch and max(sizes) - min(sizes) <= 1
        [joined] = cut.join_all([(piece,) for piece, _ in pieces], axis=1)
        np.testing.assert_array_equal(joined, whole)


def test_products_over_all_time_steps():
    inputs, kernel, bias = RNG.normal(size=(5, 3, 2)), RNG.normal(size=(2, 4)), RNG.normal(size=4)
    found = parts.project(*map(tf.constant, (inputs, kernel, bias)))
    np.testing.assert_allclose(found, np.einsum("tbi,io->tbo", inputs, kernel) + bias)
    np.testing.assert_allclose(parts.project(tf.constant(inputs), tf.constant(kernel), None), found - bias)
    np.testing.assert_allclose(parts.column_sums(tf.constant(kernel)), kernel.sum(axis=0))


@pytest.mark.parametrize("time", [1, 5])
def test_states_before_times_deltas(time):
    initial, states = RNG.normal(size=(3, 2)), RNG.normal(size=(time, 3, 2))
    delta = RNG.normal(size=(time, 3, 4))
    before = np.concatenate([initial[None], states[:-1]])
    found = parts.times_before(*map(tf.constant, (initial, states, delta.reshape(-1, 4))))
    np.testing.assert_allclose(found, np.einsum("tbi,tbo->io", before, delta))
