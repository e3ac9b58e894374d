"""Runs that are resumed with other settings or data than they were begun with: each difference is named."""

import os
import re
import shutil
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import IndexedData, Stage, Trainer
from looptape.trainer.checkpoints.contents import compatibility
from looptape.trainer.data.source import IndexedSource
from tests.reliability.tools import Killed, Killer
from tests.trainer.tools import assert_identical_weights, dataset, linear_model, mse, regression

X, Y = regression(24)


def shuffled(batch=4, seed=1, buffer=24):
    tf.random.set_seed(4)  # a part of what a shuffle is seeded with
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(buffer, seed=seed).repeat().batch(batch)


class Doubled(Trainer):
    def compute_losses(self, batch, training):
        return {"error": 2.0 * tf.square(self.model(batch[0]) - batch[1])[:, 0]}


class Tripled(Trainer):
    def compute_losses(self, batch, training):
        return {"error": 3.0 * tf.square(self.model(batch[0]) - batch[1])[:, 0]}


def run(workdir, steps, data, cls=Trainer, loss=None, **options):
    trainer = cls(linear_model(), keras.optimizers.SGD(0.01), loss and {"error": loss}, **options)
    kind = {"steps": steps} if isinstance(steps, int) else {"epochs": steps[0]}
    trainer.fit(data, workdir=workdir, progress=False, **kind)
    return trainer


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("begun") / "run"
    run(workdir, 3, shuffled(), loss=mse())
    return workdir


CHANGES = {
    "batch size": ({}, {"batch": 6}, "batch_size of Batch: 4 → 6"),
    "shuffle seed": ({}, {"seed": 2}, "seed2 of Shuffle: 1 → 2"),
    "shuffle buffer": ({}, {"buffer": 12}, "buffer_size of Shuffle: 24 → 12"),
    "accumulation": ({"accumulation_steps": 2}, {}, "`accumulation_steps`: 1 → 2"),
    "clipping": ({"clip_norm": 0.5}, {}, "`clip_norm`: None → 0.5"),
    "XLA": ({"jit_compile": True}, {}, "`jit_compile`: False → True"),
    "loss": ({"loss": keras.losses.MeanAbsoluteError()}, {}, "MeanSquaredError.*→ MeanAbsoluteError"),
    "option of a loss": ({"loss": keras.losses.Huber(delta=2.0)}, {}, r"→ Huber.*'delta': 2\.0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_setting_is_named(change, begun, tmp_path, caplog):
    options, data, message = CHANGES[change]
    workdir = shutil.copytree(begun, tmp_path / "run")
    run(workdir, 5, shuffled(**data), **{"loss": mse(), **options})
    [record] = [r.getMessage() for r in caplog.records if "other settings" in r.getMessage()]
    assert re.search(message, record), record


def test_the_same_settings_are_resumed_without_a_word(begun, tmp_path, caplog):
    run(shutil.copytree(begun, tmp_path / "run"), 5, shuffled(), loss=mse())
    assert "other settings" not in caplog.text and "another run" not in caplog.text


def test_another_hook_is_named(tmp_path, caplog):
    run(tmp_path, 2, shuffled(), Doubled)
    run(tmp_path, 3, shuffled(), Doubled)
    assert "other settings" not in caplog.text
    run(tmp_path, 4, shuffled(), Tripled)
    assert "`compute_losses`: Doubled.compute_losses" in caplog.text


def noise(size):
    def apply(gradients, state, variables, step):
        return [size * gradient for gradient in gradients], state

    return [Stage("noise", lambda variables: (), apply)]


def test_options_of_stages_and_of_later_versions_are_named(tmp_path, caplog):
    def go(steps, size, threshold):
        caplog.clear()
        trainer = Trainer(linear_model(), keras.optimizers.SGD(0.01), {"error": mse()}, stages=noise(size))
        trainer.spike_threshold = threshold
        trainer.fit(shuffled(), steps=steps, workdir=tmp_path, progress=False)
        return [r.getMessage() for r in caplog.records if "other settings" in r.getMessage()]

    assert go(2, 1.0, 6.0) == [] and go(3, 1.0, 6.0) == []
    [message] = go(4, 5.0, 7.0)
    assert re.search(r"`spike_threshold`: 6.0 → 7.0; stage 'noise': .*'size': 1.0.*→ .*'size': 5.0", message), message


class Weighted(Trainer):
    weight = 1.0

    def train_step(self, batch):
        self.minimize(batch, loss_weights={"error": self.weight}, name="g")
        return {}


def test_new_weights_of_minimize_apply(tmp_path, caplog):
    """A step of SGD is the rate times the weight times the gradient."""

    def trained(weight, steps):
        trainer = Weighted(linear_model(), keras.optimizers.SGD(0.01), {"error": mse()})
        trainer.weight = weight
        trainer.fit(dataset(X, Y, batch=24).repeat(), steps=steps, workdir=tmp_path, progress=False)
        return trainer.model.get_weights()[0]

    before = trained(1.0, 1)
    after = trained(5.0, 2)
    model = linear_model()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(X) - Y))
    kernel, bias = (w - 0.01 * g for w, g in zip(model.weights, tape.gradient(loss, model.weights), strict=True))
    np.testing.assert_allclose(before, kernel, rtol=1e-5)
    slope = 2 * X.T @ (X @ kernel.numpy() + bias.numpy() - Y) / len(X)
    np.testing.assert_allclose(after, kernel - 0.01 * 5.0 * slope, rtol=1e-5)
    assert "'error' in minimize(name='g') was 1 when the checkpoint was made, and is 5 now. The new" in caplog.text


def test_the_checkpoints_of_another_run_are_named(begun, tmp_path, caplog):
    run(tmp_path / "own", 2, shuffled(), loss=mse())
    shutil.copytree(begun / "checkpoints" / "step-0000000003", tmp_path / "own" / "checkpoints" / "step-0000000003")
    run(tmp_path / "own", 4, shuffled(), loss=mse())
    assert "was written by another run" in caplog.text
    caplog.clear()
    run(tmp_path / "own", 5, shuffled(), loss=mse())
    assert "was written by another run" not in caplog.text


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((3, (X, Y)), ([2], (X, Y))),  # by epochs for steps: not repeated
        ((3, (X, Y)), (5, dataset(X, Y, batch=4).repeat())),
        ((3, shuffled()), (5, dataset(X, Y, batch=4).repeat())),
    ],
)
def test_other_data_are_refused_with_a_sentence(first, then, tmp_path):
    run(tmp_path, *first, loss=mse())
    with pytest.raises(ValueError, match=r"holds a position in other data: TensorSlice → .*; now they are TensorSlice"):
        run(tmp_path, *then, loss=mse())


class Shuffling(keras.utils.PyDataset):
    """Draws another order at the end of each pass."""

    def __init__(self):
        super().__init__()
        self.random, self.order = np.random.default_rng(3), np.arange(24)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        rows = self.order[4 * index : 4 * index + 4]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.random.shuffle(self.order)


@pytest.mark.filterwarnings("ignore:The position in this dataset cannot be saved")
def test_a_dataset_that_shuffles_at_the_end_of_a_pass_comes_back_in_the_same_order(tmp_path):
    def fit(trainer, name, callbacks=()):
        trainer.fit(
            Shuffling(), epochs=4, workdir=tmp_path / name, checkpoint_every=5, callbacks=callbacks, progress=False
        )
        return trainer

    make = lambda: Trainer(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()})  # noqa: E731
    whole, dying = fit(make(), "whole"), make()
    with pytest.raises(Killed):
        fit(dying, "killed", [Killer(dying, 22)])
    assert max(os.listdir(tmp_path / "killed" / "checkpoints")) == "step-0000000020"
    assert_identical_weights(fit(make(), "killed").model, whole.model)


def test_another_order_of_indexed_data_is_named(tmp_path, caplog):
    x = tf.random.stateless_normal([12, 3], [1, 2])

    def run(steps, **options):
        caplog.clear()
        data = IndexedData(12, lambda index: (x[index], x[index, :1]), **{"batch_size": 4, "seed": 1, **options})
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        Trainer(model, "sgd", {"error": "mse"}).fit(data, steps=steps, workdir=tmp_path, progress=False)
        return [r.getMessage() for r in caplog.records if "other settings" in r.getMessage()]

    assert run(2) == [] and run(3) == []
    [message] = run(4, seed=2)
    assert "data: IndexedData(12, batch_size=4, shuffle=True, seed=1" in message and "seed=2" in message
    [message] = run(5, seed=2, batch_size=3)
    assert "batch_size=4" in message and "batch_size=3" in message


class Unfreeze(keras.callbacks.Callback):
    """Unfreezes one layer and freezes another at a step."""

    def __init__(self, step):
        super().__init__()
        self._step = step

    def on_epoch_end(self, epoch, logs=None):
        if epoch + 1 == self._step:
            self.model.get_layer("first").trainable = True
            self.model.get_layer("last").trainable = False


def two_layers():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(3, name="first", trainable=False), keras.layers.Dense(1, name="last")]
    return keras.Sequential([keras.Input((3,)), *layers])


def test_layers_that_a_callback_froze_are_frozen_after_a_resume(tmp_path, caplog):
    data = dataset(*regression(), batch=8)

    def run(epochs, workdir, model=None):
        model = two_layers() if model is None else model
        trainer = Trainer(model, keras.optimizers.Adam(0.01), {"error": "mse"})
        trainer.fit(data, epochs=epochs, workdir=workdir, callbacks=[Unfreeze(2)], progress=False)
        return trainer

    whole = run(4, tmp_path / "whole")
    before = [v.numpy() for v in run(3, tmp_path / "parts").model.variables]
    caplog.clear()
    resumed = run(4, tmp_path / "parts")
    assert [layer.trainable for layer in resumed.model.layers] == [True, False]
    assert "other settings" not in caplog.text
    assert_identical_weights(whole.model, resumed.model)
    assert not np.array_equal(before[0], resumed.model.variables[0].numpy())  # what was unfrozen moves
    # Who builds the model with other layers frozen means it.
    other = two_layers()
    other.get_layer("first").trainable = True
    assert [layer.trainable for layer in run(5, tmp_path / "parts", other).model.layers] == [True, True]
    assert "frozen layers" in caplog.text


@pytest.mark.parametrize("size", [4, 5])
def test_another_number_of_workers_is_no_other_setting_of_indexed_data(size):
    """The pipelines differ: each makes its own rows, and only batches that do not divide are cut."""
    x = tf.random.stateless_normal([12, 3], [1, 2])
    data = IndexedData(12, lambda index: (x[index], x[index, :1]), batch_size=size)
    trainer = Trainer(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), "sgd", {"error": "mse"})
    described = []
    for count in (1, 2, 3):
        source = IndexedSource(data, True, types.SimpleNamespace(rank=count - 1, count=count))
        described.append(compatibility.describe_settings(trainer._engine, source))
        source.close()
    assert described[0] == described[1] == described[2]
    assert "IndexedData(12, " in described[0]["trainer"]["data"]
