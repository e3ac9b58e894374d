"""`IdentityRNNCell`: a ReLU recurrent cell whose recurrent matrix starts as the identity."""

import keras


@keras.saving.register_keras_serializable(package="looptape")
class IdentityRNNCell(keras.layers.SimpleRNNCell):
    """h_t = relu(x_t K + h_{t-1} R + b), where R starts as `scale` times the identity (Le, Jaitly & Hinton 2015).

    At first the cell copies its state from step to step, so gradients reach back over any number of steps.

    >>> cell = IdentityRNNCell(2)
    >>> output, states = cell(keras.ops.zeros((1, 3)), [keras.ops.array([[1.0, 2.0]])])
    >>> output.numpy().tolist()
    [[1.0, 2.0]]

    Args:
        units: size of the state.
        scale: factor of the identity; below 1 the cell forgets.
        kernel_scale: initial standard deviation of the input kernel K; the paper uses 0.001, which learns slowly.
        **options: further arguments of `keras.layers.SimpleRNNCell`.
    """

    def __init__(self, units, scale=1.0, kernel_scale=0.03, **options):
        options.setdefault("activation", "relu")
        options.setdefault("kernel_initializer", keras.initializers.RandomNormal(stddev=kernel_scale))
        options.setdefault("recurrent_initializer", keras.initializers.Identity(gain=scale))
        super().__init__(units, **options)
        self.scale = scale
        self.kernel_scale = kernel_scale

    def get_config(self):
        return {**super().get_config(), "scale": self.scale, "kernel_scale": self.kernel_scale}
