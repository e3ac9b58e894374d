"""Inner products of per-loss gradients: all that the direction methods need to know of them."""

import tensorflow as tf

ZERO = 1e-24  # a squared norm below this share of the Gramian's trace counts as no gradient at all


def gramian(gradients):
    """The [K, K] float32 matrix of inner products of K lists of gradients.

    `gradients[k][v]` is the gradient of loss k for variable v: a dense tensor, `tf.IndexedSlices` (made
    dense), or None where the loss does not reach the variable. Pure, traced or eager.

    >>> rows = [[tf.constant([-4.0, 1.0, 1.0])], [tf.constant([6.0, 1.0, 1.0])]]
    >>> gramian(rows).numpy().tolist()
    [[18.0, -22.0], [-22.0, 38.0]]
    """
    count = len(gradients)
    total = tf.zeros([count, count])
    for column in zip(*gradients, strict=True):
        flat = [None if g is None else tf.reshape(dense(g), [-1]) for g in column]
        example = next((g for g in flat if g is not None), None)
        if example is None:
            continue
        rows = tf.stack([tf.zeros_like(example) if g is None else g for g in flat])
        total += tf.matmul(rows, rows, transpose_b=True)
    return total


def dense(gradient):
    """A float32 tensor from a dense or sparse gradient."""
    return tf.cast(tf.convert_to_tensor(gradient), tf.float32)


def directions(matrix, present):
    """Norms [K], cosines [K, K] and liveness [K] from a Gramian; absent or without gradient is dead.

    Rows and columns of dead losses are zero in the cosines, and their norms are 1, so that divisions stay
    finite. Norms are divided by the largest one: only their ratios matter to a direction, and float32 stays
    in range.

    >>> norms, cosines, alive = directions(tf.constant([[4.0, 0.0], [0.0, 0.0]]), tf.constant([True, True]))
    >>> norms.numpy().tolist(), cosines.numpy().tolist(), alive.numpy().tolist()
    ([1.0, 1.0], [[1.0, 0.0], [0.0, 0.0]], [True, False])
    """
    squares = tf.where(present, tf.linalg.diag_part(matrix), 0.0)
    alive = squares > ZERO * tf.reduce_sum(squares)
    norms = tf.where(alive, tf.sqrt(tf.where(alive, squares, 1.0)), 1.0)
    both = alive[:, None] & alive[None, :]
    cosines = tf.where(both, matrix / norms[:, None] / norms[None, :], 0.0)
    cosines = tf.linalg.set_diag(tf.clip_by_value(cosines, -1.0, 1.0), tf.cast(alive, tf.float32))
    largest = tf.reduce_max(tf.where(alive, norms, 0.0))
    return tf.where(alive, norms / tf.where(largest > 0, largest, 1.0), 1.0), cosines, alive
