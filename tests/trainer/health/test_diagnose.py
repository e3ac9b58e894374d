"""`diagnose` on two runs of one model: one with every fault, one with none. Resumed, it says the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard import context
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer

from looptape import Trainer
from looptape.dashboard import events
from looptape.dashboard.overview import OverviewReader
from looptape.dashboard.rules import logged_run
from looptape.dashboard.server.health_reader import HealthReader
from tests.trainer.tools import read_events

STEPS = 10


def model(faults):
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4,))
    values = keras.layers.Dense(8, "tanh", name="first")(inputs)
    values = keras.layers.Dense(8, "tanh", name="slow")(values)
    bias = keras.initializers.Constant(-50.0 if faults else 1.0)
    dead = keras.layers.Dense(8, "relu", name="dead", bias_initializer=bias)
    values = keras.layers.Add(name="sum")([values, dead(values)])
    return keras.Model(inputs, keras.layers.Dense(1, name="head")(values))


def run(faults, steps=STEPS, workdir=None):
    """The faults: a layer that hardly moves, one whose units are off, one that jumps, losses that pull apart."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(64, 4)).astype("float32")
    y = generator.normal(size=(64, 1)) * 3 if faults else 0.1 * x[:, :1] + 3
    share = -0.5 if faults else 0.5  # of the first loss in the second: with faults they pull apart
    losses = {
        "error": lambda targets, outputs: tf.square(outputs - targets)[:, 0],
        "other": lambda targets, outputs: share * tf.square(outputs - targets)[:, 0],
    }
    adam = keras.optimizers.Adam
    optimizer = {"slow": adam(1e-9), "head": adam(1.0), ".*": adam(1e-3)} if faults else adam(1e-3)
    trainer = Trainer(
        model(faults),
        optimizer,
        losses,
        accumulation_steps=2,
        probe_every=1,
        health_every=1,
        health="activations",
    )
    data = tf.data.Dataset.from_tensor_slices((x, y.astype("float32"))).batch(4).repeat()
    trainer.fit(data, steps=steps, progress=False, workdir=workdir, checkpoint_every=5)
    return trainer


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("faulty")
    return run(True, workdir=workdir), workdir


def test_every_fault_is_found(faulty):
    trainer, workdir = faulty
    findings = trainer.diagnose()
    found = {(finding.word, finding.layer) for finding in findings}
    assert {("not learning", "slow"), ("no gradient", "dead"), ("dead units", "dead"), ("too large", "head")} <= found
    assert ("conflict", None) in found
    slow = next(finding for finding in findings if finding.layer == "slow")
    assert slow.text.endswith("it does not move.") and slow.value < 1e-6
    (text,) = [row["verdicts"].item().decode() for _, row in read_events(workdir / "train") if "verdicts" in row]
    assert all(finding.text in text for finding in findings)


def test_the_tab_and_the_report_read_the_same_from_the_event_files(faulty):
    trainer, workdir = faulty
    logged = events.read_run(workdir / "train")
    found = logged_run.findings(logged.layers, logged.scalars, logged.health, logged.cells)
    assert [one.text for one in found] == [one.text for one in trainer.diagnose()]


def test_advice_knows_the_cell(tmp_path):
    x = np.random.default_rng(0).normal(size=(8, 4, 2)).astype("float32")
    layer = keras.layers.SimpleRNN(2, recurrent_initializer="zeros", name="rnn")
    forgetful = keras.Sequential([keras.Input((4, 2)), layer, keras.layers.Dense(1)])
    trainer = Trainer(forgetful, keras.optimizers.SGD(0.0), {"error": "mse"}, probe_every=50)
    data = tf.data.Dataset.from_tensors((x, x[:, 0, :1])).repeat()
    trainer.fit(data, steps=150, progress=False, workdir=tmp_path)
    (one,) = trainer.diagnose()
    assert one.word == "vanishing" and one.advice.startswith("use a gated cell (GRU, LSTM) or an orthogonal")
    logged = events.read_run(tmp_path / "train")
    assert logged.cells == {"rnn": "SimpleRNNCell"}
    assert logged_run.findings(logged.layers, logged.scalars, logged.health, logged.cells) == [one]


def test_both_halves_of_a_bidirectional_layer_forget(tmp_path):
    """The gradient of the second half enters at the first time step, which is the last that it reads."""
    x = np.random.default_rng(0).normal(size=(8, 30, 2)).astype("float32")
    half = keras.layers.SimpleRNN(2, None, recurrent_initializer=keras.initializers.Orthogonal(0.3), name="rnn")
    layers = [keras.layers.Bidirectional(half), keras.layers.Dense(1)]
    trainer = Trainer(
        keras.Sequential([keras.Input((30, 2)), *layers]), keras.optimizers.SGD(1e-6), {"error": "mse"}, probe_every=50
    )
    data = tf.data.Dataset.from_tensors((x, x[:, 0, :1])).repeat()
    trainer.fit(data, steps=100, progress=False, workdir=tmp_path)
    found = trainer.diagnose()
    assert [one.word for one in found] == ["vanishing"] * 2, "none explodes"
    texts = sorted(one.text.partition(" reaches")[0] for one in found)
    assert texts == ["backward_rnn (reads from the end)", "forward_rnn"]
    logged = events.read_run(tmp_path / "train")
    again = logged_run.findings(
        logged.layers, logged.scalars, logged.health, logged.cells, logged.backward, logged.positions, logged.shares
    )
    assert {one.text for one in again} == {one.text for one in found}


def test_a_healthy_run_is_not_accused():
    trainer = run(False)
    layers, losses = trainer.diagnose()
    assert (layers.word, losses.word, layers.layer) == ("healthy", "healthy", None)
    assert losses.text.startswith("Losses do not conflict: the gradients of `error` and `other` were opposed in 0% of")


def test_targets_that_are_noise_need_a_larger_batch():
    """No rule is in them, the weights are at their best, 0: what is left of the gradient is noise."""
    x, y = np.random.default_rng(1).normal(size=(2, 512, 1)).astype("float32")
    noisy = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    trainer = Trainer(noisy, keras.optimizers.SGD(1e-6), {"error": "mse"}, accumulation_steps=4, health_every=1)
    trainer.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(4).repeat(), steps=20, progress=False)
    (finding,) = [finding for finding in trainer.diagnose() if finding.word == "noisy"]
    assert finding.text.startswith("The batch of 16 examples is small") and finding.value > 160


def test_a_resumed_run_says_the_same(faulty, tmp_path):
    """From event files and the checkpoint: the history of the first session counts."""
    run(True, steps=6, workdir=tmp_path)
    resumed = run(True, workdir=tmp_path)
    expected = faulty[0].diagnose()
    assert [(f.word, f.layer) for f in resumed.diagnose()] == [(f.word, f.layer) for f in expected]
    assert resumed.noise_scale() == faulty[0].noise_scale()
    assert resumed._engine.health_log.rows == STEPS


def test_a_run_whose_updates_were_all_skipped_says_so(tmp_path):
    x = np.full([8, 2], np.nan, "float32")
    linear = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    trainer = Trainer(linear, "sgd", {"error": "mse"})
    assert trainer.diagnose() == []
    trainer.max_skipped = 100
    trainer.fit(tf.data.Dataset.from_tensors((x, x[:, :1])).repeat(), steps=12, progress=False, workdir=tmp_path)
    (one,) = trainer.diagnose()
    assert one.text == "No update was applied: all 12 were skipped (non-finite)." and one.advice
    logged = events.read_run(tmp_path / "train")
    assert logged_run.findings(logged.layers, logged.scalars, logged.health, logged.cells) == [one]
    (text,) = [row["verdicts"].item().decode() for _, row in read_events(tmp_path / "train") if "verdicts" in row]
    assert one.text in text
    multiplexer = plugin_event_multiplexer.EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(tmp_path))
    board = OverviewReader(provider, HealthReader(provider))
    assert list(board.runs(context.RequestContext(), "")[1]) == ["train"], "the tab lists it"


class Rivals(Trainer):
    """Two minimizers, as in a GAN."""

    def train_step(self, batch):
        first, second = self.model.layers
        self.minimize(batch, variables=first.trainable_variables, name="first")
        self.minimize(batch, variables=second.trainable_variables, optimizer=self.other, name="second")
        return {}


def test_the_loss_of_every_minimizer_is_looked_at(tmp_path):
    x = np.ones([8, 2], "float32")
    rivals = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    trainer = Rivals(rivals, "sgd", {"error": "mse"})
    trainer.other = keras.optimizers.SGD()
    data = tf.data.Dataset.from_tensors((x, x[:, :1])).repeat()
    trainer.fit(data, steps=2, log_every=1, progress=False, workdir=tmp_path)
    kept, logged = trainer._engine.health_log.history.losses(), events.total_losses(events.read_run(tmp_path / "train"))
    assert list(kept) == list(logged) == ["first", "second"] and kept["second"][0] == [1, 2]
    assert [kept[name][1] for name in kept] == [list(map(pytest.approx, logged[name][1])) for name in logged]


def test_positions_and_shares_are_judged_the_same_everywhere(tmp_path):
    """In memory, from the event files and after a resume: losses of the last steps and, tiny, of the first."""
    x = np.random.default_rng(0).normal(size=(16, 20, 2)).astype("float32")
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, name="first"), keras.layers.Conv1D(4, 2, padding="same", name="second")]
    net = keras.Sequential([keras.Input((20, 2)), *layers, keras.layers.GRU(4, name="gru", return_sequences=True)])
    losses = {
        "near": lambda targets, outputs: tf.reduce_sum(tf.square(outputs[:, -3:]), axis=(1, 2)),
        "far": lambda targets, outputs: 1e-9 * tf.reduce_sum(tf.square(outputs[:, :3]), axis=(1, 2)),
    }
    trainer = Trainer(net, "sgd", losses, probe_every=1, health_every=1, health="positions")
    data = tf.data.Dataset.from_tensors((x, x)).repeat()
    trainer.fit(data, steps=10, progress=False, workdir=tmp_path)
    found = trainer.diagnose()
    logged = events.read_run(tmp_path / "train")
    everything = logged.cells, logged.backward, logged.positions, logged.shares
    again = logged_run.findings(logged.layers, logged.scalars, logged.health, *everything)
    assert [one.text for one in again] == [one.text for one in found]
    (share,) = [one for one in found if one.word == "one-sided"]
    assert share.text.startswith(
        "`far` carries 0% of the gradient of gru in the first half of the time steps, `near` 1"
    )
    assert [one.layer for one in found if "positions of" in one.text] == ["first"]
    trainer._engine.health_log.resume(tmp_path / "train")
    assert [one.text for one in trainer.diagnose()] == [one.text for one in found]
