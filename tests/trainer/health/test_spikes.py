"""Spikes: the rule against NumPy, each policy against a run without it, and an exact resume."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.trainer.health import spikes
from looptape.trainer.step.nonfinite import NonFiniteUpdates
from tests.trainer.tools import (
    assert_identical_weights,
    assert_same_weights,
    dataset,
    dense_model,
    mse,
    read_events,
    regression,
)

X, Y = regression(240)
Y[200] += 400  # in batch 25 of 8
BAD = 25


class Watching(Trainer):
    spike_window = 20


class Recording(Watching):
    on_spike = "record"


class Skipping(Watching):
    on_spike = "skip"


class Restoring(Watching):
    on_spike = "restore"


class Raising(Watching):
    on_spike = "raise"


def run(cls, steps=30, workdir=None, **options):
    trainer = cls(dense_model(), keras.optimizers.Adam(0.01), {"error": mse()}, **options)
    batch = 8 // options.get("accumulation_steps", 1)
    data = dataset(X, Y, batch=batch).repeat()
    trainer.fit(data, steps=steps, progress=False, workdir=workdir, checkpoint_every=10)
    return trainer


@pytest.mark.parametrize("filled", [1, 11, 20])
def test_limits_are_those_of_numpy(filled):
    window = np.random.default_rng(filled).gamma(2.0, size=(2, 20)).astype("float32")
    found = spikes.limits(tf.constant(window), tf.constant(filled), 10.0).numpy()
    used = window[:, :filled]
    middle = (filled - 1) // 2  # the lower median
    median = np.sort(used, axis=1)[:, middle]
    spread = 1.4826 * np.sort(np.abs(used - median[:, None]), axis=1)[:, middle]
    limit = median + 10 * np.maximum(spread, 0.1 * np.abs(median))
    np.testing.assert_allclose(found, np.stack([median, limit], axis=1), rtol=1e-5)


def test_a_spike_is_recorded_and_let_through(tmp_path, caplog):
    """The weights are those of a run that does not look; the record has the step, the example and the layers."""
    plain, trainer = run(Watching), run(Recording, workdir=tmp_path)
    assert_identical_weights(plain.model, trainer.model)
    (finding,) = [finding for finding in trainer.diagnose() if finding.word == "spikes"]
    assert finding.text == "1 spike at step 25." and finding.value == 1
    (text,) = [row["spike"].item().decode() for step, row in read_events(tmp_path / "train") if "spike" in row]
    assert "after step 25 (batch 26)" in text and "let through" in text
    assert "largest for examples 0 (1.6" in text and trainer.model.layers[1].kernel.path in text
    assert trainer._engine.counters.skips.total == 0


def test_a_run_without_spikes_has_none():
    trainer = run(Recording, steps=20)
    assert trainer._engine.health_log.spikes == [] and not trainer.diagnose()


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}])
def test_a_skipped_spike_moves_nothing_and_resumes_exactly(options, tmp_path):
    whole = run(Skipping, **options)
    assert whole._engine.counters.skips.total == 1 and whole.step.numpy() == 30
    assert whole.optimizer.iterations.numpy() == 29
    run(Skipping, steps=23, workdir=tmp_path, **options)
    resumed = run(Skipping, workdir=tmp_path, **options)
    assert_identical_weights(whole.model, resumed.model)
    assert [spike.step for spike in resumed._engine.health_log.spikes] == [BAD]
    guards = [trainer._engine.main.spikes for trainer in (whole, resumed)]
    for one, other in zip(*(guard.variables for guard in guards), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_time_steps_and_health_of_a_spike():
    """In an update with health, of a recurrent model: the report names the time step that carried it."""
    x = np.random.default_rng(0).normal(size=(160, 6, 1)).astype("float32")
    y = np.zeros((160, 6, 1), "float32")
    y[120:128, 2] = 500.0
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6, 1)), keras.layers.GRU(3, return_sequences=True), keras.layers.Dense(1)])
    trainer = Recording(model, keras.optimizers.SGD(1e-3), {"error": mse()}, health_every=1)
    trainer.fit(dataset(x, y, batch=8).repeat(), steps=17, progress=False)
    (spike,) = trainer._engine.health_log.spikes
    assert spike.step == 15 and f"{model.layers[0].name}: the state gradient is largest at time steps 2 (" in spike.text
    assert trainer.step.numpy() == 17


def test_two_devices_skip_the_same(two_devices):
    made = []
    for strategy in (None, two_devices):
        with (strategy or tf.distribute.get_strategy()).scope():
            model, optimizer = dense_model(), keras.optimizers.SGD(0.01)
        trainer = Skipping(model, optimizer, {"error": mse()}, strategy=strategy)
        trainer.fit(dataset(X, Y, batch=8).repeat(), steps=28, progress=False)
        made.append(trainer)
    assert [[spike.step for spike in trainer._engine.health_log.spikes] for trainer in made] == [[BAD], [BAD]]
    assert_same_weights(made[0].model, made[1].model, 1e-5)


def test_restore_goes_back_and_on(tmp_path):
    trainer = run(Restoring, workdir=tmp_path)
    assert trainer._engine.counters.restores == 1 and trainer.step.numpy() == 30
    assert [spike.step for spike in trainer._engine.health_log.spikes] == [BAD]
    assert any("spike" in row and step == 20 for step, row in read_events(tmp_path / "train"))


def test_raise_ends_the_run_with_the_report():
    with pytest.raises(NonFiniteUpdates, match="(?s)after step 25 .*the run ends.*largest for examples 0"):
        run(Raising)


def test_a_level_that_has_changed_is_no_row_of_spikes():
    y = Y.copy()
    y[120:] += 1000
    trainer = Skipping(dense_model(), keras.optimizers.SGD(1e-4), {"error": mse()})
    with pytest.raises(NonFiniteUpdates, match="10 updates in a row were skipped as spikes: the level itself"):
        trainer.fit(dataset(X, y, batch=8).repeat(), steps=30, progress=False)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("on_spike", "jump", "`on_spike` is 'jump'; it must be one of ignore, record"),
        ("spike_threshold", 0, "`spike_threshold` is 0; it must be a positive number"),
        ("spike_window", 3, "`spike_window` is 3; it must be an integer of at least 10"),
    ],
)
def test_wrong_settings(name, value, message):
    cls = type("Wrong", (Recording,), {name: value})
    with pytest.raises(ValueError, match=message):
        run(cls, steps=1)


class Rivals(Watching):
    """Two minimizers, as in a GAN; the second meets the new weights of the first, on targets of its own."""

    def train_step(self, batch):
        x, (y, z) = batch
        first, second = self.model.layers
        noisy = x + 0.01 * keras.random.normal(tf.shape(x), seed=self.draws)
        self.minimize((noisy, y), self.distance, variables=first.trainable_variables, name="first")
        self.minimize(
            (noisy, z), self.distance, variables=second.trainable_variables, optimizer=self.other, name="second"
        )
        return {}

    def distance(self, batch, training):
        x, y = batch
        return {"distance": tf.square(self.model(x, training=training) - y)[:, 0]}


@functools.cache
def rivals(policy, without=(), health_every=0):
    """30 steps, fewer by the batches left out; the targets of the second have a spike in batch 25."""
    model = dense_model()
    trainer = Rivals(model, keras.optimizers.Adam(0.01), health_every=health_every)
    trainer.other, trainer.draws, trainer.on_spike = keras.optimizers.Adam(0.01), keras.random.SeedGenerator(3), policy
    kept = np.delete(np.arange(240), [8 * batch + i for batch in without for i in range(8)])
    data = tf.data.Dataset.from_tensor_slices((X[kept], (np.where(Y > 100, 0, Y)[kept], Y[kept]))).batch(8)
    trainer.fit(data.repeat(), steps=30 - len(without), progress=False)
    return trainer


# Step 26 is one with health if `every` is 2.
@pytest.mark.parametrize(
    ("policy", "every", "without"),
    [pytest.param("record", 0, (), marks=pytest.mark.long), ("record", 2, ()), ("skip", 2, (BAD,))],
)
def test_a_spike_of_one_of_several_minimizers(policy, every, without):
    """Let through: the weights are those of a run that does not look. Skipped: those of a run without that batch."""
    found, plain = rivals(policy, health_every=every), rivals("ignore", without)
    assert [spike.step for spike in found._engine.health_log.spikes] == [BAD]
    assert_identical_weights(plain.model, found.model)
    for optimizer in ("optimizer", "other"):
        assert getattr(found, optimizer).iterations.numpy() == getattr(plain, optimizer).iterations.numpy()
    np.testing.assert_array_equal(plain.draws.state.numpy(), found.draws.state.numpy())


class Averse(Recording):
    """Trains on losses that are not those of `compute_losses`."""

    def train_step(self, batch):
        self.minimize(batch, lambda batch, training: {"own": tf.abs(self.model(batch[0]) - batch[1])[:, 0]})
        return {}


def test_the_report_of_a_spike_has_the_losses_given_to_minimize():
    (spike,) = run(Averse)._engine.health_log.spikes
    size = float(Y[200, 0])
    assert "loss/own: largest for examples 0 (" in spike.text and "loss/error" not in spike.text
    assert float(spike.text.split("largest for examples 0 (")[1].split(")")[0]) == pytest.approx(size, rel=0.02)


@pytest.mark.parametrize("cls", [Recording, Skipping])
def test_a_spike_in_an_update_with_health_keeps_its_row(cls):
    """The row of an update that was let through is the one it has without detection."""
    found, plain = (run(each, health_every=1)._engine.health_log.history.health()[""] for each in (cls, Watching))
    assert found["steps"].tolist() == plain["steps"].tolist() == list(range(1, 31))
    np.testing.assert_allclose(found["gradient"][BAD], plain["gradient"][BAD], rtol=1e-5)
    assert (found["ratio"][BAD] == 0).all() == (cls is Skipping)
