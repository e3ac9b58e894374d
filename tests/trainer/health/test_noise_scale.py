"""The noise scale against its definition, on data of known covariance and on the parts of real updates."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.trainer.health import noise_scale
from tests.trainer.tools import dataset, linear_model, mse, regression


def parts_of(gradients, sizes):
    """(S, Q) of `estimate`, from the gradients of single examples, cut into parts of these sizes."""
    parts = np.split(gradients, np.cumsum(sizes)[:-1])
    scatter = sum(len(part) * np.sum(part.mean(axis=0) ** 2) for part in parts)
    return noise_scale.estimate(len(parts), len(gradients), scatter, np.sum(gradients.mean(axis=0) ** 2))


@pytest.mark.parametrize("sizes", [[8, 8, 8, 8], [16, 16], [3, 20, 9]])
def test_the_estimates_are_unbiased(sizes):
    """L = ‖w − x‖² / 2 with x of covariance Σ around μ: the gradient is w − μ, its covariance Σ."""
    generator = np.random.default_rng(0)
    covariance, mean = np.diag([4.0, 1.0, 0.25]), np.array([0.5, -0.5, 0.2])
    found = []
    for _ in range(4000):
        x = generator.multivariate_normal(mean, covariance, sum(sizes))
        found.append(parts_of(0.0 - x, sizes))
    spread, square = np.mean(found, axis=0)
    error = 4 * np.std(found, axis=0) / np.sqrt(len(found))
    assert abs(spread - np.trace(covariance)) < error[0]
    assert abs(square - np.sum(mean**2)) < error[1]
    averages = noise_scale.Averages()
    for each in found:
        averages.add("", *each)
    assert averages.rows() == 4000


def test_averages_are_of_the_sums_and_resume():
    averages = noise_scale.Averages()
    pairs = [(4.0, 1.0), (8.0, 1.0), (0.0, 3.0)]
    for pair in pairs:
        averages.add("a", *pair)
    weights = noise_scale.DECAY ** np.arange(3)[::-1]
    spread, square = weights @ np.array(pairs)
    assert averages.scales()["a"] == pytest.approx(spread / square)
    again = noise_scale.Averages()
    again.restore(averages.state())
    assert again.scales() == averages.scales()
    again.add("b", 1.0, -1.0)
    assert again.scales()["b"] == float("inf")


def outside(model, x, y, loss):
    with tf.GradientTape() as tape:
        mean = tf.reduce_mean(loss(model(x)[:, 0], y[:, 0]))
    gradients = tape.gradient(mean, [v.value for v in model.trainable_variables])
    return np.concatenate([np.ravel(gradient) for gradient in gradients])


LOSSES = {"square": lambda a, b: tf.square(a - b), "size": lambda a, b: tf.abs(a)}


@pytest.mark.parametrize("options", [{}, {"combiner": "pcgrad"}, {"probe_every": 1}])
def test_a_trainer_measures_the_parts_of_its_update(options, two_devices):
    """Two losses; whole, and each by itself where their gradients are taken. Weighted by their weights in the whole."""
    x, y = regression(24)
    names = {"square": 0.5, "size": 2.0}
    losses = {
        "square": lambda targets, outputs: tf.square(outputs - targets)[:, 0],
        "size": lambda targets, outputs: tf.abs(outputs)[:, 0],
    }
    model = linear_model()
    trainer = Trainer(
        model, keras.optimizers.SGD(0.0), losses, loss_weights=names, accumulation_steps=3, health_every=1, **options
    )
    each = {
        name: [outside(model, x[i : i + 8], y[i : i + 8], LOSSES[name]) for i in range(0, 24, 8)] for name in LOSSES
    }
    trainer.fit(dataset(x, y, batch=8).repeat(), steps=1, progress=False)

    def expected(parts):
        parts = np.array(parts, np.float64)
        spread, square = noise_scale.estimate(3, 24, 8 * np.sum(parts**2), np.sum(parts.mean(axis=0) ** 2))
        return spread / square if square > 0 else np.inf

    measured = trainer.noise_scale()
    if "combiner" not in options:
        whole = sum(weight * np.array(each[name]) for name, weight in names.items())
        assert measured["total"] == pytest.approx(expected(whole), rel=1e-3)
    assert set(measured) == ({"total", "square", "size"} if options else {"total"})
    for name in set(measured) - {"total"}:
        assert measured[name] == pytest.approx(expected(each[name]), rel=1e-3)


def test_replicas_are_parts_too(two_devices):
    x, y = regression(16)
    with two_devices.scope():
        model, optimizer = linear_model(), keras.optimizers.SGD(0.0)
    trainer = Trainer(model, optimizer, {"error": mse()}, strategy=two_devices, health_every=1)
    halves = [outside(model, x[i : i + 8], y[i : i + 8], LOSSES["square"]) for i in (0, 8)]
    trainer.fit(dataset(x, y, batch=16).repeat(), steps=1, progress=False)
    square = np.sum(np.mean(halves, axis=0) ** 2)
    spread, square = noise_scale.estimate(2, 16, 8 * np.sum(np.square(halves)), square)
    assert trainer.noise_scale()["total"] == pytest.approx(spread / square, rel=1e-3)


def test_it_says_what_it_needs():
    trainer = Trainer(linear_model(), "sgd", {"error": mse()}, health_every=1)
    with pytest.raises(
        ValueError, match="`accumulation_steps` is 1 and there is one replica. Use accumulation_steps=2"
    ):
        trainer.noise_scale()
    trainer = Trainer(linear_model(), "sgd", {"error": mse()}, accumulation_steps=2)
    with pytest.raises(ValueError, match="`health_every` is 0. Set e.g. health_every=100"):
        trainer.noise_scale()
