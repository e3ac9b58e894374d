"""Norms of every variable against gradients of an outside tape and weights before and after, and the same bits."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.compat.proto import event_pb2

from looptape import Stage, Trainer
from looptape.dashboard import health_rows
from tests.trainer.tools import (
    assert_identical_weights,
    dataset,
    dense_model,
    mse,
    read_events,
    regression,
    weights,
)

X, Y = regression(64)
HALVE = Stage("halve", lambda variables: (), lambda g, state, variables, step: ([0.5 * x for x in g], state))


class Transforming(Trainer):
    def transform_gradients(self, gradients, variables):
        return [tf.clip_by_value(gradient, -0.3, 0.3) for gradient in gradients]


def rows_of(workdir):
    """{step: {tag: value}} of the run `train`."""
    found = {}
    for step, values in read_events(workdir / "train"):
        found.setdefault(step, {}).update(values)
    return found


def outside(model, x, y):
    """Gradients of the mean squared error by a tape of one's own."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    return [np.asarray(tf.convert_to_tensor(gradient)) for gradient in gradients]


def assert_health(health, model, gradients, before, after):
    paths = [v.path for v in model.trainable_variables]
    assert list(health["gradient"]) == paths
    for path, gradient, old, new in zip(paths, gradients, before, after, strict=True):
        assert health["gradient"][path] == pytest.approx(np.linalg.norm(gradient), rel=1e-4)
        assert health["weight"][path] == pytest.approx(np.linalg.norm(old), rel=1e-5)
        assert health["zeros"][path] == pytest.approx(np.mean(gradient == 0), abs=1e-6)
        if np.any(old):
            ratio = np.linalg.norm((new - old).astype(np.float64)) / np.linalg.norm(old)
            assert health["ratio"][path] == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_rows_are_what_the_update_really_did(accumulation_steps, tmp_path):
    """Clipping, a stage, `transform_gradients`, Adam with weight decay: ΔW is what is left after all of them."""
    made = []
    for every in (0, 3):
        optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.1)
        options = {"clip_norm": 0.5, "stages": [HALVE], "accumulation_steps": accumulation_steps}
        made.append(Transforming(dense_model(), optimizer, {"error": mse()}, health_every=every, **options))
    data = dataset(X, Y, batch=16 // accumulation_steps).repeat()
    plain, trainer = made
    plain.fit(data, steps=3, progress=False)
    trainer.fit(data, steps=2, progress=False, workdir=tmp_path)
    gradients, before = outside(trainer.model, X[32:48], Y[32:48]), weights(trainer.model)
    trainer.fit(data, steps=3, progress=False, workdir=tmp_path)
    assert_health(trainer.variable_health()[""], trainer.model, gradients, before, weights(trainer.model))
    assert_identical_weights(plain.model, trainer.model)
    # Read back from the event file, three digits are left.
    rows = [(step, row) for step, row in read_events(tmp_path / "train") if "health/ratio" in row]
    assert [step for step, _ in rows] == [1, 2, 3]  # those of the beginning, and every third
    row = rows[-1][1]
    for quantity in ("gradient", "weight", "ratio"):
        written = health_rows.decode(quantity, row[f"health/{quantity}"])
        np.testing.assert_allclose(written, list(trainer.variable_health()[""][quantity].values()), rtol=4e-3)
    finite = [ratio for ratio in trainer.variable_health()[""]["ratio"].values() if np.isfinite(ratio)]
    assert row["optimizer/update_ratio/largest"] == pytest.approx(max(finite), rel=1e-5)


def embedding_model():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Embedding(10, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


def test_sparse_gradients_and_frozen_layers(tmp_path):
    """Repeated indices count once, rows that are not named are zeros; frozen variables are not listed."""
    tokens = np.array([[1, 1, 2], [2, 7, 7]], "int32")
    model = embedding_model()
    trainer = Trainer(model, keras.optimizers.SGD(0.1), {"error": mse()}, health_every=1)
    gradients, before = outside(model, tokens, Y[:2]), weights(model)
    data = tf.data.Dataset.from_tensors((tokens, Y[:2])).repeat()
    trainer.fit(data, steps=1, progress=False, workdir=tmp_path)
    health = trainer.variable_health()[""]
    assert_health(health, model, gradients, before, weights(model))
    assert health["zeros"][model.layers[0].embeddings.path] == pytest.approx(0.7)
    model.layers[0].trainable = False
    trainer.fit(data, steps=2, progress=False, workdir=tmp_path)
    health = trainer.variable_health()[""]
    assert list(health["ratio"]) == [v.path for v in model.layers[2].trainable_variables]
    rows = rows_of(tmp_path)
    assert rows[1]["health/ratio"].shape == (3,) and rows[2]["health/ratio@2"].shape == (2,)
    assert [len(part) for part in trainer._engine.health_log._lists["/ratio"]] == [3, 2]


class Pair(Trainer):
    """Two minimizers, as in a GAN: one for each layer."""

    def train_step(self, batch):
        first, second = self.model.layers
        self.minimize(batch, variables=first.trainable_variables, name="first")
        self.minimize(batch, variables=second.trainable_variables, optimizer=self.slow, name="second")
        return {}


def test_each_minimizer_has_rows_of_its_own(tmp_path):
    trainer = Pair(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()}, health_every=1)
    trainer.slow = keras.optimizers.SGD(0.01)
    before, gradients = weights(trainer.model), outside(trainer.model, X[:8], Y[:8])
    trainer.fit(dataset(X, Y, batch=8).repeat(), steps=1, progress=False, workdir=tmp_path)
    health = trainer.variable_health()
    assert set(health) == {"first", "second"}
    kernel = trainer.model.layers[0].kernel.path
    assert health["first"]["gradient"][kernel] == pytest.approx(np.linalg.norm(gradients[0]), rel=1e-5)
    assert health["first"]["ratio"][kernel] == pytest.approx(
        0.1 * np.linalg.norm(gradients[0]) / np.linalg.norm(before[0]), rel=1e-4
    )
    row = rows_of(tmp_path)[1]
    assert row["health/first/ratio"].shape == row["health/second/ratio"].shape == (2,)
    assert row["optimizer/update_ratio/second/largest"] < row["optimizer/update_ratio/first/largest"]


def test_a_skipped_update_moves_nothing_and_shows_its_nan(tmp_path):
    x = X.copy()
    x[8] = np.nan  # in the second batch
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()}, health_every=2)
    trainer.fit(dataset(x, Y, batch=8).repeat(), steps=3, progress=False, workdir=tmp_path)
    health = trainer.variable_health()[""]
    assert all(np.isnan(norm) for norm in health["gradient"].values())
    assert all(ratio == 0 for ratio in health["ratio"].values())
    assert trainer.diagnose()[0].word == "NaN/Inf"
    row = rows_of(tmp_path)[2]
    assert np.isnan(health_rows.decode("gradient", row["health/gradient"])).all()


@pytest.mark.parametrize(
    "extra", [{}, pytest.param({"jit_compile": True}, marks=pytest.mark.long), {"run_eagerly": True}]
)
def test_the_same_bits_with_probes_and_all_parts(extra):
    """Health together with a probed update, with two losses, in every way an update can run."""
    x = np.random.default_rng(0).normal(size=(16, 5, 2)).astype("float32")
    data = dataset(x, x[:, :, :1], batch=8).repeat()

    def model():
        keras.utils.set_random_seed(2)
        layers = [keras.layers.GRU(3, return_sequences=True), keras.layers.Dense(1, "relu")]
        return keras.Sequential([keras.Input((5, 2)), *layers])

    losses = {"error": mse(), "size": lambda targets, outputs: tf.abs(outputs)[..., 0]}
    made = [
        Trainer(model(), keras.optimizers.SGD(0.1), losses, probe_every=2, **extra, **options)
        for options in ({}, {"health_every": 1, "health": "activations,histograms,positions"})
    ]
    for trainer in made:
        trainer.fit(data, steps=4, progress=False)
    assert_identical_weights(made[0].model, made[1].model)
    assert list(made[1].variable_health()[""]["positions"]) == [layer.name for layer in made[1].model.layers]


def test_the_first_steps_have_rows(tmp_path):
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()}, health_every=7)
    trainer.fit(dataset(X, Y, batch=8).repeat(), steps=8, progress=False, workdir=tmp_path)
    assert [step for step, row in rows_of(tmp_path).items() if "health/ratio" in row] == [1, 2, 5, 7]


def test_plain_updates_cost_nothing():
    """The traced loop has the same operations with `health_every` as without it, and is traced once."""
    graphs = []
    for every in (0, 2):
        trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()}, health_every=every)
        trainer.fit(dataset(X, Y, batch=8).repeat(), steps=5, progress=False)
        calls = trainer._engine.calls
        assert calls.traces == 1
        (concrete,) = calls._function._list_all_concrete_functions_for_serialization() or [None]
        graphs.append(sorted(op.type for op in concrete.graph.get_operations()))
    assert graphs[0] == graphs[1]


def test_two_devices_report_the_same(two_devices):
    reports = []
    for strategy in (None, two_devices):
        with (strategy or tf.distribute.get_strategy()).scope():
            model, optimizer = dense_model(), keras.optimizers.SGD(0.1)
        trainer = Trainer(model, optimizer, {"error": mse()}, health_every=1, strategy=strategy)
        trainer.fit(dataset(X, Y, batch=8).repeat(), steps=2, progress=False)
        reports.append([list(values.values()) for values in trainer.variable_health()[""].values()])
    np.testing.assert_allclose(reports[0], reports[1], rtol=1e-4)
    assert trainer.noise_scale()["total"] != 0


def test_a_row_of_a_hundred_variables_takes_less_than_a_kilobyte(tmp_path):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, name=f"hidden_layer_{index}") for index in range(50)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    trainer = Trainer(model, keras.optimizers.SGD(1e-3), {"error": mse()}, health_every=1)
    data = tf.data.Dataset.from_tensors((tf.ones([2, 4]), tf.ones([2, 4]))).repeat()
    trainer.fit(data, steps=25, progress=False, workdir=tmp_path, log_every=1000)
    (path,) = (tmp_path / "train").glob("events*")
    sizes = []  # of everything that came with a health row, in the file: a record has 16 bytes beside its content
    for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
        event = event_pb2.Event.FromString(record)
        if any(value.tag.startswith("health/") for value in event.summary.value):
            sizes.append(len(record) + 16)
    assert len(sizes) == 25 and np.mean(sizes[1:]) < 1024


def test_wrong_parts_are_refused():
    with pytest.raises(ValueError, match="`health` is 'gradients'.*'positions'.*Leave out"):
        Trainer(dense_model(), "sgd", {"error": mse()}, health="gradients")
    with pytest.raises(ValueError, match="`health_every` is -1"):
        Trainer(dense_model(), "sgd", {"error": mse()}, health_every=-1)
