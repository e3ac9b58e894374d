"""Combiners that replace the gradients of the losses, through `Trainer.fit` against loops in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, losses
from looptape.losses.combiners.numerics.random import uniform
from tests.trainer.tools import dataset

RATE, UPDATES = 0.05, 7
RNG = np.random.default_rng(4)
X = RNG.normal(size=(16, 3)).astype("float32")
TARGETS = np.stack([X[:, 0] + 1.0, -X[:, 0] - 2.0], axis=1).astype("float32")
START = np.array([[0.3], [-0.2], [0.5]], "float32")


class TwoErrors(Trainer):
    def compute_losses(self, batch, training):
        output = self.model(batch[0], training=training)[:, 0]
        return {"first": tf.square(output - batch[1][:, 0]), "second": tf.square(output - batch[1][:, 1])}


def model():
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    made.layers[-1].kernel.assign(START)
    return made


def trained(combiner, accumulation_steps=1, **options):
    run = TwoErrors(
        model(), keras.optimizers.SGD(RATE), combiner=combiner, accumulation_steps=accumulation_steps, **options
    )
    run.fit(dataset(X, TARGETS, batch=16 // accumulation_steps).repeat(), steps=UPDATES, progress=False)
    return run.model.layers[-1].kernel.numpy()


def gradients(kernel):
    """(losses [2], gradients [2, 3]) in float64."""
    errors = (X.astype("float64") @ kernel) - TARGETS
    return (errors**2).mean(0), 2 * errors.T @ X.astype("float64") / len(X)


def by_hand(direction):
    kernel = START.astype("float64")
    for update in range(UPDATES):
        kernel = kernel - RATE * direction(update, *gradients(kernel))[:, None]
    return kernel


def config_direction(rows):
    rows = rows[np.linalg.norm(rows, axis=1) > 0]
    u = np.linalg.pinv(rows / np.linalg.norm(rows, axis=1, keepdims=True)) @ np.ones(len(rows))
    u /= np.linalg.norm(u)
    return (rows @ u).sum() * u


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_momentum_config(accumulation_steps):
    """One loss per update, the first two as soon as each was seen; bias-corrected momenta."""
    momenta, counts = np.zeros((2, 3)), np.zeros(2)

    def direction(update, values, rows):
        turn = update % 2
        momenta[turn] = 0.8 * momenta[turn] + 0.2 * rows[turn]
        counts[turn] += 1
        return config_direction(momenta / np.maximum(1 - 0.8**counts, 1e-300)[:, None] * (counts > 0)[:, None])

    found = trained(losses.MomentumConFIG(beta=0.8), accumulation_steps)
    np.testing.assert_allclose(found, by_hand(direction), rtol=2e-5)


def test_the_momentum_of_a_loss_that_was_switched_off_has_no_effect():
    """ConFIG counts each direction alike, however old the momentum is."""
    momenta, counts = np.zeros((2, 3)), np.zeros((2, 1))

    def direction(update, values, rows):
        turn, first_only = update % 2, update > 2
        if turn == 0 or not first_only:
            momenta[turn] = 0.8 * momenta[turn] + 0.2 * rows[turn]
            counts[turn] += 1
        corrected = momenta / np.where(counts > 0, 1 - 0.8**counts, 1.0)
        return config_direction(corrected[:1] if first_only else corrected)

    weights = {"first": 1.0, "second": losses.DisabledAfter(2)}
    found = trained(losses.MomentumConFIG(beta=0.8), loss_weights=weights)
    np.testing.assert_allclose(found, by_hand(direction), rtol=2e-5)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_db_mtl(accumulation_steps):
    buffers, seen = np.zeros((2, 3)), []

    def direction(update, values, rows):
        logs = rows / (values + 1e-8)[:, None]
        share = 0.6 / len(seen) ** 0.5 if seen else 0.0
        seen.append(update)
        buffers[:] = logs + share * (buffers - logs)
        norms = np.linalg.norm(buffers, axis=1)
        return (norms.max() / norms) @ buffers

    found = trained(losses.DBMTL(beta=0.6), accumulation_steps)
    np.testing.assert_allclose(found, by_hand(direction), rtol=2e-5)


def test_db_mtl_without_an_average_has_no_buffers():
    combiner = losses.DBMTL(beta=0.0)
    found = trained(combiner)

    def direction(update, values, rows):
        logs = rows / (values + 1e-8)[:, None]
        norms = np.linalg.norm(logs, axis=1)
        return (norms.max() / norms) @ logs

    np.testing.assert_allclose(found, by_hand(direction), rtol=2e-5)
    assert not [v.name for v in combiner.variables if "buffer" in v.name]


@pytest.mark.parametrize("leak", [0.0, 0.25])
def test_graddrop(leak):
    def direction(update, values, rows):
        draw = uniform(5 * 1_000_003, tf.constant(update, tf.int64), [3, 1]).numpy()[:, 0]
        positive = 0.5 * (1 + rows.sum(0) / np.abs(rows).sum(0)) > draw
        kept = np.where(positive, rows > 0, rows < 0)
        return np.where(kept, rows, leak * rows).sum(0)

    found = trained(losses.GradDrop(seed=5, leak=leak))
    np.testing.assert_allclose(found, by_hand(direction), rtol=2e-5)
    assert np.abs(found - by_hand(lambda update, values, rows: rows.sum(0))).max() > 1e-3


@pytest.mark.parametrize("make", [losses.GradDrop, losses.DBMTL, losses.MomentumConFIG])
def test_the_warmup_is_a_plain_sum(make):
    plain = by_hand(lambda update, values, rows: rows.sum(0))
    np.testing.assert_allclose(trained(make(warmup_steps=UPDATES)), plain, rtol=1e-5)


def test_a_frozen_momentum_config_is_a_plain_sum_and_keeps_its_momenta():
    run = TwoErrors(model(), keras.optimizers.SGD(RATE), combiner=losses.MomentumConFIG())
    data = dataset(X, TARGETS, batch=16).repeat()
    run.fit(data, steps=2, progress=False)
    run.combiner.freeze()
    before, kernel = [v.numpy() for v in run.combiner.buffers], run.model.layers[-1].kernel.numpy()
    run.fit(data, steps=3, progress=False)
    np.testing.assert_array_equal(before[0], run.combiner.buffers[0].numpy())
    expected = kernel - RATE * gradients(kernel.astype("float64"))[1].sum(0)[:, None]
    np.testing.assert_allclose(run.model.layers[-1].kernel.numpy(), expected, rtol=1e-5)


def test_shared_features_are_refused():
    class Shared(TwoErrors):
        def compute_losses(self, batch, training):
            features = self.share(self.model(batch[0], training=training))[:, 0]
            return {"first": tf.square(features - batch[1][:, 0]), "second": tf.square(features - batch[1][:, 1])}

    run = Shared(model(), keras.optimizers.SGD(RATE), combiner=losses.DBMTL())
    with pytest.raises(ValueError, match="DBMTL needs the gradients of weights, but features are shared.*Set"):
        run.fit(dataset(X, TARGETS, batch=16), steps=1, progress=False)


def test_buffers_of_other_variables_are_refused():
    combiner = losses.MomentumConFIG()
    combiner.build(["first", "second"])
    combiner.build_buffers([tf.zeros([3, 1])])
    with pytest.raises(ValueError, match=r"MomentumConFIG averages gradients of shapes \[\(3, 1\)\].*new trainer"):
        combiner.build_buffers([tf.zeros([3, 1]), tf.zeros([1])])
