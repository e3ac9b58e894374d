"""`PhysicsInformedNetwork`: a smooth function of a few coordinates and its derivatives."""

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="looptape")
class PhysicsInformedNetwork(keras.Model):
    """Maps points x [batch, dimensions] to u(x) [batch, 1]: standardised inputs, tanh layers, Glorot-normal weights.

    Args:
        dimensions: number of coordinates of a point.
        units: size of each hidden layer.
        mean: mean of the points; one number, or one per dimension.
        scale: standard deviation of the points; one number, or one per dimension.

    >>> network = PhysicsInformedNetwork(dimensions=2)
    >>> value, slope, curvature = network.derivatives(tf.zeros([5, 2]))
    >>> tuple(value.shape), tuple(slope.shape), tuple(curvature.shape)
    ((5, 1), (5, 2), (5, 2))
    """

    def __init__(self, dimensions=2, units=(50, 50, 50), mean=0.0, scale=1.0, **options):
        points = keras.Input((dimensions,), name="points")
        mean, scale = (self._per_dimension(value, dimensions) for value in (mean, scale))
        values = keras.layers.Rescaling(
            [1.0 / s for s in scale], [-m / s for m, s in zip(mean, scale, strict=True)], name="standardised"
        )(points)
        for index, size in enumerate(units):
            layer = keras.layers.Dense(size, "tanh", kernel_initializer="glorot_normal", name=f"hidden_{index}")
            values = layer(values)
        readout = keras.layers.Dense(1, kernel_initializer="glorot_normal", dtype="float32", name="solution")
        super().__init__(points, readout(values), **options)
        self._arguments = {"dimensions": dimensions, "units": tuple(units), "mean": mean, "scale": scale}

    def derivatives(self, points):
        """Returns (u [batch, 1], ∂u/∂x_i [batch, dimensions], ∂²u/∂x_i² [batch, dimensions]) at the points.

        Eager or traced. A surrounding tape can differentiate through it.
        """
        columns = tf.unstack(points, axis=-1)
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(columns)
            with tf.GradientTape() as inner:
                inner.watch(columns)
                values = self(tf.stack(columns, axis=-1))
            first = inner.gradient(values, columns)
        second = [outer.gradient(slope, column) for slope, column in zip(first, columns, strict=True)]
        del outer
        return values, tf.stack(first, axis=-1), tf.stack(second, axis=-1)

    def get_config(self):
        return {**self._arguments, "name": self.name}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return cls(**config)

    @staticmethod
    def _per_dimension(value, dimensions):
        values = [float(v) for v in value] if isinstance(value, list | tuple) else [float(value)] * dimensions
        if len(values) != dimensions:
            raise ValueError(
                f"{value} has {len(values)} numbers for {dimensions} dimensions. Give one, or one per dimension."
            )
        return values
