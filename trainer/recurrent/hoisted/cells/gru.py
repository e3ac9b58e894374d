"""Gated recurrent units (Cho et al. 2014) in the two forms of `keras.layers.GRU`.

z, r = σ of x W + h U + b        h ← z h + (1 - z) g
g = tanh(x W + b + r (h U + b'))     reset gate after the matrix product, `run`
g = tanh(x W + b + (r h) U)          reset gate before it, `run_reset_before`
"""

import functools

import tensorflow as tf

from looptape.trainer.recurrent.hoisted import both_ways
from looptape.trainer.recurrent.hoisted.cells.recurrence import Recurrence
from looptape.trainer.recurrent.hoisted.parts import column_sums


class _ResetAfter(Recurrence):
    states = 1
    kept = (2, 1, 1)  # z and r, g, h U + b' of the candidate
    extra = ()

    def operands(self, weights):
        kernel, recurrent, bias = weights
        if bias is None:
            return kernel, None, (recurrent,)
        return kernel, bias[0], (recurrent, bias[1])

    def transposed(self, recurrent):
        return (tf.transpose(recurrent[0]),)

    def step(self, projected, states, recurrent):
        inner = tf.matmul(states[0], recurrent[0])
        if len(recurrent) > 1:
            inner = inner + recurrent[1]
        units = states[0].shape[-1]
        gates, inner_g = tf.sigmoid((projected + inner)[:, : 2 * units]), inner[:, 2 * units :]
        z, r = tf.split(gates, 2, axis=-1)
        g = tf.tanh(projected[:, 2 * units :] + r * inner_g)
        return (z * states[0] + (1 - z) * g,), (gates, g, inner_g)

    def factors(self, kept, before, after):
        gates, g, inner_g = kept
        z, r = tf.split(gates, 2, axis=-1)
        to_g = (1 - z) * (1 - g * g)
        return (before[0] - g) * z * (1 - z), to_g * inner_g * r * (1 - r), to_g, to_g * r, z

    def backward_step(self, adjoints, factors, transposed):
        to_z, to_r, _, to_inner, z = factors
        (hidden,) = adjoints
        delta = tf.concat([hidden * to_z, hidden * to_r, hidden * to_inner], axis=-1)
        return (tf.matmul(delta, transposed[0]) + hidden * z,), ()

    def deltas(self, adjoints, extra, factors):
        to_z, to_r, to_g, to_inner, _ = factors
        (hidden,) = adjoints
        of_gates = [hidden * to_z, hidden * to_r]
        return tuple(tf.concat([*of_gates, hidden * last], axis=-1) for last in (to_g, to_inner)), ()

    def weight_gradients(self, deltas, operands, times_hidden):
        return times_hidden(deltas[1]), tf.stack([column_sums(delta) for delta in deltas])


class _ResetBefore(Recurrence):
    states = 1
    kept = (2, 1)  # z and r, g
    extra = (1,)  # dL/d(r h)

    def operands(self, weights):
        kernel, recurrent, bias = weights
        units = recurrent.shape[0]
        return kernel, bias, (recurrent[:, : 2 * units], recurrent[:, 2 * units :])

    def step(self, projected, states, recurrent):
        units = states[0].shape[-1]
        gates = tf.sigmoid(projected[:, : 2 * units] + tf.matmul(states[0], recurrent[0]))
        z, r = tf.split(gates, 2, axis=-1)
        g = tf.tanh(projected[:, 2 * units :] + tf.matmul(r * states[0], recurrent[1]))
        return (z * states[0] + (1 - z) * g,), (gates, g)

    def factors(self, kept, before, after):
        gates, g = kept
        z, r = tf.split(gates, 2, axis=-1)
        to_g = (1 - z) * (1 - g * g)
        return (before[0] - g) * z * (1 - z), before[0] * r * (1 - r), to_g, z, r, r * before[0]

    def backward_step(self, adjoints, factors, transposed):
        to_z, reset_to_r, to_g, z, r, _ = factors
        reset = tf.matmul(adjoints[0] * to_g, transposed[1])
        delta = tf.concat([adjoints[0] * to_z, reset * reset_to_r], axis=-1)
        return (tf.matmul(delta, transposed[0]) + adjoints[0] * z + reset * r,), (reset,)

    def deltas(self, adjoints, extra, factors):
        to_z, reset_to_r, to_g, *_, reset_hidden = factors
        delta = tf.concat([adjoints[0] * to_z, extra[0] * reset_to_r, adjoints[0] * to_g], axis=-1)
        return (delta,), (reset_hidden,)

    def weight_gradients(self, deltas, operands, times_hidden):
        units = operands[0].shape[-1]
        of_gates = times_hidden(deltas[0][:, : 2 * units])
        of_candidate = tf.matmul(operands[0], deltas[0][:, 2 * units :], transpose_a=True)
        return tf.concat([of_gates, of_candidate], axis=-1), column_sums(deltas[0])

    def factorised(self, inputs, before, deltas, operands):
        kernel, _, bias = super().factorised(inputs, before, deltas, operands)
        units = operands[0].shape[-1]
        return kernel, [(before, deltas[0][..., : 2 * units]), (operands[0], deltas[0][..., 2 * units :])], bias


run = functools.partial(both_ways.run, _ResetAfter())
run_reset_before = functools.partial(both_ways.run, _ResetBefore())
