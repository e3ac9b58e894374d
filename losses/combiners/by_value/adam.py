"""A small Adam for the few numbers that a combiner learns, with one step count per number."""

import tensorflow as tf


def adam(gradient, mean, square, count, learning_rate):
    """One Adam step (beta 0.9 and 0.999, epsilon 1e-8): the change, and the new mean, square and count.

    All tensors are [K] float32. The caller decides which entries to keep, so that an absent loss does not change.

    >>> zero = tf.zeros([2])
    >>> change, _, _, count = adam(tf.constant([3.0, -1.0]), zero, zero, zero, 0.1)
    >>> change.numpy().round(4).tolist(), count.numpy().tolist()
    ([-0.10000000149011612, 0.10000000149011612], [1.0, 1.0])
    """
    count = count + 1.0
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * tf.square(gradient)
    corrected = square / (1.0 - tf.pow(0.999, count))
    change = -learning_rate * mean / (1.0 - tf.pow(0.9, count)) / (tf.sqrt(corrected) + 1e-8)
    return change, mean, square, count


class Learned:
    """Mixin for combiners that learn one number per loss: the variables of its Adam, and the step."""

    def create_adam(self, count):
        for name in ("adam_mean", "adam_square", "adam_count"):
            self.add(name, tf.zeros([count]))

    def adam_step(self, gradient, moving):
        """Updates the Adam variables and returns the change of the learned numbers, 0 where `moving` is False."""
        gradient = tf.clip_by_value(gradient, -1e12, 1e12)  # an infinite square would stay for ever
        change, mean, square, count = adam(
            gradient, self.adam_mean, self.adam_square, self.adam_count, self.learning_rate
        )
        self.adam_mean.assign(tf.where(moving, mean, self.adam_mean))
        self.adam_square.assign(tf.where(moving, square, self.adam_square))
        self.adam_count.assign(tf.where(moving, count, self.adam_count))
        return tf.where(moving, change, 0.0)
