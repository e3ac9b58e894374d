"""What the tests of recurrent loops share: cells, and a way to run a model on Keras's loop or on ours."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from looptape.trainer.recurrent.core import RecurrentCore

BATCH, TIME, FEATURES, UNITS = 4, 6, 3, 4


class ReadCell(keras.layers.Layer):
    """A cell in two parts: `update` of its states, and `read`, which makes the output from them."""

    state_units = (UNITS,)
    output_size = UNITS

    @property
    def state_size(self):
        return list(self.state_units)

    def call(self, inputs, states):
        states = self.update(inputs, list(states))
        return self.read(inputs, states), states


class DiagonalCell(ReadCell):
    """A diagonal linear state-space model: s ← a·s + B x, y = C s + D x. A strict contraction."""

    output_size = 2

    def build(self, shape):
        self.decay = self.add_weight(shape=(UNITS,), initializer=keras.initializers.RandomUniform(0.5, 0.95))
        self.enter = self.add_weight(shape=(shape[-1], UNITS), name="enter")
        self.leave = self.add_weight(shape=(UNITS, 2), name="leave")
        self.skip = self.add_weight(shape=(shape[-1], 2), name="skip")

    def update(self, inputs, states):
        return [self.decay * states[0] + keras.ops.matmul(inputs, self.enter)]

    def read(self, inputs, states):
        return keras.ops.matmul(states[0], self.leave) + keras.ops.matmul(inputs, self.skip)


class NormalisedCell(ReadCell):
    """A GRU whose output is normalised."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner, self.norm = keras.layers.GRUCell(UNITS), keras.layers.LayerNormalization()

    def build(self, shape):
        self.inner.build(shape)
        self.norm.build((None, UNITS))

    def update(self, inputs, states):
        return self.inner(inputs, states)[1]

    def read(self, inputs, states):
        return self.norm(states[0])


class ProjectedCell(ReadCell):
    """An LSTM whose output is projected: its second state leads to the first within a time step."""

    state_units = (UNITS, UNITS)
    output_size = 2

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = keras.layers.LSTMCell(UNITS)

    def build(self, shape):
        self.inner.build(shape)
        self.leave = self.add_weight(shape=(UNITS, 2), name="leave")

    def update(self, inputs, states):
        return self.inner(inputs, states)[1]

    def read(self, inputs, states):
        return keras.ops.matmul(states[0], self.leave)


def make_inputs(seed=0, dtype="float32"):
    return tf.constant(np.random.default_rng(seed).normal(size=[BATCH, TIME, FEATURES]), dtype)


def make_mask():
    """Right-padded, with a hole, left-padded, complete."""
    mask = np.ones([BATCH, TIME], bool)
    mask[0, 3:] = mask[1, 2] = mask[2, :2] = False
    return mask


def loss_of(outputs, seed=1):
    """A loss that every output enters with a weight of its own."""
    weights = np.random.default_rng(seed).normal(size=[int(size) for size in outputs.shape])
    return tf.reduce_sum(tf.square(outputs) * tf.constant(weights, outputs.dtype))


def make_pass(model, core=None, mode="graph", mask=None, loss=loss_of, inputs=True):
    """A function of the inputs that gives (loss, outputs, gradients of the inputs and the weights)."""
    weights = [v.value for v in model.trainable_variables]
    options = {} if mask is None else {"mask": mask}

    def run(x):
        with tf.GradientTape() as tape:
            if inputs:
                tape.watch(x)
            with core.running() if core is not None else contextlib.nullcontext():
                outputs = model(x, training=True, **options)
            value = loss(outputs)
        sources = ([x] if inputs else []) + weights
        return value, outputs, tape.gradient(value, sources, unconnected_gradients="zero")

    if mode == "eager":
        return run
    return tf.function(run, autograph=False, jit_compile=mode == "xla" or None)


def run(model, x, **options):
    """One pass, flat."""
    return tf.nest.flatten(make_pass(model, **options)(x))


def make_core(model, **options):
    return RecurrentCore(model, **options)


def moved_by(model):
    """Everything that a forward pass may move: seeds, moving averages, and states of stateful layers."""
    found = [v.numpy() for v in model.variables if not v.trainable]
    for layer in [model, *getattr(model, "layers", ())]:
        if getattr(layer, "stateful", False):
            found += [state.numpy() for state in tf.nest.flatten(layer.states)]
    return found


def assert_same_bits(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        a, b = [tf.cast(x, tf.float64).numpy() for x in (a, b)]  # NumPy does not know bfloat16
        np.testing.assert_array_equal(a, b)
