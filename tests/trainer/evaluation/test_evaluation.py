"""`evaluate`: exact sums, the names of each dataset, and a total that nothing replaces."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import looptape
from looptape.trainer import Trainer
from looptape.trainer.checkpoints import store
from looptape.trainer.distribution import workers
from looptape.trainer.evaluation.evaluation_sets import evaluate_sets, named_sets
from tests.trainer.tools import assert_identical_weights, dataset, linear_model, mse, read_events, regression

X, Y = regression(8)


class Given(Trainer):
    """The loss of a batch is what the batch says."""

    def compute_losses(self, batch, training):
        return {"error": batch["value"]}


def test_a_large_sum_keeps_what_small_batches_add():
    """2^24 + 1 is 2^24 in float32: of 101 batches a hundred would be lost."""
    values = np.array([2.0**24] + [1.0] * 100, "float32")
    result = Given(linear_model(), "sgd").evaluate(tf.data.Dataset.from_tensor_slices({"value": values}).batch(1))
    assert result["error"] == pytest.approx((2.0**24 + 100) / 101, rel=1e-12)


@pytest.mark.parametrize("eager", [False, True])
def test_each_dataset_shows_its_values_under_its_own_names(eager):
    class Named(Trainer):
        def compute_losses(self, batch, training):
            self.log(f"twice_{'_'.join(batch)}", 2.0 * next(iter(batch.values())))
            return dict(batch)

    trainer = Named(linear_model(), "sgd", run_eagerly=eager)
    one = tf.data.Dataset.from_tensor_slices({"a": [1.0, 3.0]}).batch(1)
    other = tf.data.Dataset.from_tensor_slices({"b": [5.0, 7.0]}).batch(1)
    both = tf.data.Dataset.from_tensor_slices({"a": [1.0, 3.0], "b": [5.0, 7.0]}).batch(1)
    for _ in range(2):
        assert trainer.evaluate(one) == {"loss": 2.0, "a": 2.0, "twice_a": 4.0}
        assert trainer.evaluate(other) == {"loss": 6.0, "b": 6.0, "twice_b": 12.0}
        assert trainer.evaluate(both) == {"loss": 8.0, "a": 2.0, "b": 6.0, "twice_a_b": 4.0}


def test_what_a_hook_logs_does_not_replace_a_loss():
    class Logging(Trainer):
        def compute_losses(self, batch, training):
            self.log("loss", 1000.0)
            self.log("error", 2000.0)
            return super().compute_losses(batch, training)

    trainer = Logging(linear_model(), keras.optimizers.SGD(0.0), {"error": mse()})
    data = dataset(X, Y, batch=8)
    expected = float(np.mean((trainer.model(X).numpy() - Y) ** 2))
    assert trainer.evaluate(data) == pytest.approx({"loss": expected, "error": expected}, rel=1e-5)
    history = trainer.fit(data, epochs=1, eval_dataset=data, progress=False).history
    for name in ("loss", "error", "val_loss", "val_error"):
        assert history[name] == pytest.approx([expected], rel=1e-5), name


@pytest.mark.parametrize("eager", [False, True])
def test_a_metric_that_no_batch_updates_has_no_result(eager):
    """Its variables would still be 0, the best error there is."""

    class Own(Trainer):
        def eval_step(self, batch):
            return {"error": tf.square(self.model(batch[0]) - batch[1])}

    class InTraining(Trainer):
        def compute_losses(self, batch, training):
            outputs = self.model(batch[0], training=training)
            if training or "also" in batch[2]:
                self.update_metrics(batch[1], outputs)
            return {"error": tf.square(outputs - batch[1])}

    metrics = lambda: {"mae": keras.metrics.MeanAbsoluteError()}  # noqa: E731
    own = Own(linear_model(), "sgd", {"error": mse()}, metrics=metrics(), run_eagerly=eager)
    assert sorted(own.evaluate((X, Y))) == ["error", "loss"]
    partly = InTraining(linear_model(), "sgd", metrics=metrics(), run_eagerly=eager)
    silent = dataset(X, Y, {"only": Y}, batch=4)
    assert sorted(partly.evaluate(silent)) == ["error", "loss"]
    updated = partly.evaluate(dataset(X, Y, {"also": Y}, batch=4))  # another trace
    assert updated["mae"] == pytest.approx(np.mean(np.abs(partly.model(X).numpy() - Y)), rel=1e-5)
    assert "mae" not in partly.evaluate(silent)
    with pytest.raises(ValueError, match=r"`keep_best` is 'mae'; the evaluation gives \['error', 'loss'\]"):
        own.fit((X, Y), steps=1, eval_dataset=(X, Y), keep_best="val_mae", progress=False)


# ---- Several sets by name.

SETS = {"clean": dataset(X, Y, batch=8), "noisy": (X + 1.0, Y)}


def two_losses():
    metrics = {"mae": keras.metrics.MeanAbsoluteError()}
    return Trainer(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()}, metrics=metrics)


def test_sets_by_name_give_what_each_gives_alone(tmp_path):
    trainer = two_losses()
    alone = {name: trainer.evaluate(data) for name, data in SETS.items()}
    expected = {f"{name}_{result}": value for name, results in alone.items() for result, value in results.items()}
    expected["loss"] = alone["clean"]["loss"]
    assert trainer.evaluate(SETS) == pytest.approx(expected) and len(expected) == 7
    history = trainer.fit((X, Y), steps=2, eval_dataset=SETS, eval_every=1, workdir=tmp_path, progress=False).history
    rows = dict(read_events(tmp_path / "eval"))
    after = trainer.evaluate(SETS)
    for name in ("clean", "noisy"):
        for result, tag in (("loss", "loss/error"), ("error", "loss/error"), ("mae", "metrics/mae")):
            assert history[f"val_{name}_{result}"][-1] == pytest.approx(after[f"{name}_{result}"])
            assert rows[2][f"{name}/{tag}"] == pytest.approx(after[f"{name}_{result}"], rel=1e-6)
    assert history["val_loss"] == history["val_clean_loss"]


def test_the_best_by_the_result_of_one_set(tmp_path):
    """Steps that make "clean" better and "down", with targets of the other sign, worse."""
    sets = {"clean": (X, Y), "down": (X, -Y)}
    options = {"eval_dataset": sets, "eval_every": 1, "progress": False}
    two_losses().fit((X, Y), steps=3, workdir=tmp_path / "a", keep_best="down_loss", keep_checkpoints=1, **options)
    two_losses().fit((X, Y), steps=3, workdir=tmp_path / "b", keep_best="clean_loss", keep_checkpoints=1, **options)
    best = [store.Store(tmp_path / run / "checkpoints").best() for run in "ab"]
    assert best == ["step-0000000001", "step-0000000003"]
    for run, steps in (("a", 1), ("b", 3)):  # and so are the weights beside the checkpoints
        exported, expected = two_losses(), two_losses()
        exported.model.load_weights(tmp_path / run / "best.weights.h5")
        expected.fit((X, Y), steps=steps, progress=False)
        assert_identical_weights(exported.model, expected.model)


def test_a_resumed_run_that_keeps_the_best_by_another_result_begins_to_compare_anew(tmp_path):
    """By "down_loss" step 1 was best, by a value that "clean_loss" does not reach before step 4."""
    sets = {"clean": (X, 100 * Y), "down": (X, -Y)}
    options = {"eval_dataset": sets, "eval_every": 1, "progress": False, "workdir": tmp_path, "keep_checkpoints": 1}
    two_losses().fit((X, Y), steps=2, keep_best="down_loss", **options)
    resumed = two_losses()
    with pytest.warns(UserWarning, match="`keep_best` was 'down_loss' and is 'clean_loss' now. The best evaluation so"):
        resumed.fit((X, Y), steps=4, keep_best="clean_loss", **options)
    kept = store.Store(tmp_path / "checkpoints")
    assert kept.best() == "step-0000000004" and kept.names() == ["step-0000000004"]
    exported = two_losses()
    exported.model.load_weights(tmp_path / "best.weights.h5")
    assert_identical_weights(exported.model, resumed.model)


def test_a_dict_that_is_one_batch_stays_one_set():
    trainer = two_losses()
    expected = trainer.evaluate((X, Y))
    assert trainer.evaluate({"inputs": X, "targets": Y}) == pytest.approx(expected)
    assert named_sets({"x": (X, X), "y": (Y, Y)}) is None and named_sets({"a": X, "b": {"c": Y}}) is None
    assert named_sets({"a": (X, Y)}) is not None and named_sets((X, Y)) is None


def test_bad_sets_are_answered():
    trainer = two_losses()
    with pytest.raises(ValueError, match="The dict of datasets to evaluate on is empty"):
        trainer.evaluate({})
    with pytest.raises(TypeError, match="A dataset to evaluate on is named 3; names must be non-empty strings"):
        trainer.evaluate({3: (X, Y)})
    with pytest.raises(ValueError, match="Two evaluation sets have a result named 'a_b_loss'"):
        evaluate_sets({"a": 0, "a_b": 0}, lambda _: ({"loss": 1.0, "b_loss": 1.0}, {"loss": "l", "b_loss": "b"}))
    for bad, message in (
        ({"a": (X, Y), "b": None}, "The evaluation set 'b' cannot be used. The dataset is a NoneType; it must be"),
        ({"a": (X, Y), "b": "test"}, "The evaluation set 'b' cannot be used. The dataset is a str; it must be"),
        ({"a": (X, Y), "b": (X, Y[:3])}, r"The evaluation set 'b' cannot be used. The arrays have \[3, 8\] examples"),
        ("test", "`eval_dataset` cannot be used. The dataset is a str; it must be"),
        ((X[:0], Y[:0]), "`eval_dataset` cannot be used. The dataset is empty"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            trainer.fit((X, Y), steps=1, eval_dataset=bad, progress=False)
    assert int(trainer.step) == 0, "before the first step"
    with pytest.raises(ValueError, match="The dataset to evaluate in `fit` is infinite"):
        trainer.fit((X, Y), steps=1, eval_dataset={"a": SETS["clean"].repeat()}, progress=False)
    with pytest.raises(ValueError, match=r"`keep_best` is 'los'; the evaluation gives \['a_error', 'a_loss', 'a_mae',"):
        trainer.fit((X, Y), steps=1, eval_dataset={"a": (X, Y)}, keep_best="los", progress=False)


class MeasuredInEvaluation(Trainer):
    """Updates its metrics in evaluations only, or also in `train_step`, outside `minimize`."""

    in_training = False

    def compute_losses(self, batch, training):
        return {"error": tf.square(self.model(batch[0]) - batch[1])[:, 0]}

    def train_step(self, batch):
        self.minimize(batch)
        if self.in_training:
            self.update_metrics(batch[1], self.model(batch[0]))
        return {}

    def eval_step(self, batch):
        self.update_metrics(batch[1], self.model(batch[0]))
        return self.compute_losses(batch, training=False)


@pytest.mark.parametrize("in_training", [False, True])
def test_a_metric_that_only_evaluations_update_is_not_zero_in_training(in_training, tmp_path):
    x, y = regression(16)
    metrics = {"mae": keras.metrics.MeanAbsoluteError()}
    trainer = MeasuredInEvaluation(linear_model(), keras.optimizers.SGD(0.0), metrics=metrics)
    trainer.in_training = in_training
    data, expected = dataset(x, y, batch=8), np.mean(np.abs(trainer.model(x).numpy() - y))
    history = trainer.fit(data, epochs=2, eval_dataset=data, log_every=1, workdir=tmp_path, progress=False).history
    np.testing.assert_allclose(history["val_mae"], [expected] * 2, rtol=1e-5)
    tags = looptape.read(tmp_path).scalars
    assert "eval/metrics/mae" in tags and ("metrics/mae" in tags) == in_training
    if in_training:
        np.testing.assert_allclose(history["mae"], [expected] * 2, rtol=1e-5)
    else:
        assert "mae" not in history


class Comparing(workers.Alone):
    """One of two workers, which notes what it would compare with the other."""

    count = 2

    def __init__(self):
        self.compared = []

    def check_same(self, **things):
        self.compared.append(things)


@pytest.mark.parametrize("form", ["whole", "whole, eager", "by index"])
def test_workers_compare_all_that_they_evaluate(form):
    """What they compare differs if any example does; a batch of the first or the last is enough."""

    def compared(x):
        trainer = Trainer(linear_model(), "sgd", {"error": mse()}, run_eagerly=form == "whole, eager")
        trainer._engine.workers = Comparing()
        arrays = tf.constant(x), tf.constant(Y)
        by_index = looptape.IndexedData(8, lambda i: (arrays[0][i], arrays[1][i]), batch_size=3, shuffle=False)
        trainer.evaluate(by_index if form == "by index" else dataset(x, Y, batch=3))
        return trainer._engine.workers.compared

    expected = compared(X)
    assert compared(X.copy()) == expected
    for row in (0, 5, 7):
        other = X.copy()
        other[row] += 1.0
        assert compared(other) != expected, row
