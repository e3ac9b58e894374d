"""`SharedTrunk`: several task heads on one shared trunk."""

import keras


@keras.saving.register_keras_serializable(package="looptape")
class SharedTrunk(keras.Model):
    """Maps inputs [batch, features] to {head: output [batch, size]}. Outputs have no activation.

    A loss with the name of a head receives that head's output.

    Args:
        features: number of features of an input.
        heads: {name: size of the head's output}.
        units: size of each hidden layer of the trunk.
        head_units: size of one hidden layer in each head, or 0 for none.

    >>> outputs = SharedTrunk(features=3, heads={"label": 10, "price": 1})(keras.ops.zeros((2, 3)))
    >>> {name: tuple(value.shape) for name, value in outputs.items()}
    {'label': (2, 10), 'price': (2, 1)}
    """

    def __init__(self, features, heads, units=(64, 64), head_units=0, **options):
        if not heads:
            raise ValueError("`heads` is empty; it must be {name: size of its output}. Use e.g. {'label': 10}.")
        inputs = values = keras.Input((features,), name="features")
        for index, size in enumerate(units):
            values = keras.layers.Dense(size, activation="relu", name=f"trunk_{index}")(values)
        outputs = {}
        for name, size in heads.items():
            own = keras.layers.Dense(head_units, "relu", name=f"{name}_hidden")(values) if head_units else values
            outputs[name] = keras.layers.Dense(size, dtype="float32", name=name)(own)
        super().__init__(inputs, outputs, **options)
        self._arguments = {"features": features, "heads": dict(heads), "units": tuple(units), "head_units": head_units}

    def get_config(self):
        return {**self._arguments, "name": self.name}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return cls(**config)
