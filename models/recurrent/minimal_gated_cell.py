"""`MinimalGatedCell`: a gated recurrent cell with a single gate."""

import keras
import tensorflow as tf


def minimal_gated_step(inputs, hidden, weights):
    """Returns the next state [batch, units] of a minimal gated unit: f = σ(…), h + f·(tanh(… f·h …) − h).

    Args:
        inputs: x K + b of gate and candidate, concatenated, [batch, 2·units].
        hidden: the last state, [batch, units].
        weights: the recurrent kernels of gate and candidate, each [units, units].
    """
    for_gate, for_candidate = tf.split(inputs, 2, axis=-1)
    gate_kernel, candidate_kernel = weights
    gate = tf.sigmoid(for_gate + tf.matmul(hidden, gate_kernel))
    candidate = tf.tanh(for_candidate + tf.matmul(gate * hidden, candidate_kernel))
    return hidden + gate * (candidate - hidden)


@keras.saving.register_keras_serializable(package="looptape")
class MinimalGatedCell(keras.layers.Layer):
    """A GRU with one gate that both forgets and resets, and two thirds of the weights (Zhou, Wu, Zhang & Zhou 2016).

    Args:
        units: size of the state.
        gate_bias: initial bias of the gate; the more negative, the longer the cell keeps its state.

    >>> layer = keras.layers.RNN(MinimalGatedCell(4))  # or LoopRNN(MinimalGatedCell(4))
    >>> tuple(layer(keras.ops.zeros((2, 7, 3))).shape)
    (2, 4)
    """

    def __init__(self, units, gate_bias=-1.0, **options):
        super().__init__(**options)
        if units < 1:
            raise ValueError(f"`units` is {units}; it must be at least 1.")
        self.units = self.state_size = self.output_size = units
        self.gate_bias = gate_bias

    def build(self, input_shape):
        units = self.units
        self.kernel = self.add_weight(shape=(input_shape[-1], 2 * units), initializer="glorot_uniform", name="kernel")
        # Two matrices of their own: an orthogonal start of [units, 2·units] would be one for neither.
        self.gate_kernel = self.add_weight(shape=(units, units), initializer="orthogonal", name="gate_kernel")
        self.candidate_kernel = self.add_weight(shape=(units, units), initializer="orthogonal", name="candidate_kernel")
        self.bias = self.add_weight(shape=(2 * units,), initializer=self._bias, name="bias")

    def call(self, inputs, states, training=False):
        """Returns (output, [state]) of one time step. `keras.layers.RNN` and `LoopRNN` call it."""
        projected = tf.matmul(inputs, self.kernel) + self.bias
        hidden = minimal_gated_step(projected, states[0], (self.gate_kernel, self.candidate_kernel))
        return hidden, [hidden]

    def get_initial_state(self, batch_size=None):
        return [keras.ops.zeros((batch_size, self.units), dtype=self.compute_dtype)]

    def get_config(self):
        return {**super().get_config(), "units": self.units, "gate_bias": self.gate_bias}

    def _bias(self, shape, dtype=None):
        half = shape[0] // 2
        return tf.concat([tf.fill([half], tf.cast(self.gate_bias, dtype)), tf.zeros([half], dtype)], axis=0)
