"""Models that compute something else with the same weights than in the checkpoint: each difference is named."""

import re
import warnings

import keras
import pytest
import tensorflow as tf

from looptape import Trainer
from tests.trainer.tools import dataset, regression

X, Y = regression(16)
WIDTH = X.shape[1]


class Scaled(keras.layers.Layer):
    """A layer of one's own, without `get_config`."""

    def __init__(self, scale):
        super().__init__(name="scaled")
        self.scale = scale

    def call(self, x):
        return self.activate(x * self.scale)

    def activate(self, x):
        return x


class Rectified(Scaled):
    def activate(self, x):
        return tf.nn.relu(x)


class Network(keras.Model):
    def __init__(self):
        super().__init__(name="network")
        self.inner = keras.layers.Dense(1, name="inner")

    def call(self, x):
        return self.inner(x)


class Squashed(Network):
    def call(self, x):
        return tf.tanh(self.inner(x))


for cls, original in ((Rectified, Scaled), (Squashed, Network)):
    cls.__name__ = original.__name__  # the same class, edited between two runs


def sequential(*layers, policy=None):
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1, name="last", dtype=policy)])


def functional(skip):
    inputs = keras.Input((WIDTH,), name="input")
    hidden = keras.layers.Dense(WIDTH, name="hidden")(inputs)
    hidden = keras.layers.Add(name="add")([hidden, inputs if skip else hidden])
    return keras.Model(inputs, keras.layers.Dense(1, name="last")(hidden))


def messages(workdir, model, steps):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(model, "sgd", {"error": "mse"}).fit(
            dataset(X, Y, batch=4).repeat(), steps=steps, workdir=workdir, progress=False
        )
    return " ".join(str(each.message) for each in caught)


CHANGES = {
    "method of a layer": (lambda: sequential(Scaled(1.0)), lambda: sequential(Rectified(1.0)), r"scaled\.call: "),
    "value in a layer": (
        lambda: sequential(Scaled(1.0)),
        lambda: sequential(Scaled(2.0)),
        r"'scale': 1.*'scale': 2",
    ),
    "call of a model": (Network, Squashed, r"model\.call: Network\.call .* → Squashed\.call"),
    "wiring": (
        lambda: functional(True),
        lambda: functional(False),
        r"add\(hidden, input\).* → .*add\(hidden, hidden\)",
    ),
    "precision": (sequential, lambda: sequential(policy="mixed_float16"), r"last\.precision: float32 → mixed_float16"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_computation_is_named(change, tmp_path):
    before, now, message = CHANGES[change]
    messages(tmp_path, before(), 2)
    if change == "precision":  # its loss scale is a piece of state that the checkpoint does not have
        with pytest.raises(ValueError, match="does not fit"):
            messages(tmp_path, now(), 3)
        return
    found = messages(tmp_path, now(), 3)
    assert re.search("made with other layers .*" + message, found), found


@pytest.mark.parametrize("make", [Network, lambda: functional(True), lambda: sequential(Scaled(1.0))])
def test_the_same_model_resumes_without_a_word(make, tmp_path):
    messages(tmp_path, make(), 2)
    assert "other layers" not in messages(tmp_path, make(), 3)
