"""Recurrent states on two devices against one: each of them keeps those of its rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, timesteps
from tests.trainer.tools import assert_identical_weights, assert_same_weights

BATCH, TIME = 4, 6
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3 * BATCH, TIME, 2)).astype("float32")
Y = RANDOM.normal(size=(3 * BATCH, TIME, 1)).astype("float32")
FLAGS = RANDOM.random([3 * BATCH, TIME]) < 0.3


def data(batch=BATCH, rows=slice(None)):
    parts = {"x": X[rows], "y": Y[rows], "flag": FLAGS[rows]}
    return tf.data.Dataset.from_tensor_slices(parts).batch(batch, drop_remainder=True)


def made(strategy, stateful=True, seed=1, return_state=False, **options):
    with strategy.scope() if strategy else tf.init_scope():
        keras.utils.set_random_seed(seed)
        inputs = keras.Input((None, 2), batch_size=BATCH)
        lower = keras.layers.LSTM(3, return_sequences=True, stateful=stateful, return_state=return_state, name="lower")(
            inputs
        )
        lower = lower[0] if return_state else lower
        upper = keras.layers.RNN(keras.layers.GRUCell(2), return_sequences=True, stateful=stateful)(lower)
        model = keras.Model(inputs, keras.layers.Dense(1)(upper))
        losses = {"error": keras.losses.MeanSquaredError()}
        return Trainer(model, keras.optimizers.SGD(0.2), losses, strategy=strategy, **options)


def states(trainer):
    return [state.numpy() for layer in trainer.model.layers for state in getattr(layer, "states", None) or ()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_state": True},
        *(pytest.param(x, marks=pytest.mark.long) for x in ({"jit_compile": True}, {"probe_every": 2})),
    ],
    ids=str,
)
def test_stateful_layers(options, two_devices):
    one, two = (made(strategy, **options) for strategy in (None, two_devices))
    for trainer in (one, two):
        trainer.fit(data().repeat(), steps=5, progress=False)
    assert_same_weights(one.model, two.model, tolerance=2e-6)
    for ours, theirs in zip(states(two), states(one), strict=True):
        assert np.abs(theirs).min() > 0
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    if not options:
        # The evaluation, too, carries them from batch to batch, and puts the training's back.
        assert one.evaluate(data())["loss"] == pytest.approx(two.evaluate(data())["loss"], rel=1e-5)
        for ours, theirs in zip(states(two), states(one), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-6)


@pytest.mark.parametrize("stateful", [pytest.param(False, marks=pytest.mark.long), True])
def test_windows_whose_rows_begin_anew(stateful, two_devices, tmp_path):
    options = {"bptt_window": 4, "bptt_updates": True, "bptt_begins": timesteps.Flags("flag"), "stateful": stateful}
    one, two = (made(strategy, **options) for strategy in (None, two_devices))
    for trainer in (one, two):
        trainer.fit(data().repeat(), steps=7, progress=False)
    assert_same_weights(one.model, two.model, tolerance=2e-6)
    if not stateful:
        made(two_devices, **options).fit(data().repeat(), steps=5, workdir=tmp_path, progress=False)
        again = made(two_devices, seed=2, **options)
        again.fit(data().repeat(), steps=7, workdir=tmp_path, progress=False)
        assert_identical_weights(two.model, again.model)


def test_what_does_not_fit_is_refused(two_devices):
    unknown = tf.data.Dataset.from_tensor_slices({"x": X, "y": Y}).batch(BATCH)
    with pytest.raises(ValueError, match="keeps a state for each of 4 rows, and each of 2 replicas has None rows"):
        made(two_devices).fit(unknown, epochs=1, progress=False)
