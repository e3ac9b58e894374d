"""Every Keras callback gets from our loop what it gets from `keras.Model.fit`."""

import csv

import keras
import numpy as np
import pytest

from looptape import Trainer
from tests.trainer.tools import assert_same_weights, dataset, dense_model, mse, regression

X, Y = regression(32)
DATA = dataset(X, Y, batch=8)
EVAL = dataset(*regression(16, seed=5), batch=8)


class Recorder(keras.callbacks.Callback):
    """Notes every hook with its arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _note(self, hook, *arguments):
        logs = {k: round(float(v), 4) for k, v in (arguments[-1] or {}).items()}
        self.seen.append((hook, *arguments[:-1], logs))

    def on_train_begin(self, logs=None):
        self._note("train_begin", logs)

    def on_train_end(self, logs=None):
        self._note("train_end", logs)

    def on_epoch_begin(self, epoch, logs=None):
        self._note("epoch_begin", epoch, logs)

    def on_epoch_end(self, epoch, logs=None):
        self._note("epoch_end", epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        self._note("batch_begin", batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        self._note("batch_end", batch, logs)


def both(callbacks, epochs=4, optimizer=lambda: keras.optimizers.SGD(0.05)):
    """Trains a model by each, with fresh callbacks; returns (our model, theirs, our callbacks, theirs, histories)."""
    ours, theirs = dense_model(), dense_model()
    metrics = lambda: [keras.metrics.MeanAbsoluteError(name="mae")]  # noqa: E731
    mine, other = callbacks(), callbacks()
    trainer = Trainer(ours, optimizer(), {"error": mse()}, metrics=metrics())
    history = trainer.fit(DATA, epochs=epochs, eval_dataset=EVAL, callbacks=mine, progress=False)
    theirs.compile(optimizer(), loss="mse", metrics=metrics())
    expected = theirs.fit(DATA, epochs=epochs, validation_data=EVAL, callbacks=other, verbose=0, shuffle=False)
    return ours, theirs, mine, other, history.history, expected.history


def without_terms(entry):
    """Our logs also have each loss by its name."""
    *head, logs = entry
    return (*head, {k: v for k, v in logs.items() if k not in ("error", "val_error")})


def test_a_callback_of_ones_own_sees_the_same_hooks_in_the_same_order():
    _, _, (ours,), (theirs,), _, _ = both(lambda: [Recorder()], epochs=2)
    assert [e[:2] for e in ours.seen] == [e[:2] for e in theirs.seen] or [e[0] for e in ours.seen] == [
        e[0] for e in theirs.seen
    ]
    for mine, other in zip(ours.seen, theirs.seen, strict=True):
        mine = without_terms(mine)
        assert mine[:-1] == other[:-1]
        assert mine[-1] == pytest.approx(other[-1], abs=2e-4), mine[0]


def test_early_stopping_stops_and_restores():
    def make():
        return [keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)]

    rate = lambda: keras.optimizers.SGD(0.9, momentum=0.9)  # noqa: E731
    ours, theirs, (mine,), (other,), history, expected = both(make, 12, rate)
    assert mine.stopped_epoch == other.stopped_epoch > 0
    assert len(history["loss"]) == len(expected["loss"]) < 12
    assert_same_weights(ours, theirs, 1e-5)


def test_reduce_learning_rate_on_plateau():
    def make():
        return [keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.3, patience=1, min_delta=10.0)]

    ours, theirs, _, _, history, expected = both(make, 6)
    assert history["learning_rate"] == pytest.approx(expected["learning_rate"])
    assert len(set(expected["learning_rate"])) > 1
    assert_same_weights(ours, theirs)


def test_learning_rate_scheduler():
    ours, theirs, _, _, history, expected = both(
        lambda: [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]
    )
    assert history["learning_rate"] == pytest.approx(expected["learning_rate"])
    assert_same_weights(ours, theirs)


def test_model_checkpoint_keeps_the_best(tmp_path):
    paths = [tmp_path / f"{name}.weights.h5" for name in ("ours", "theirs")]
    left = iter(paths)

    def make():
        return [
            keras.callbacks.ModelCheckpoint(next(left), monitor="val_loss", save_best_only=True, save_weights_only=True)
        ]

    both(make)
    loaded = [dense_model(seed=3) for _ in paths]
    for model, path in zip(loaded, paths, strict=True):
        model.load_weights(path)
    assert_same_weights(*loaded)


def test_csv_logger(tmp_path):
    paths = [tmp_path / "ours.csv", tmp_path / "theirs.csv"]
    left = iter(paths)
    both(lambda: [keras.callbacks.CSVLogger(next(left))])
    ours, theirs = (list(csv.DictReader(path.read_text().splitlines())) for path in paths)
    assert len(ours) == len(theirs) == 4
    for mine, other in zip(ours, theirs, strict=True):
        for name, value in other.items():
            assert float(mine[name]) == pytest.approx(float(value), rel=1e-4), name


def test_terminate_on_nan():
    bad = dataset(np.full_like(X, np.nan), Y, batch=8)
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    # The trainer skips a non-finite update by itself, so the callback has nothing to see but the finite ones.
    mixed = dataset(X, Y, batch=8).concatenate(bad.take(1))
    trainer.fit(mixed, epochs=2, callbacks=[keras.callbacks.TerminateOnNaN()], progress=False)
    assert trainer._engine.counters.step == 10 and trainer._engine.counters.skips.total == 2


def test_lambda_callback_and_the_tensorboard_callback(tmp_path):
    epochs = []

    def make():
        return [
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch)),
            keras.callbacks.TensorBoard(tmp_path / str(len(epochs))),
        ]

    both(make, 2)
    assert epochs == [0, 1, 0, 1]
    assert list((tmp_path / "0" / "train").glob("events*"))


def test_backup_and_restore_is_refused(tmp_path):
    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    with pytest.raises(ValueError, match="Pass `workdir` to `fit` instead"):
        trainer.fit(DATA, epochs=1, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])


def test_only_a_callback_that_looks_at_updates_forces_one_update_per_call():
    class Epochs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            pass

    from looptape.trainer.loop.callbacks import CallbackBridge

    trainer = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    quiet = [Epochs(), keras.callbacks.EarlyStopping(), keras.callbacks.LambdaCallback(on_epoch_end=print)]
    assert not CallbackBridge(quiet, trainer, 1, None).every_update
    for loud in (Recorder(), keras.callbacks.LambdaCallback(on_train_batch_end=print)):
        assert CallbackBridge([loud], trainer, 1, None).every_update


def test_what_early_stopping_remembers_survives_a_restart(tmp_path):
    """Patience 3: one process that runs through, and one that is interrupted after two bad epochs."""

    def fit(workdir, epochs, callback):
        model = dense_model()
        trainer = Trainer(model, keras.optimizers.SGD(0.0), {"error": mse()})  # it never improves
        trainer.fit(DATA, epochs=epochs, eval_dataset=EVAL, callbacks=[callback], workdir=workdir, progress=False)
        return trainer

    make = lambda: keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True)  # noqa: E731
    whole = fit(tmp_path / "whole", 20, make())
    fit(tmp_path / "cut", 3, make())
    resumed = make()
    trainer = fit(tmp_path / "cut", 20, resumed)
    assert trainer._engine.counters.epoch == whole._engine.counters.epoch == 4
    assert resumed.best_weights is not None


def halve(epoch, rate):
    return 0.5 * rate


@pytest.mark.parametrize("before", ["compiled", "another trainer", "fitted by Keras"])
def test_learning_rate_callbacks_act_on_our_optimizer(before):
    model, other = dense_model(), keras.optimizers.SGD(0.3)
    if before == "another trainer":
        Trainer(model, other, {"error": mse()}).fit(DATA, epochs=1, progress=False)
    else:
        model.compile(other, loss="mse")
    if before == "fitted by Keras":
        model.fit(DATA, verbose=0, shuffle=False)
    trainer = Trainer(model, keras.optimizers.SGD(0.1), {"error": mse()})
    history = trainer.fit(DATA, epochs=3, callbacks=[keras.callbacks.LearningRateScheduler(halve)], progress=False)
    assert float(trainer.optimizer.learning_rate) == pytest.approx(0.0125)
    assert history.history["learning_rate"] == pytest.approx([0.05, 0.025, 0.0125])
    assert float(other.learning_rate) == pytest.approx(0.3) and model.optimizer is other


def test_one_learning_rate_for_several_optimizers_is_refused():
    optimizers = {".*kernel": keras.optimizers.SGD(0.1), ".*": keras.optimizers.SGD(0.2)}
    trainer = Trainer(dense_model(), optimizers, {"error": mse()})
    setting = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: setattr(trainer.optimizer, "learning_rate", 0.1))
    with pytest.raises(ValueError, match=r"One learning rate, 0.1.*several optimizers, \['\.\*kernel', '\.\*'\]"):
        trainer.fit(DATA, epochs=1, callbacks=[setting], progress=False)
    # Keras's own are refused before the first step: ReduceLROnPlateau may set its rate hours later.
    for callback in (keras.callbacks.LearningRateScheduler(halve), keras.callbacks.ReduceLROnPlateau("loss")):
        with pytest.raises(ValueError, match="sets one learning rate for several optimizers"):
            trainer.fit(DATA, epochs=1, callbacks=[callback], progress=False)
    assert trainer.step.numpy() == 0
