"""Layers that a program exchanged between attributes are found by the paths of these attributes."""

import json
import os

import keras
import numpy as np
import pytest

from looptape import Trainer
from looptape.trainer.checkpoints import store as checkpoints
from looptape.trainer.checkpoints.contents import layer_paths
from looptape.trainer.checkpoints.contents.state_names import Names
from tests.trainer.tools import assert_identical_weights, dataset, mse, regression

X, Y = regression(24)


class Pair(keras.Model):
    """Two square layers without a name, made in the given order of their attributes."""

    def __init__(self, *attributes, read=("first", "second"), name="pair"):
        super().__init__(name=name)
        for attribute in attributes:
            setattr(self, attribute, keras.layers.Dense(3))
        self.last, self._read = keras.layers.Dense(1, name="last"), read

    def call(self, inputs):
        for attribute in self._read:
            inputs = getattr(self, attribute)(inputs)
        return self.last(inputs)


def fit(model, workdir, steps, cls=Trainer):
    trainer = cls(model, keras.optimizers.Adam(0.01), {"error": mse()})
    trainer.fit(dataset(X, Y, batch=4).repeat(), steps=steps, workdir=workdir, progress=False)
    return trainer


def without_paths(workdir):
    """Rewrites the newest checkpoint as versions wrote it that did not know the paths."""
    path, _ = checkpoints.Store(os.path.join(workdir, "checkpoints")).newest()
    manifest = checkpoints.read_manifest(path)
    del manifest["host"]["layer_paths"], manifest["checksum"]
    with open(os.path.join(path, checkpoints.MANIFEST), "w") as file:
        json.dump({**manifest, "checksum": checkpoints._checksum(manifest)}, file)


def test_attributes_made_in_another_order_are_refused(tmp_path):
    fit(Pair("first", "second"), tmp_path, 2)
    message = r"weights of `first` .*now belongs to `second`.*weights of `second` .*now belongs to `first`"
    with pytest.raises(ValueError, match=message):
        fit(Pair("second", "first"), tmp_path, 4)
    whole = fit(Pair("first", "second"), tmp_path, 4)  # and nothing was lost
    assert whole.step.numpy() == 4


@pytest.mark.filterwarnings("ignore:The checkpoint .* was made with other layers")  # the values of `_read`
def test_a_checkpoint_without_paths_is_read_and_a_renamed_attribute_is_named(tmp_path):
    fit(Pair("first", "second"), tmp_path, 2)
    without_paths(tmp_path)
    resumed = fit(Pair("first", "second"), tmp_path, 3)
    renamed = Pair("entry", "second", read=("entry", "second"))
    with pytest.warns(UserWarning, match=r"`first` is now `entry`"):
        trainer = fit(renamed, tmp_path, 3)
    assert_identical_weights(trainer.model, resumed.model)


def test_a_network_beside_the_model_is_looked_at_too(tmp_path):
    class Beside(Trainer):
        order = ("first", "second")

        def compute_losses(self, batch, training):
            if not hasattr(self, "critic"):
                self.critic = Pair(*self.order, name="critic")
            return {"error": (self.critic(batch[0]) + self.model(batch[0]) - batch[1])[:, 0] ** 2}

    class Otherwise(Beside):
        order = ("second", "first")

    def run(cls, steps):
        trainer = cls(Pair("first", "second"), keras.optimizers.SGD(0.01))
        trainer.critic = Pair(*cls.order, name="critic")
        trainer.critic(X[:1])
        trainer.fit(dataset(X, Y, batch=4).repeat(), steps=steps, workdir=tmp_path, progress=False)

    run(Beside, 1)
    with pytest.raises(ValueError, match=r"weights of `critic/first`"):
        run(Otherwise, 2)


class Block(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self._inner = keras.layers.Dense(3)

    def build(self, shape):
        self.scale, self.shift = self.add_weight(shape=(3,)), self.add_weight(shape=(3,))

    def call(self, inputs):
        return self._inner(inputs) * self.scale + self.shift


class Nested(keras.Model):
    """Layers in lists, dicts, tuples, wrappers and models, and one that two attributes share."""

    def __init__(self):
        super().__init__()
        self.blocks = [Block(), (keras.layers.Activation("relu"), keras.layers.Dense(3))]
        self.heads = {"b": keras.layers.Dense(3), "a": [keras.layers.Dense(3)]}
        self.chain = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(3)])
        self.again = self.blocks[0]
        self.both = keras.layers.Bidirectional(keras.layers.SimpleRNN(2))

    def call(self, inputs):
        hidden = self.blocks[1][1](self.blocks[1][0](self.blocks[0](inputs)))
        hidden = self.chain(self.heads["a"][0](self.heads["b"](hidden)))
        return self.both(hidden[:, None])


def test_the_paths_of_nested_and_shared_layers():
    model = Nested()
    model(np.zeros([2, 3], np.float32))
    found = layer_paths.Places(model, Names([model])).of
    paths = {tuple(found(v)) for v in model.variables}
    assert paths == {
        *(("again/scale", "blocks/0/scale"), ("again/shift", "blocks/0/shift"), ("again/_inner",)),
        *(("blocks/1/0",), ("heads/b",), ("heads/a/0",), ("chain/dense_4",), ("chain/dense_5",)),
        *(("both/forward_layer/cell",), ("both/backward_layer/cell",)),
    }


def test_what_counts_as_moved():
    before = {"dense": ["first"], "dense_1": ["second"]}
    compare = lambda now, then=before: layer_paths.differences(then, now)  # noqa: E731
    assert compare(before) == ([], [])
    assert compare({"dense": ["second"], "dense_1": ["first"]})[0] == [("first", "second"), ("second", "first")]
    assert compare({"dense": ["second"], "dense_1": ["third"]})[0] == [("first", "second"), ("second", "third")]
    assert compare({"dense": ["entry"], "dense_1": ["second"]}) == ([], [("first", "entry")])
    assert compare({"dense": ["net/first"], "dense_1": ["net/second"]}) == ([], [])  # the model was wrapped
    assert compare(before, {"dense": ["net/first"], "dense_1": ["net/second"]}) == ([], [])
    swapped = {"dense": ["net/second"], "dense_1": ["net/first"]}  # wrapped, and in another order
    assert compare(swapped)[1] == [("first", "net/second"), ("second", "net/first")]
    assert compare({"dense": ["alias", "first"], "dense_1": ["second"]}) == ([], [])  # shared by one more attribute
