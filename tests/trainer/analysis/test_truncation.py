"""Window advice: from matrices whose answer is known, and the truncated gradient against `tf.stop_gradient`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer import Trainer
from looptape.trainer.analysis import truncation

BATCH, TIME, FEATURES, UNITS = 3, 12, 2, 4


def geometric(gain, length=200):
    """M[s, t] = gain^(s−t)."""
    lags = np.subtract.outer(np.arange(length), np.arange(length))
    return np.where(lags >= 0, gain ** np.maximum(lags, 0), 0.0)


def test_a_geometric_memory_by_formula():
    """Windows of k keep 1 − g·(1 − g^k) / (k·(1 − g)) of Σ_d g^d; a loss reaches back until g^d < 5 %."""
    gain = 0.8
    advice = truncation.advice_of("loop", geometric(gain), present=10, keep=0.95)
    np.testing.assert_allclose(advice.by_lag[:5], gain ** np.arange(5))
    formula = [1 - gain * (1 - gain**k) / (k * (1 - gain)) for k in range(1, 101)]
    np.testing.assert_allclose(advice.kept[:100], formula, rtol=1e-6)
    assert advice.window == 1 + next(k for k, kept in enumerate(formula) if kept >= 0.95) == 80
    assert advice.reach == int(np.ceil(np.log(0.05) / np.log(gain))) == 14
    assert advice.present_kept == pytest.approx(formula[9])
    assert "keep 64% of the gradient (36% is cut off" in str(advice)


def test_a_memory_longer_than_the_batch():
    advice = truncation.advice_of("loop", geometric(1.0, 20), present=5, keep=0.95)
    assert advice.window == 0 and "try a batch of longer sequences" in str(advice)


def test_only_time_steps_with_a_loss_count():
    """A loss at the last time step alone: lag d has one value, and the empty rows are no zeros of the mean."""
    matrix = np.zeros((4, 4))
    matrix[3] = [1.0, 2.0, 3.0, 4.0]
    np.testing.assert_allclose(truncation.by_lag(matrix), [4, 3, 2, 1])


@pytest.fixture
def trainer_and_batch():
    return make()


def make(**options):
    rng = np.random.default_rng(1)
    model = keras.Sequential(
        [
            keras.Input((TIME, FEATURES)),
            keras.layers.Dense(3),
            keras.layers.LSTM(UNITS, return_sequences=True, name="loop", **options),
            keras.layers.Dense(1),
        ]
    )
    batch = (
        rng.normal(size=(BATCH, TIME, FEATURES)).astype("float32"),
        rng.normal(size=(BATCH, TIME, 1)).astype("float32"),
    )
    return Trainer(model, "sgd", {"error": lambda t, o: tf.square(t - o)}), batch


@pytest.mark.parametrize(("window", "backwards"), [(1, False), (5, False), (5, True)])
def test_the_truncated_gradient_equals_stopped_states(window, backwards):
    """The oracle: the layer's own cell in a Python loop, its states stopped between the windows of the inputs."""
    trainer, (x, y) = make(go_backwards=backwards)
    below, loop, above = trainer.model.layers
    gradients = []
    for cut in (None, window):
        with tf.GradientTape() as tape:
            features, states, outputs = below(x), [tf.zeros([BATCH, UNITS])] * 2, []
            for t in reversed(range(TIME)) if backwards else range(TIME):
                if cut is not None and (t + backwards) % cut == 0:
                    states = [tf.stop_gradient(state) for state in states]
                output, states = loop.cell(features[:, t], states)
                outputs.append(output)
            loss = tf.reduce_mean(tf.square(y - above(tf.stack(outputs, axis=1))))
        found = tape.gradient(loss, [variable.value for variable in trainer.model.trainable_variables])
        gradients.append(np.concatenate([np.ravel(gradient) for gradient in found]))
    whole, truncated = gradients
    error, cosine = truncation.truncation_error(trainer._engine, (x, y), window)
    norm = np.linalg.norm(whole)
    assert error == pytest.approx(np.linalg.norm(truncated - whole) / norm, rel=1e-4)
    assert cosine == pytest.approx(whole @ truncated / norm / np.linalg.norm(truncated), rel=1e-5)


def test_advice_of_a_trainer(trainer_and_batch):
    trainer, batch = trainer_and_batch
    advice = trainer.window_advice(batch, 4, keep=0.5)["loop"]
    matrix = trainer.credit_matrix(batch)["loop"]
    expected = truncation.advice_of("loop", matrix, 4, 0.5, *truncation.truncation_error(trainer._engine, batch, 4))
    for name, value, wanted in zip(advice._fields, advice, expected, strict=True):
        if not isinstance(value, str):
            np.testing.assert_allclose(value, wanted, rtol=1e-5, err_msg=name)
    assert 0 < advice.window <= TIME and 0 < advice.error < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": TIME}, "more than the window"),
        ({"window": 0}, "`window` is 0"),
        ({"window": 3, "keep": 1.5}, "`keep` is 1.5"),
    ],
)
def test_bad_input(trainer_and_batch, options, message):
    trainer, batch = trainer_and_batch
    with pytest.raises(ValueError, match=message):
        trainer.window_advice(batch, **options)
