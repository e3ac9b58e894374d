"""A batch in parts, whose loops run side by side, and matrix products over all time steps."""

import tensorflow as tf


class Parts:
    """Cuts tensors into parts of nearly the same number of examples, and joins them.

    Args:
        number: of parts.
        batch: number of examples, an integer or a tensor.
    """

    def __init__(self, number, batch):
        self.number = number
        self._sizes = [(batch + place) // number for place in range(number)] if number > 1 else None

    def cut(self, tensor, axis):
        """A list with one piece of a tensor, or None, per part."""
        if tensor is None or self._sizes is None:
            return [tensor] * self.number
        return tf.split(tensor, self._sizes, axis, num=self.number)

    def cut_all(self, tensors, axis):
        """A list with a tuple of pieces per part."""
        return list(zip(*(self.cut(tensor, axis) for tensor in tensors), strict=True))

    def join_all(self, pieces, axis):
        """The reverse of `cut_all`: a tuple of whole tensors."""
        return tuple(tf.concat(own, axis) if len(own) > 1 else own[0] for own in zip(*pieces, strict=True))


def flat(tensor):
    """[time, batch, width] as [time * batch, width]."""
    return tf.reshape(tensor, [-1, tensor.shape[-1]])


def column_sums(rows):
    """The sums over the first axis, as a product with ones, which is faster than a reduction over rows."""
    return tf.linalg.matvec(rows, tf.ones(tf.shape(rows)[:1], rows.dtype), transpose_a=True)


def project(inputs, kernel, bias):
    """The inputs of all time steps times the kernel, [time, batch, columns], in one matrix product."""
    product = tf.matmul(flat(inputs), kernel)
    if bias is not None:
        product = tf.nn.bias_add(product, bias)
    shape = tf.concat([tf.shape(inputs)[:2], [kernel.shape[-1]]], 0)
    return tf.ensure_shape(tf.reshape(product, shape), [*inputs.shape[:2], kernel.shape[-1]])


def times_before(initial, states, delta):
    """The sum over time steps and examples of (state before) ⊗ delta. Copies no states.

    Args:
        initial: [batch, units].
        states: [time, batch, units], after each time step.
        delta: [time * batch, width].
    """
    batch = tf.shape(initial)[0]
    rest = tf.matmul(flat(states[:-1]), delta[batch:], transpose_a=True)
    return rest + tf.matmul(initial, delta[:batch], transpose_a=True)
