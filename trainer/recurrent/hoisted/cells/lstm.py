"""Long short-term memory (Hochreiter & Schmidhuber 1997) in the form of `keras.layers.LSTM`.

i, f, g, o = σ, σ, tanh, σ of x W + h U + b
c ← f c + i g        h ← o tanh(c)
"""

import functools

import numpy as np
import tensorflow as tf

from looptape.trainer.recurrent.hoisted import both_ways
from looptape.trainer.recurrent.hoisted.cells.recurrence import Recurrence
from looptape.trainer.recurrent.hoisted.parts import column_sums


class _LSTM(Recurrence):
    states = 2
    kept = (4,)
    extra = ()

    def step(self, projected, states, recurrent):
        hidden, carry = states
        gates = _squash(projected + tf.matmul(hidden, recurrent[0]))
        i, f, g, o = tf.split(gates, 4, axis=-1)
        carry = f * carry + i * g
        return (o * tf.tanh(carry), carry), (gates,)

    def factors(self, kept, before, after):
        i, f, g, o = tf.split(kept[0], 4, axis=-1)
        squashed = tf.tanh(after[1])
        to_gates = g * i * (1 - i), before[1] * f * (1 - f), i * (1 - g * g), squashed * o * (1 - o)
        return *to_gates, o * (1 - squashed * squashed), f

    def backward_step(self, adjoints, factors, transposed):
        carry, delta = _through_gates(adjoints, factors)
        return (tf.matmul(delta, transposed[0]), carry * factors[-1]), ()

    def deltas(self, adjoints, extra, factors):
        _, delta = _through_gates(adjoints, factors)
        return (delta,), ()

    def weight_gradients(self, deltas, operands, times_hidden):
        return times_hidden(deltas[0]), column_sums(deltas[0])


def _squash(gates):
    """σ, σ, tanh, σ of the four gates. By σ(x) = (1 + tanh(x / 2)) / 2 it is one tanh of all columns, which XLA turns
    into vector instructions; a concatenation of four results it does not.
    """
    scale = np.repeat([0.5, 0.5, 1, 0.5], gates.shape[-1] // 4)
    scale, shift = tf.constant(scale, gates.dtype), tf.constant((scale < 1) / 2, gates.dtype)
    return tf.tanh(gates * scale) * scale + shift


def _through_gates(adjoints, factors):
    """dL/dc through both states, and dL/d(what the gates are applied to)."""
    hidden, carry = adjoints
    i, f, g, o, through_output, _ = factors
    carry = carry + hidden * through_output
    return carry, tf.concat([carry * i, carry * f, carry * g, hidden * o], axis=-1)


run = functools.partial(both_ways.run, _LSTM())
