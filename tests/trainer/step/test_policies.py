"""Pure float64, float16 and bfloat16 policies: trained as Keras trains them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.trainer.step.gradients import stages
from tests.trainer.tools import dataset, mse, regression

X, Y = regression(32)


@pytest.fixture
def policy(request):
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


def model():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3,)), *layers])


@pytest.mark.parametrize(("policy", "tolerance"), [("float64", 1e-5), ("bfloat16", 0.05)], indirect=["policy"])
def test_the_same_weights_as_keras(policy, tolerance):
    ours, theirs = model(), model()
    trainer = Trainer(ours, keras.optimizers.SGD(0.05), {"error": mse()}, clip_norm=1e6)
    trainer.fit(dataset(X, Y, batch=8), epochs=2, progress=False)
    theirs.compile(keras.optimizers.SGD(0.05), loss="mse")
    theirs.fit(dataset(X, Y, batch=8), epochs=2, verbose=0, shuffle=False)
    for left, right in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_allclose(left.astype("float64"), right.astype("float64"), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("policy", ["float64", "float16", "bfloat16"], indirect=True)
def test_accumulation_averages_probes_and_metrics(policy):
    keras.utils.set_random_seed(1)
    cells = keras.layers.GRU(3, return_sequences=True, recurrent_initializer="glorot_uniform")  # no QR in bfloat16
    model = keras.Sequential([keras.Input((4, 3)), cells, keras.layers.Dense(1)])
    options = {"accumulation_steps": 2, "ema_decay": 0.9, "clip_norm": 1.0, "probe_every": 2}
    metrics = {"mae": keras.metrics.MeanAbsoluteError()}
    trainer = Trainer(model, keras.optimizers.SGD(0.2), {"e": mse()}, metrics=metrics, **options)
    x = np.random.default_rng(0).normal(size=(16, 4, 3)).astype("float32")
    data = dataset(x, x[..., :1], batch=8)
    before = trainer.evaluate(data)["loss"]
    trainer.fit(data.repeat(), steps=30, progress=False)
    assert trainer.evaluate(data)["loss"] < 0.8 * before


def test_a_norm_of_half_precision_does_not_overflow():
    gradients = [tf.constant([300.0, 400.0], tf.float16), tf.constant([0.0], tf.float32)]
    assert float(stages.global_norm(gradients)) == pytest.approx(500.0)
    gradients = [tf.constant([3.0], tf.float64), tf.IndexedSlices(tf.constant([[4.0]]), tf.constant([0]), [2, 1])]
    assert float(stages.global_norm(gradients)) == pytest.approx(5.0)


class TwoLosses(Trainer):
    def compute_losses(self, batch, training):
        outputs = self.model(batch[0], training=training)
        return {"error": tf.square(outputs - batch[1])[..., 0], "size": tf.abs(outputs)[..., 0]}


def test_probes_with_accumulation_several_losses_and_an_unknown_batch_size():
    """Of a Dense layer on a sequence TensorFlow does not know the shape of the gradient."""
    x = np.random.default_rng(0).normal(size=(20, 5, 3)).astype("float32")
    found = []
    for probe_every in (0, 1):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.GRU(4, return_sequences=True), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5, 3)), *layers])
        trainer = TwoLosses(model, keras.optimizers.SGD(0.1), accumulation_steps=2, probe_every=probe_every)
        trainer.fit(dataset(x, x[..., :1], batch=8), epochs=2, progress=False)
        found.append(model.get_weights())
    for left, right in zip(*found, strict=True):
        np.testing.assert_array_equal(left, right)
