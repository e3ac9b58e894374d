"""The learning-rate finder: against plain gradient descent, and nothing is changed by it."""

import contextlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import looptape
from looptape import WarmupSchedule
from tests.trainer.tools import (
    assert_identical_weights,
    assert_same_weights,
    dataset,
    dense_model,
    linear_model,
    mse,
    read_events,
    regression,
)

X, Y = regression(32)
DATA = dataset(X, Y, batch=32)


def test_the_losses_are_those_of_gradient_descent_with_these_rates():
    """An oracle in NumPy: a linear model, one batch, the rates that were tried."""
    model = linear_model()
    kernel, bias = (value.numpy().astype("float64") for value in model.weights)
    trainer = looptape.Trainer(model, keras.optimizers.SGD(0.5), {"error": mse()})
    found = trainer.find_learning_rate(DATA, lowest=1e-4, highest=100.0, steps=60)
    expected = []
    for rate in found.rates:
        error = X @ kernel + bias - Y
        expected.append((error**2).mean())
        kernel, bias = kernel - rate * 2 * X.T @ error / len(X), bias - rate * 2 * error.mean(axis=0)
    np.testing.assert_allclose(found.losses, expected, rtol=5e-3)  # errors grow as it diverges
    assert len(found.rates) < 60  # it diverged
    # Gradient descent is stable below 2 / (largest eigenvalue of the Hessian): the suggestion lies well below.
    design = np.hstack([X, np.ones([32, 1])])
    limit = 2 / np.linalg.eigvalsh(2 * design.T @ design / len(X)).max()
    assert limit / 100 < found.suggestion < limit


def test_everything_is_as_it_was():
    def fitted(search):
        metrics = {"mae": keras.metrics.MeanAbsoluteError()}
        options = {"ema_decay": 0.9, "metrics": metrics}
        trainer = looptape.Trainer(dense_model(), keras.optimizers.Adam(0.01), {"error": mse()}, **options)
        data = DATA.repeat()
        trainer.fit(data, steps=3, progress=False)
        if search:
            trainer.find_learning_rate(data, steps=20)
        assert float(trainer.optimizer.learning_rate) == pytest.approx(0.01) and int(trainer.step) == 3
        trainer.fit(data, steps=6, progress=False)
        return trainer

    plain, searched = fitted(False), fitted(True)
    assert_identical_weights(plain.model, searched.model)
    for left, right in zip(plain.optimizer.variables, searched.optimizer.variables, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())


@pytest.mark.parametrize("look", ["find_learning_rate", "fast_dev_run", "overfit"])
@pytest.mark.parametrize("trained", [False, True], ids=["before the first pass", "after a pass"])
def test_shuffled_data_come_in_the_order_in_which_they_would_have_come(look, trained):
    """All iterators over a dataset draw the orders of its shuffle from one generator."""

    def fitted(looks):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dropout(0.3, seed=5), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), *layers])
        trainer = looptape.Trainer(model, keras.optimizers.Adam(0.01), {"error": mse()})
        data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(32, seed=2).batch(8)
        if trained:
            trainer.fit(data, epochs=1, progress=False)
        if looks:
            options = {"find_learning_rate": {"steps": 10}, "overfit": {"steps": 3}}
            getattr(trainer, look)(data, **options.get(look, {}))
        trainer.fit(data, epochs=3, progress=False)
        return trainer.model

    assert_identical_weights(fitted(False), fitted(True))


@pytest.mark.parametrize("policy", ["record", "skip", "raise", "restore"])
def test_spikes_of_the_search_are_applied(policy):
    """Rising rates make spikes: the search must see the same losses as without `on_spike`, and leave no trace."""

    class Watching(looptape.Trainer):
        on_spike, spike_threshold, spike_window = policy, 3.0, 10

    def searched(kind):
        trainer = kind(linear_model(), keras.optimizers.SGD(0.01), {"error": mse()})
        found = trainer.find_learning_rate(DATA, lowest=1e-3, highest=100.0, steps=40)
        trainer.fit(DATA.repeat(), steps=15, progress=False)
        return found.losses, trainer

    (plain, expected), (watched, trainer) = searched(looptape.Trainer), searched(Watching)
    np.testing.assert_allclose(plain, watched, rtol=1e-4)
    assert plain[-1] > 4 * plain.min(), "it diverged"
    assert_same_weights(expected.model, trainer.model)


def test_updates_that_the_loss_scale_skips_do_not_end_the_search():
    """In float16 the first updates overflow until the scale has come down; the rates are all tried nevertheless."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(1, dtype="float16"), keras.layers.Activation("linear", dtype="float32")]
    trainer = looptape.Trainer(keras.Sequential([keras.Input((3,)), *layers]), keras.optimizers.SGD(), {"error": mse()})
    found = trainer.find_learning_rate((10 * X, Y), lowest=1e-9, highest=1e-8, steps=10)
    assert len(found.rates) == 10 and np.isfinite(found.losses).all()
    assert trainer._engine.counters.skips.total == 0 and float(trainer._engine.loss_scale.value()) == 2.0**15


@pytest.mark.parametrize("look", ["find_learning_rate", "fast_dev_run", "overfit"])
def test_a_dataset_in_python_keeps_its_own_state(look):
    class Shuffled(keras.utils.PyDataset):
        ended, num_batches = 0, 2

        def __getitem__(self, index):
            return X[16 * index : 16 * index + 16], Y[16 * index : 16 * index + 16]

        def on_epoch_end(self):
            self.ended += 1

    data = Shuffled()
    trainer = looptape.Trainer(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    options = {"find_learning_rate": {"steps": 10}, "overfit": {"steps": 3, "batches": 2}}
    unsaved = pytest.warns(UserWarning, match="The position in this dataset cannot be saved")
    with unsaved if look == "fast_dev_run" else contextlib.nullcontext():  # it writes checkpoints
        getattr(trainer, look)(data, **options.get(look, {}))
    assert data.ended == 0
    trainer.fit(data, epochs=2, progress=False)
    assert data.ended == 2


def test_the_picture_marks_the_suggestion():
    pytest.importorskip("matplotlib")
    trainer = looptape.Trainer(linear_model(), "sgd", {"error": mse()})
    found = trainer.find_learning_rate((X, Y), steps=30, highest=1.0)
    axes = found.draw()
    assert axes.get_xscale() == "log" and axes.lines[-1].get_xdata()[0] == found.suggestion


def test_bad_searches_are_answered():
    trainer = looptape.Trainer(linear_model(), "sgd", {"error": mse()})
    for options, message in (
        ({"lowest": 0.0}, "`lowest` is 0.0; it must be a positive number"),
        ({"lowest": 1.0, "highest": 0.5}, "`lowest` is 1 and `highest` 0.5; the rates must rise. Swap them."),
        ({"steps": 3}, "`steps` is 3; it must be at least 10"),
        ({"lowest": None}, "`lowest` is None; it must be a positive number, the first learning rate. Leave it out."),
        ({"batch_size": 0}, "`batch_size` is 0; it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            trainer.find_learning_rate(DATA, **options)
    scheduled = looptape.Trainer(linear_model(), keras.optimizers.SGD(WarmupSchedule(0.1, 5)), {"error": mse()})
    with pytest.raises(ValueError, match="learning rate follows a schedule, so it cannot be set"):
        scheduled.find_learning_rate(DATA)
    grouped = looptape.Trainer(linear_model(), {".*": keras.optimizers.SGD(0.1)}, {"error": mse()})
    with pytest.raises(ValueError, match="searches one rate, and this trainer has an optimizer for each"):
        grouped.find_learning_rate(DATA)
    with pytest.raises(ValueError, match=r"The loss of the first update, with a learning rate of 1e-07, is not finite"):
        trainer.find_learning_rate(dataset(X * np.nan, Y, batch=32))


# ---- Schedules and the rates that are logged.


def test_a_plain_trainer_warms_up_and_decays(tmp_path):
    schedule = WarmupSchedule(0.1, warmup_steps=4, shape="cosine", steps=12)
    trainer = looptape.Trainer(linear_model(), keras.optimizers.SGD(schedule), {"error": mse()})
    trainer.fit(DATA.repeat(), steps=12, log_every=1, workdir=tmp_path, progress=False)
    rates = {step: float(values["optimizer/learning_rate"]) for step, values in read_events(tmp_path / "train") if step}
    steps = np.arange(1, 13)
    down = 0.1 * (0.01 + 0.99 * (1 + np.cos(np.pi * np.clip((steps - 4) / 8, 0, 1))) / 2)
    expected = np.where(steps < 4, 0.1 * (steps + 1) / 4, down)
    np.testing.assert_allclose([rates[step] for step in range(1, 13)], expected, rtol=1e-5)


def test_numbers_of_numpy_are_numbers():
    schedule = WarmupSchedule(np.float32(0.5), np.int64(4), "cosine", np.int32(8))
    assert [float(schedule(step)) for step in (1, 3)] == [0.25, 0.5]
    assert {type(value) for value in schedule.get_config().values()} == {float, int, str}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0.0,), "`peak` is 0.0; it must be a positive number"),
        ((0.1, -1), "`warmup_steps` is -1; it must be an integer of at least 0"),
        ((0.1, 0, "line"), "`shape` is 'line'; it must be one of constant, cosine, exponential"),
        ((0.1, 5, "cosine", 5), "`steps` is 5; a cosine must know the update at which it ends"),
        ((0.1, True), "`warmup_steps` is True; it must be an integer of at least 0"),
        ((0.1, 0, "cosine", True), "`steps` is True; a cosine must know the update at which it ends"),
        ((0.1, 5, "cosine"), "`steps` is None; a cosine must know the update at which it ends"),
    ],
)
def test_bad_schedules_are_answered(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        WarmupSchedule(*arguments)


def test_the_rates_of_optimizers_by_pattern_are_logged(tmp_path):
    optimizers = {".*kernel": keras.optimizers.SGD(0.1), ".*": keras.optimizers.SGD(0.2)}
    trainer = looptape.Trainer(linear_model(), optimizers, {"error": mse()})
    trainer.fit(DATA.repeat(), steps=2, log_every=1, workdir=tmp_path, progress=False)
    values = dict(read_events(tmp_path / "train"))[2]
    found = [values[f"optimizer/learning_rate/{pattern}"] for pattern in optimizers]
    assert found == pytest.approx([0.1, 0.2])
