"""Random draws that are the same on every replica, after a restart, and with or without XLA.

TensorFlow's stateless floats differ between plain graph and XLA (measured with TensorFlow 2.21); its Philox integers
do not. So this module draws integers and converts them to floats.
"""

import tensorflow as tf


def uniform(seed, counter, shape):
    """Returns float32 draws in (0, 1) that depend only on the seed, the int64 counter and the shape.

    >>> draw = uniform(3, tf.constant(5, tf.int64), [2])
    >>> bool(tf.reduce_all(draw == uniform(3, tf.constant(5, tf.int64), [2])))
    True
    """
    pair = tf.stack([tf.cast(seed, tf.int64), tf.cast(counter, tf.int64)])
    bits = tf.random.stateless_uniform(shape, pair, minval=None, maxval=None, dtype=tf.uint32, alg="philox")
    return (tf.cast(tf.bitwise.right_shift(bits, tf.constant(9, tf.uint32)), tf.float32) + 0.5) * 2.0**-23


def normal(seed, counter, shape):
    """Returns float32 standard normal draws; arguments as for `uniform`."""
    return tf.math.ndtri(uniform(seed, counter, shape))


def permutations(seed, counter, count):
    """Returns [count, count] int32: `count` independent random orders of `range(count)`, one per row."""
    return tf.argsort(uniform(seed, counter, [count, count]), axis=-1)
