"""`ActorCritic`: a policy and a state value, on separate or shared layers."""

import keras


@keras.saving.register_keras_serializable(package="looptape")
class ActorCritic(keras.Model):
    """Maps observations [batch, features] to {"policy": logits [batch, actions], "value": [batch]}.

    Args:
        features: number of features of an observation.
        actions: number of discrete actions.
        units: size of each hidden layer.
        shared: whether policy and value share their hidden layers.

    >>> outputs = ActorCritic(features=4, actions=2)(keras.ops.zeros((3, 4)))
    >>> {name: tuple(value.shape) for name, value in outputs.items()}
    {'policy': (3, 2), 'value': (3,)}
    """

    def __init__(self, features, actions, units=(64, 64), shared=False, **options):
        observations = keras.Input((features,), name="observations")
        actor = self._hidden(observations, units, "shared" if shared else "actor")
        critic = actor if shared else self._hidden(observations, units, "critic")
        # A policy that starts nearly uniform explores; the small start is what makes it so.
        small = keras.initializers.Orthogonal(gain=0.01)
        policy = keras.layers.Dense(actions, kernel_initializer=small, dtype="float32", name="policy")(actor)
        value = keras.layers.Dense(1, kernel_initializer="orthogonal", dtype="float32", name="critic_value")(critic)
        value = keras.layers.Reshape((), name="value", dtype="float32")(value)
        super().__init__(observations, {"policy": policy, "value": value}, **options)
        self._arguments = {"features": features, "actions": actions, "units": tuple(units), "shared": shared}

    @staticmethod
    def _hidden(values, units, name):
        for index, size in enumerate(units):
            start = keras.initializers.Orthogonal(gain=2.0**0.5)
            values = keras.layers.Dense(size, "tanh", kernel_initializer=start, name=f"{name}_{index}")(values)
        return values

    def get_config(self):
        return {**self._arguments, "name": self.name}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return cls(**config)
