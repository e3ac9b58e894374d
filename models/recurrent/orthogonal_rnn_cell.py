"""`OrthogonalRNNCell`: a recurrent cell whose recurrent matrix stays orthogonal during training."""

import keras
import tensorflow as tf


def reflect(hidden, vectors):
    """Multiplies `hidden` [batch, units] by the orthogonal matrix I − V S⁻¹ Vᵀ.

    S is the upper triangle of VᵀV with half its diagonal. The matrix is the product of the Householder reflections of
    V's columns (the compact WY form). It is exactly orthogonal for every V [units, reflections] without zero columns.
    """
    gram = tf.matmul(vectors, vectors, transpose_a=True)
    upper = tf.linalg.band_part(gram, 0, -1) - 0.5 * tf.linalg.diag(tf.linalg.diag_part(gram))
    # hidden V S⁻¹ = (S⁻ᵀ (hidden V)ᵀ)ᵀ
    weights = tf.linalg.triangular_solve(upper, tf.matmul(vectors, hidden, True, True), lower=False, adjoint=True)
    return hidden - tf.matmul(weights, vectors, True, True)


def modulus_relu(values, bias):
    """sign(x)·relu(|x| + b): the identity if b = 0, so that the state keeps its norm (Arjovsky et al. 2016)."""
    return tf.sign(values) * tf.nn.relu(tf.abs(values) + bias)


@keras.saving.register_keras_serializable(package="looptape")
class OrthogonalRNNCell(keras.layers.Layer):
    """h_t = modReLU(x_t K + h_{t-1} Q + b), where Q is a product of reflections (Mhammedi et al. 2017).

    Q is always orthogonal. While the biases are 0, gradients neither vanish nor explode at any sequence length.

    Args:
        units: size of the state.
        reflections: number of reflections; `units` of them reach every orthogonal matrix, fewer are cheaper.
        start: the initial Q: "identity" (keeps the state) or "random" (mixes it).

    >>> cell = OrthogonalRNNCell(4, start="random")
    >>> state = keras.ops.ones((1, 4))
    >>> output, _ = cell(keras.ops.zeros((1, 3)), [state])
    >>> round(float(keras.ops.norm(output)), 4)  # the norm of the state is kept
    2.0
    """

    def __init__(self, units, reflections=16, start="identity", **options):
        super().__init__(**options)
        if units < 1 or reflections < 1:
            raise ValueError(f"`units` is {units} and `reflections` is {reflections}; both must be at least 1.")
        if start not in ("identity", "random"):
            raise ValueError(f"`start` is {start!r}; it must be 'identity' or 'random'.")
        self.start = start
        self.units = self.state_size = self.output_size = units
        self.reflections = reflections

    def build(self, input_shape):
        shape = (self.units, min(self.reflections, self.units))
        self.kernel = self.add_weight(shape=(input_shape[-1], self.units), initializer="glorot_uniform", name="kernel")
        self.vectors = self.add_weight(shape=shape, initializer=self._vectors, name="vectors")
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros", name="bias")

    def call(self, inputs, states, training=False):
        """Returns (output, [state]) of one time step. `keras.layers.RNN` and `LoopRNN` call it."""
        # In float32 also where the rest is float16: the solve has no other type, and the matrix is to stay orthogonal.
        turned = reflect(tf.cast(states[0], tf.float32), tf.cast(self.vectors, tf.float32))
        projected = tf.matmul(inputs, self.kernel) + tf.cast(turned, inputs.dtype)
        hidden = modulus_relu(projected, tf.cast(self.bias, inputs.dtype))
        return hidden, [hidden]

    def get_initial_state(self, batch_size=None):
        return [keras.ops.zeros((batch_size, self.units), dtype=self.compute_dtype)]

    def get_config(self):
        return {**super().get_config(), "units": self.units, "reflections": self.reflections, "start": self.start}

    def _vectors(self, shape, dtype=None):
        vectors = keras.random.normal(shape, dtype=dtype)
        if self.start == "random":
            return vectors
        # The same reflection twice is the identity; an odd one out remains a reflection.
        pairs = shape[1] // 2
        return tf.concat([tf.repeat(vectors[:, :pairs], 2, axis=1), vectors[:, 2 * pairs :]], axis=1)
