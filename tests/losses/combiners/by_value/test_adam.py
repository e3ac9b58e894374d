"""The combiners' Adam, against Keras's; numbers that pause keep their own count of steps."""

import keras
import numpy as np
import tensorflow as tf

from looptape.losses.combiners.by_value.adam import adam


def test_it_is_the_adam_of_keras():
    value = keras.Variable([1.0, -2.0, 3.0])
    optimizer = keras.optimizers.Adam(0.1, epsilon=1e-8)
    own = tf.constant([1.0, -2.0, 3.0])
    state = [tf.zeros([3])] * 3
    for gradient in np.random.default_rng(0).normal(size=(20, 3)).astype("float32"):
        optimizer.apply([tf.constant(gradient)], [value])
        change, *state = adam(tf.constant(gradient), *state, 0.1)
        own += change
        np.testing.assert_allclose(own, value.numpy(), atol=1e-5)


def test_each_number_counts_its_own_steps():
    """One that joins later begins like a new one."""
    mean, square = tf.constant([0.3, 0.0]), tf.constant([0.2, 0.0])
    change, *_ = adam(tf.constant([1.0, 1.0]), mean, square, tf.constant([9.0, 0.0]), 0.1)
    first, *_ = adam(tf.constant([1.0]), tf.zeros([1]), tf.zeros([1]), tf.zeros([1]), 0.1)
    np.testing.assert_allclose(change[1], first[0], rtol=1e-6)
    assert abs(change[0] - first[0]) > 0.01
