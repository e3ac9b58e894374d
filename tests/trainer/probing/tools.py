"""What the tests of probing share: a table of layers, a way to run them probed, and an independent second opinion."""

import functools
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from looptape.models import LoopRNN
from looptape.trainer.probing import ProbeSession

BATCH, TIME, FEATURES, UNITS = 4, 5, 3, 4
MODES = ("eager", "graph", "xla")


@keras.saving.register_keras_serializable(package="tests")
class TwiceCell(keras.layers.Layer):
    """A user's own cell that reads one weight twice and whose output is one of its states."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = self.state_size = self.output_size = units

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], self.units), name="kernel")
        self.mixing = self.add_weight(shape=(self.units, self.units), name="mixing")

    def call(self, inputs, states):
        first = keras.ops.tanh(keras.ops.matmul(states[0], self.mixing) + keras.ops.matmul(inputs, self.kernel))
        output = keras.ops.tanh(keras.ops.matmul(first, self.mixing)) + 0.5 * states[0]
        return output, [output]

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class ReadoutCell(keras.layers.Layer):
    """A user's own cell whose output is not a state."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units, self.state_size, self.output_size = units, units, 2

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1] + self.units, self.units), name="kernel")
        self.readout = self.add_weight(shape=(self.units, 2), name="readout")

    def call(self, inputs, states):
        state = keras.ops.tanh(keras.ops.matmul(keras.ops.concatenate([inputs, states[0]], -1), self.kernel))
        return keras.ops.matmul(state, self.readout), [state]


def _layer(cls, **kwargs):
    return functools.partial(cls, UNITS, dtype="float64", **kwargs)


def _over(cls, cell, **kwargs):
    return lambda: cls(cell(), dtype="float64", **kwargs)


def _stack():
    cells = [keras.layers.LSTMCell(UNITS, dtype="float64"), keras.layers.GRUCell(3, dtype="float64")]
    return keras.layers.StackedRNNCells(cells, dtype="float64")


def _cell(cls):
    return functools.partial(cls, UNITS, dtype="float64")


LAYERS = {
    "simple": _layer(keras.layers.SimpleRNN),
    "lstm": _layer(keras.layers.LSTM, return_sequences=True),
    "lstm_last": _layer(keras.layers.LSTM),
    "gru": _layer(keras.layers.GRU, return_sequences=True),
    "gru_backwards": _layer(keras.layers.GRU, return_sequences=True, go_backwards=True, reset_after=False),
    "lstm_unrolled": _layer(keras.layers.LSTM, return_sequences=True, unroll=True, zero_output_for_mask=True),
    "stack": _over(keras.layers.RNN, _stack, return_sequences=True),
    "own_cell": _over(keras.layers.RNN, _cell(TwiceCell), return_sequences=True),
    "loop": _over(LoopRNN, _cell(keras.layers.LSTMCell), return_sequences=True),
}


def make_mask():
    """Right-padded, with a hole, left-padded, complete."""
    mask = np.ones([BATCH, TIME], bool)
    mask[0, 3:] = mask[1, 2] = mask[2, :2] = False
    return mask


def make_inputs(seed=0):
    return np.random.default_rng(seed).normal(size=[BATCH, TIME, FEATURES])


def loss_of(outputs, seed=1):
    """A loss that every output enters with a weight of its own."""
    weights = np.random.default_rng(seed).normal(size=[int(size) for size in outputs.shape])
    return tf.reduce_sum(tf.square(outputs) * tf.constant(weights, outputs.dtype)) / BATCH


class Run(NamedTuple):
    """The result of a probed pass, and of a plain one."""

    layer: Any
    plain: Any  # loss, outputs, gradients of the variables
    probed: Any
    report: Any
    sum_check: Any
    mask: Any


def as_mode(function, mode):
    """`function` run eagerly, traced or compiled."""
    if mode == "eager":
        return function
    return tf.function(function, jit_compile=mode == "xla", autograph=False)


@functools.cache
def run(kind, mode, masked):
    """The table: each cell is computed once for all tests that look at it."""
    keras.utils.set_random_seed(3)
    layer = LAYERS[kind]()
    inputs, mask = tf.constant(make_inputs()), make_mask() if masked else None
    layer(inputs, mask=mask)
    return compare(layer, inputs, mask, mode)


def compare(layer, inputs, mask, mode, loss=loss_of, **options):
    """Runs a layer plain and probed."""
    variables = list(layer.trainable_variables)
    sources = [variable.value for variable in variables]
    options = {"weights": "full", "full": True, **options}

    def plain(x):
        with tf.GradientTape() as tape:
            outputs = layer(x, mask=mask, training=True)
            value = loss(outputs)
        return value, outputs, tape.gradient(value, sources)

    def probed(x):
        session = ProbeSession(layer, **options)
        with tf.GradientTape() as tape:
            with session:
                outputs = layer(x, mask=mask, training=True)
            value = loss(outputs)
        gradients = tape.gradient(value, sources + session.sources)
        own, rest = gradients[: len(sources)], gradients[len(sources) :]
        check = session.sum_check(rest, variables, own) if options["weights"] == "full" else {}
        return value, outputs, own, session.report(rest, float(BATCH)), check

    first = as_mode(plain, "graph" if mode == "xla" else mode)(inputs)  # XLA comes close, and takes long
    second = as_mode(probed, mode)(inputs)
    return Run(layer, first, second[:3], second[3], second[4], mask)


@functools.cache
def opinion(kind, masked):
    """The second opinion on the table."""
    return second_opinion(run(kind, "eager", masked).layer, make_inputs(), make_mask() if masked else None)


class Second(NamedTuple):
    """The second opinion on one cell: gradients by iteration, each [time, batch, ...]."""

    states: Any  # [states] λ
    recurrent: Any  # [states] r
    external: Any  # e
    weights: Any  # {variable path: [time, ...]}


def second_opinion(layer, inputs, mask, loss=loss_of):
    """A Python loop, eager, with its own copy of each state, output, input and weight at each time step.

    Returns a `Second` for each cell, bottom first, and the gradients of the inputs [time, batch, features].
    """
    cells = getattr(layer.cell, "cells", [layer.cell])
    order = range(TIME - 1, -1, -1) if layer.go_backwards else range(TIME)
    copies = {key: [] for key in ("inputs",)}
    with tf.GradientTape() as tape:

        def copy(key, tensor):
            tensor = tf.identity(tensor)
            tape.watch(tensor)
            copies.setdefault(key, []).append(tensor)
            return tensor

        states = [
            [tf.zeros([BATCH, size], tf.float64) for size in keras.tree.flatten(cell.state_size)] for cell in cells
        ]
        outputs, previous = [], None
        for t in order:
            signal = copy("inputs", tf.constant(inputs[:, t]))
            valid = tf.constant(np.ones([BATCH, 1], bool) if mask is None else mask[:, t, None])
            for i, cell in enumerate(cells):
                entering = [copy(f"recurrent/{i}/{j}", state) for j, state in enumerate(states[i])]
                mapping = [(v, copy(v.path, v.value)) for v in cell.trainable_variables]
                with keras.StatelessScope(mapping):
                    output, new = cell(signal, entering)
                alias = [j for j, state in enumerate(new) if state is output]
                new = [copy(f"state/{i}/{j}", state) for j, state in enumerate(new)]
                signal = copy(f"external/{i}", new[alias[0]] if alias else output)
                states[i] = [tf.where(valid, n, o) for n, o in zip(new, entering, strict=True)]
            hidden = tf.zeros_like(signal) if previous is None or layer.zero_output_for_mask else previous
            previous = tf.where(valid, signal, hidden)
            outputs.append(previous)
        value = loss(tf.stack(outputs, 1) if layer.return_sequences else outputs[-1])

    found = tape.gradient(value, copies, unconnected_gradients="zero")

    def gradients(key):
        return np.stack([gradient.numpy() for gradient in found[key]])

    opinions = []
    for i, cell in enumerate(cells):
        count = len(states[i])
        opinions.append(
            Second(
                [gradients(f"state/{i}/{j}") for j in range(count)],
                [gradients(f"recurrent/{i}/{j}") for j in range(count)],
                gradients(f"external/{i}"),
                {v.path: gradients(v.path) for v in cell.trainable_variables},
            )
        )
    return opinions, gradients("inputs")


def norms(tensors):
    """[time, batch]: the norm over the features of tensors [time, batch, ...] taken together."""
    return np.sqrt(sum(np.sum(np.square(x), axis=tuple(range(2, x.ndim))) for x in tensors))
