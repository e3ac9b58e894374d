"""The fully connected recurrent layer (Elman 1990) in the form of `keras.layers.SimpleRNN`: h ← tanh(x W + h U + b)."""

import functools

import tensorflow as tf

from looptape.trainer.recurrent.hoisted import both_ways
from looptape.trainer.recurrent.hoisted.cells.recurrence import Recurrence
from looptape.trainer.recurrent.hoisted.parts import column_sums


class _SimpleRNN(Recurrence):
    states = 1
    kept = ()
    extra = ()

    def step(self, projected, states, recurrent):
        return (tf.tanh(projected + tf.matmul(states[0], recurrent[0])),), ()

    def factors(self, kept, before, after):
        return (1 - after[0] * after[0],)

    def backward_step(self, adjoints, factors, transposed):
        return (tf.matmul(adjoints[0] * factors[0], transposed[0]),), ()

    def deltas(self, adjoints, extra, factors):
        return (adjoints[0] * factors[0],), ()

    def weight_gradients(self, deltas, operands, times_hidden):
        return times_hidden(deltas[0]), column_sums(deltas[0])


run = functools.partial(both_ways.run, _SimpleRNN())
