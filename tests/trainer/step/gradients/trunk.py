"""A trunk and two heads that want opposite things of it, for the tests of combiners; MGDA on it by hand."""

import keras
import numpy as np
import tensorflow as tf

from looptape import Trainer, losses
from tests.trainer.tools import dataset, regression

X, Y = regression(24)
RATE = 0.05


def count_backward(x, counter):
    """The identity, whose gradient counts how often it is taken."""

    @tf.custom_gradient
    def identity(x):
        def gradient(upstream):
            with tf.control_dependencies([counter.assign_add(1)]):
                return tf.identity(upstream)

        return tf.identity(x), gradient

    return identity(x)


class Conflicting(Trainer):
    """A trunk, and two heads that want opposite things of it."""

    passes = None

    def compute_losses(self, batch, training):
        x, y = batch
        features = self.model.get_layer("trunk")(x)
        if self.passes is not None:
            features = count_backward(features, self.passes)
        features = self.share(features)
        first, second = (self.model.get_layer(name)(features) for name in ("first", "second"))
        return {"first": tf.square(first - y)[:, 0], "second": (tf.square(second + 3.0 * y)[:, 0], self.mask(x))}

    @staticmethod
    def mask(x):
        return tf.cast(x[:, 0] > 0, tf.float32)


class Unshared(Conflicting):
    def share(self, tensor):
        return tensor


def trunk_and_heads():
    keras.utils.set_random_seed(4)
    inputs = keras.Input((3,))
    trunk = keras.layers.Dense(5, activation="tanh", name="trunk")(inputs)
    return keras.Model(inputs, [keras.layers.Dense(1, name=name)(trunk) for name in ("first", "second")])


def gradients_by_hand(model, static):
    """(dL/dh, dL/dv) of each loss, eager: lists of arrays."""
    with tf.GradientTape(persistent=True) as tape:
        h = model.get_layer("trunk")(X)
        tape.watch(h)
        first, second = (model.get_layer(name)(h) for name in ("first", "second"))
        mask = Conflicting.mask(tf.constant(X))
        pair = [
            static[0] * tf.reduce_mean(tf.square(first - Y)),
            static[1] * tf.reduce_sum(tf.square(second + 3 * Y)[:, 0] * mask) / tf.reduce_sum(mask),
        ]
    variables = [v.value for v in model.trainable_variables]
    rows = [tape.gradient(loss, variables, unconnected_gradients="zero") for loss in pair]
    return [tape.gradient(loss, h).numpy() for loss in pair], [[g.numpy() for g in row] for row in rows]


def min_norm(rows):
    """The weights of the shortest convex combination of two vectors, in closed form."""
    a, b = (np.concatenate([np.ravel(part) for part in row]).astype("float64") for row in rows)
    first = np.clip((b @ b - a @ b) / ((a - b) @ (a - b)), 0, 1)
    return np.array([first, 1 - first])


def mgda_by_hand(model, steps, place, heads="weighted", static=(1.0, 1.0)):
    """SGD on the shortest combination, where gradients are compared at the features or the trunk's variables."""
    for _ in range(steps):
        at_features, rows = gradients_by_hand(model, static)
        shared = [v.path.startswith("trunk") for v in model.trainable_variables]
        trunk = [[g for g, is_shared in zip(row, shared, strict=True) if is_shared] for row in rows]
        chosen = min_norm({"features": at_features, "trunk": trunk, "all": rows}[place])
        for index, variable in enumerate(model.trainable_variables):
            used = np.ones(2) if heads == "own" and not shared[index] else chosen
            variable.assign(variable - RATE * (used[0] * rows[0][index] + used[1] * rows[1][index]))
    return model


def mgda(trainer_class=Conflicting, steps=4, batch=24, attributes=None, **options):
    model = trunk_and_heads()
    cls = type("Made", (trainer_class,), attributes or {})
    trainer = cls(model, keras.optimizers.SGD(RATE), combiner=losses.MGDA(), **options)
    trainer.fit(dataset(X, Y, batch=batch).repeat(), steps=steps, progress=False)
    return trainer
