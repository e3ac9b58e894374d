"""Checkpoints hold their state by stable paths: what a rename, a reordering or another process does to it."""

import json
import os
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.trainer.checkpoints import store as checkpoints
from looptape.trainer.checkpoints import trainer_state
from looptape.trainer.checkpoints.contents import state_names
from looptape.trainer.checkpoints.contents.state_names import Names
from tests.trainer.tools import assert_identical_weights, dataset, mse, regression

X, Y = regression(24)


def make(*names, activations=("tanh", "tanh", None), optimizer=None, **options):
    """Three square layers of these names; None for names that Keras makes up."""
    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Dense(3 if index < 2 else 1, activation=activation, name=name)
        for index, (name, activation) in enumerate(zip(names, activations, strict=True))
    ]
    model = keras.Sequential([keras.Input((3,)), *layers])
    return Trainer(model, optimizer or keras.optimizers.Adam(0.01), {"error": mse()}, **options)


def fit(trainer, workdir, steps=3):
    trainer.fit(dataset(X, Y, batch=4).repeat(), steps=steps, workdir=workdir, progress=False)
    return trainer


def contents(workdir):
    path, _ = checkpoints.Store(os.path.join(workdir, "checkpoints")).newest()
    return path, checkpoints.read_manifest(path)


def test_keys_are_paths_that_do_not_count_what_the_process_made_before(tmp_path):
    first = fit(make(None, None, None), tmp_path)
    path, manifest = contents(tmp_path)
    keys = list(manifest["contents"])
    assert manifest["format"] == 2
    assert keys[:6] == [f"model/sequential/dense{n}/{v}" for n in ("", "_1", "_2") for v in ("kernel", "bias")]
    assert "optimizer/sequential/dense_1/kernel/momentum" in keys and "trainer/step" in keys
    assert "optimizer/learning_rate" in keys
    keras.layers.Dense(2), keras.layers.Dense(2)  # Keras keeps counting
    second = make(None, None, None)
    assert second.model.layers[0].name != first.model.layers[0].name
    assert fit(second, tmp_path, steps=4).step.numpy() == 4


def test_made_up_names_keep_their_order_and_given_names_stay():
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(3, name="dense_41"),
            keras.layers.Dropout(0.5, name="drop_7"),
            keras.layers.Dense(3, name="dense_7"),
            keras.layers.Dense(3, name="block_2"),
        ],
        name="sequential_9",
    )
    names = Names([model])
    assert [names.of(v) for v in model.variables] == [
        *("sequential/dense_1/kernel", "sequential/dense_1/bias", "drop_7/seed_generator_state"),
        *("sequential/dense/kernel", "sequential/dense/bias", "sequential/block_2/kernel", "sequential/block_2/bias"),
    ]


def test_a_module_has_the_names_of_its_attributes():
    class Line(tf.Module):
        def __init__(self):
            super().__init__()
            self.slope, self.offsets = tf.Variable([1.0]), [tf.Variable([0.0]), tf.Variable([2.0])]

    line = Line()
    assert [Names([line]).of(v) for v in line.variables] == ["offsets/0", "offsets/1", "slope"]


def test_two_variables_of_one_path_and_one_variable_twice():
    a, b = object(), object()
    assert state_names.unique([("x", a), ("x", b), ("y", a)]) == {"x": a, "x (2)": b}


def test_layers_of_equal_shapes_in_another_order_are_refused(tmp_path):
    fit(make("a", "b", "c"), tmp_path)
    message = r"model's variables in another order.*model/sequential/b/kernel in place of model/sequential/a/kernel"
    with pytest.raises(ValueError, match=message):
        fit(make("b", "a", "c"), tmp_path, steps=4)


def test_a_mismatch_names_paths(tmp_path):
    fit(make("a", "b", "c"), tmp_path)
    with pytest.raises(ValueError, match=r"Not in the checkpoint: \['model/sequential/d/kernel'"):
        fit(make("a", "d", "c"), tmp_path, steps=4)


def test_unnamed_layers_that_were_exchanged_are_named(tmp_path):
    """Both are called by their class and place: only their options tell."""
    fit(make(None, None, None, activations=("tanh", "relu", None)), tmp_path)
    trainer = make(None, None, None, activations=("relu", "tanh", None))
    with pytest.warns(UserWarning, match=r"dense\.activation: tanh → relu; dense_1\.activation: relu → tanh"):
        fit(trainer, tmp_path, steps=4)


def to_format_1(workdir, trainer):
    """Rewrites the newest checkpoint as version 0.1 wrote it."""
    path, manifest = contents(workdir)
    [source] = trainer._engine.sources.values()
    state = trainer_state.tracked_state(trainer._engine, source)
    sections = {"model": "model", "metrics": "model", "forward": "model", "trainer": "trainer"}
    sections |= {"optimizer": "optimizer0", "minimizer": "minimizer0", "loss_weight": "minimizer0"}
    renamed, described = {}, {}
    for index, (name, item) in enumerate(state.items()):
        old = name if name == "iterator" else f"{sections[name.split('/')[0]]}_{index:04d}"
        renamed[old], described[old] = item, manifest["contents"][name]
    for name in manifest["files"]:
        os.remove(os.path.join(path, name))
    tf.train.Checkpoint(**renamed).write(checkpoints.prefix(path))
    manifest["files"] = {
        n: checkpoints._fingerprint(os.path.join(path, n)) for n in os.listdir(path) if n != checkpoints.MANIFEST
    }
    manifest["contents"], manifest["names"] = described, {name: name for name in described}
    for later in ("format", "checksum"):
        del manifest[later]
    del manifest["host"]["layers"]
    with open(os.path.join(path, checkpoints.MANIFEST), "w") as file:
        json.dump({**manifest, "checksum": checkpoints._checksum(manifest)}, file)


def test_a_checkpoint_of_the_first_format_is_read_by_position(tmp_path):
    old = fit(make(None, None, None), tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    to_format_1(tmp_path / "old", old)
    resumed = make(None, None, None)
    with pytest.warns(UserWarning, match="written by an earlier version of Looptape.*no layer was moved"):
        fit(resumed, tmp_path / "old", steps=6)
    assert_identical_weights(resumed.model, fit(make(None, None, None), tmp_path / "new", steps=6).model)
    assert contents(tmp_path / "old")[1]["format"] == 2

    to_format_1(tmp_path / "old", resumed)
    with pytest.raises(ValueError, match=r"numbered the variables, and has 23 of them; this trainer has 29"):
        fit(make(None, None, None, optimizer=keras.optimizers.Adam(0.01), ema_decay=0.9), tmp_path / "old", steps=9)


def test_a_checkpoint_of_a_later_format_is_refused(tmp_path):
    fit(make("a", "b", "c"), tmp_path)
    path, manifest = contents(tmp_path)
    manifest["format"] = 7
    del manifest["checksum"]
    with open(os.path.join(path, checkpoints.MANIFEST), "w") as file:
        json.dump({**manifest, "checksum": checkpoints._checksum(manifest)}, file)
    with pytest.raises(ValueError, match="has format 7; this version of Looptape reads formats up to 2"):
        fit(make("a", "b", "c"), tmp_path, steps=4)


def test_averages_weights_and_combiners_have_names(tmp_path):
    class Two(Trainer):
        def compute_losses(self, batch, training):
            error = tf.square(self.model(batch[0]) - batch[1])[:, 0]
            return {"error": error, "size": error + 1.0}

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="out")], name="net")
    options = {"combiner": "uncertainty", "metrics": {"mae": keras.metrics.MeanAbsoluteError()}, "ema_decay": 0.9}
    fit(Two(model, keras.optimizers.SGD(0.01), **options), tmp_path)
    keys = list(contents(tmp_path)[1]["contents"])
    expected = {"average/net/out/kernel", "loss_weight/error", "loss_weight/size", "metrics/mae/total"}
    assert expected <= set(keys) and any(key.startswith("combiner/") for key in keys)
    assert np.unique(keys).size == len(keys)
