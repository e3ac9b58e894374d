"""Gradients at every position against `tape.gradient` of the layers' outputs; dead units; histograms."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.plugins.histogram import metadata as histogram_metadata

from looptape import Trainer
from looptape.dashboard import metadata
from looptape.trainer.health import histograms, layer_outputs
from looptape.trainer.summaries import event_writer
from tests.trainer.tools import dataset

LENGTH = 5


def attention_model(length=LENGTH, masked=False):
    keras.utils.set_random_seed(4)
    inputs = keras.Input((length,), dtype="int32")
    values = keras.layers.Embedding(7, 6, mask_zero=masked, name="embedding")(inputs)
    attended = keras.layers.MultiHeadAttention(2, 3, name="attention")(values, values)
    values = keras.layers.Add(name="sum")([values, attended])
    if not masked:
        values = keras.layers.Conv1D(4, 2, padding="causal", activation="relu", name="convolution")(values)
    return keras.Model(inputs, keras.layers.Dense(1, name="head")(values))


def tokens(count=8, length=LENGTH):
    generator = np.random.default_rng(1)
    return generator.integers(1, 7, (count, length)).astype("int32"), generator.normal(size=(count, length, 1)).astype(
        "float32"
    )


def squares(targets, outputs):
    return tf.square(outputs - targets)[..., 0]


def outside(model, x, y):
    """{layer: [positions]}: mean over examples of the norm of dL/d(output) times the number of examples."""
    names = ["embedding", "attention", "sum", "convolution", "head"]
    parts = keras.Model(model.input, [model.get_layer(name).output for name in names])
    with tf.GradientTape() as tape:
        outputs = parts(x)
        loss = tf.reduce_mean(tf.square(outputs[-1] - y))
    gradients = tape.gradient(loss, outputs)
    return {name: np.linalg.norm(g.numpy(), axis=-1).sum(axis=0) for name, g in zip(names, gradients, strict=True)}


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}, {"combiner": "pcgrad"}])
def test_positions_of_every_layer(options, tmp_path):
    x, y = tokens()
    model = attention_model()
    expected = outside(model, x, y)
    losses = {"error": squares}
    if "combiner" in options:
        losses = {"error": squares, "same": squares}
        options = {**options, "loss_weights": {"error": 0.25, "same": 0.75}}
    trainer = Trainer(model, keras.optimizers.SGD(0.1), losses, health_every=1, health="positions", **options)
    batch = 8 // options.get("accumulation_steps", 1)
    trainer.fit(dataset(x, y, batch=batch).repeat(), steps=1, progress=False, workdir=tmp_path)
    found = trainer.variable_health()[""]["positions"]
    assert list(found) == list(expected)
    for name, vector in expected.items():
        np.testing.assert_allclose(found[name], vector, rtol=1e-4, err_msg=name)
    written = {
        value.tag: value for _, value in event_writer.read(tmp_path / "train") if value.tag.startswith("position")
    }
    content = metadata.parse_content(written["position/attention/output"].metadata.plugin_data.content)
    assert content["axis"] == "position" and content["depth"] == 1 and content["layer"] == "attention"
    np.testing.assert_array_equal(tf.make_ndarray(written["position/sum/output"].tensor), found["sum"])


def test_positions_that_no_example_has():
    """Lengths are not known, micro-batches differ in length, padding is masked: NaN where nothing is valid."""
    x, y = tokens(4, 4)
    x[:, 3] = 0
    short = tf.data.Dataset.from_tensors((x[:, :4], y[:, :4]))
    long = tf.data.Dataset.from_tensors((np.pad(x, ((0, 0), (0, 2))), np.pad(y, ((0, 0), (0, 2), (0, 0)))))
    spec = (tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, None, 1], tf.float32))
    data = tf.data.Dataset.from_generator(lambda: iter([*short, *long]), output_signature=spec).repeat()
    trainer = Trainer(
        attention_model(None, masked=True),
        keras.optimizers.SGD(0.1),
        {"error": squares},
        health_every=1,
        health="positions",
        accumulation_steps=2,
    )
    trainer.fit(data, steps=1, progress=False)
    found = trainer.variable_health()[""]["positions"]["embedding"]
    assert found.shape == (6,)
    np.testing.assert_array_equal(np.isnan(found), [False, False, False, True, True, True])


def test_dead_units_over_all_micro_batches(tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "relu", name="hidden"), keras.layers.Dense(1)])
    x = np.abs(np.random.default_rng(0).normal(size=(8, 3))).astype("float32")
    kernel = np.ones((3, 4), "float32")
    kernel[:, 1] = -1  # never active
    kernel[:, 2] = 0
    model.layers[0].set_weights([kernel, np.array([0, 0, 0, -1.5], "float32")])  # the last one now and then
    expected = np.mean(~(np.maximum(x @ kernel + [0, 0, 0, -1.5], 0) != 0).any(axis=0))
    assert expected == 0.5
    trainer = Trainer(
        model, keras.optimizers.SGD(0.0), {"e": "mse"}, accumulation_steps=2, health_every=1, health=["activations"]
    )
    trainer.fit(dataset(x, x[:, :1], batch=4).repeat(), steps=10, progress=False, workdir=tmp_path)
    assert trainer.variable_health()[""]["dead"] == {"hidden": 0.5}
    assert [finding.layer for finding in trainer.diagnose() if finding.word == "dead units"] == ["hidden"]


class Block(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.inner = keras.layers.Dense(3, name="inner")

    def call(self, inputs):
        return inputs + self.inner(inputs)


def test_layers_of_ones_own_are_looked_into_and_left_as_they_were():
    model = keras.Sequential([keras.Input((4, 3)), Block(name="block"), keras.layers.Dense(1, name="head")])
    names = layer_outputs.named_layers(model)
    assert list(names) == ["block", "head", "inner"]
    with tf.GradientTape() as tape, layer_outputs.LayerOutputs(model, tape, True, False) as outputs:
        model(tf.ones([2, 4, 3]))
    assert list(outputs.outputs) == ["inner", "block", "head"]  # in the order in which they are done
    assert all("call" not in vars(layer) for layer in names.values())
    assert list(layer_outputs.named_layers(attention_model()))[:2] == ["embedding", "attention"]


def test_histograms_are_those_of_numpy():
    values = np.random.default_rng(0).normal(size=1000).astype("float32")
    bad = np.array([np.nan, 1.0, np.inf, 3.0], "float32")
    rows = histograms.count([tf.constant(values), tf.constant(bad), tf.constant([2.0, 2.0])]).numpy()
    counts, edges = np.histogram(values, histograms.BUCKETS)
    np.testing.assert_array_equal(rows[0, 2:], counts)
    np.testing.assert_allclose(rows[0, :2], edges[[0, -1]])
    assert rows[1, :2].tolist() == [1, 3] and rows[1, 2:].sum() == 2
    assert rows[2, :2].tolist() == [2, 2] and rows[2, -1] == 2
    summary = histograms.summary("weight/kernel", rows[0])
    buckets = tf.make_ndarray(summary.tensor)
    np.testing.assert_allclose(buckets[:, 0], edges[:-1], rtol=1e-5)
    np.testing.assert_array_equal(buckets[:, 2], counts)
    assert summary.metadata.plugin_data.plugin_name == histogram_metadata.PLUGIN_NAME
