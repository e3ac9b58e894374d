"""The two-dimensional toy problem of the CAGrad paper (Liu 2021), as one traced loop of Adam updates."""

import tensorflow as tf

from looptape.losses.combiners.numerics.gramian import gramian

STARTS = ((-8.5, 7.5), (-8.5, -5.0), (9.0, 9.0))


def toy_losses(x):
    """[2] losses at the point x [2]. `tf.maximum` passes the gradient to its first argument at equality."""
    x1, x2 = x[0], x[1]
    f1 = tf.math.log(tf.maximum(tf.abs(0.5 * (-x1 - 7.0) - tf.tanh(-x2)), 5e-6)) + 6.0
    f2 = tf.math.log(tf.maximum(tf.abs(0.5 * (-x1 + 3.0) + tf.tanh(-x2) + 2.0), 5e-6)) + 6.0
    c1 = tf.maximum(tf.tanh(0.5 * x2), 0.0)
    c2 = tf.maximum(tf.tanh(-0.5 * x2), 0.0)
    q1 = (tf.square(-x1 + 7.0) + 0.1 * tf.square(-x2 - 8.0)) / 10.0 - 20.0
    q2 = (tf.square(-x1 - 7.0) + 0.1 * tf.square(-x2 - 8.0)) / 10.0 - 20.0
    return tf.stack([f1 * c1 + q1 * c2, f2 * c1 + q2 * c2])


def descend(combiner, start, updates, learning_rate=1e-3):
    """The point and its losses after so many Adam updates. The combiner is built here."""
    combiner.build(["first", "second"])
    run = tf.function(_descend, autograph=False, jit_compile=True)
    point = run(combiner, tf.constant(start), tf.constant(updates), tf.constant(learning_rate))
    return point.numpy(), toy_losses(point).numpy()


def _descend(combiner, start, updates, learning_rate):
    def body(step, x, mean, square):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            losses = toy_losses(x)
            first, second = losses[0], losses[1]
        gradients = tf.stack([tape.gradient(first, x), tape.gradient(second, x)])
        measured = gramian([[gradients[0]], [gradients[1]]])
        coefficients = tf.cast(combiner.coefficients(losses, None, measured), tf.float64)
        update = tf.cast(tf.linalg.matvec(tf.cast(gradients, tf.float64), coefficients, transpose_a=True), tf.float32)
        count = tf.cast(step + 1, tf.float32)
        mean = 0.9 * mean + 0.1 * update
        square = 0.999 * square + 0.001 * tf.square(update)
        size = tf.sqrt(square / (1.0 - tf.pow(0.999, count))) + 1e-8
        return step + 1, x - learning_rate * mean / (1.0 - tf.pow(0.9, count)) / size, mean, square

    zero = tf.zeros([2])
    return tf.while_loop(lambda step, *_: step < updates, body, (0, start, zero, zero))[1]
