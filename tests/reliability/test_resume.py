"""A run that dies and is started again reaches the same bits; without any one piece of its state it does not."""

import functools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.faults import victim
from looptape import Trainer, losses
from looptape.trainer.checkpoints import store as checkpoints
from looptape.trainer.data.source import Source
from tests.losses.combiners.representative import every_combiner
from tests.reliability.tools import Killed, Killer, Reborn, copied, rows, scalars, shuffled
from tests.trainer.tools import assert_identical_weights, dataset, dense_model, mse, regression

STEPS, SAVED, KILLED = 20, 10, 13  # 30 micro-batches are used at the checkpoint: the middle of the second pass


@functools.cache
def reborn():
    return Reborn(victim.make_trainer(half=True, probe_every=0), victim.make_data())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(digest of a run without interruption, its work directory, the work directory of one that was killed)."""
    whole, killed = (str(tmp_path_factory.mktemp(name) / "run") for name in ("whole", "killed"))
    trainer = reborn().reset()
    victim.fit(trainer, whole, STEPS, eval_every=3)
    reached = victim.digest(trainer)
    trainer = reborn().reset()
    with pytest.raises(Killed):
        victim.fit(trainer, killed, STEPS, eval_every=3, callbacks=[Killer(trainer, KILLED)])
    return reached, whole, killed


def test_a_new_trainer_goes_on_to_the_same_bits_and_rows(runs):
    reached, whole, killed = runs
    workdir = copied(killed, "again")
    assert checkpoints.Store(f"{workdir}/checkpoints").names() == [f"step-{SAVED:010d}"]
    trainer = victim.make_trainer(half=True, probe_every=0)
    victim.fit(trainer, workdir, STEPS, eval_every=3)
    assert victim.digest(trainer) == reached
    for run in ("train", "eval"):
        left, right = scalars(whole, run), scalars(workdir, run)
        assert list(left) == list(right) and [step for step, _ in rows(workdir, run)] == list(right)
        for step, values in left.items():
            assert right[step] == pytest.approx(values, rel=1e-6), (run, step)


def _seeds(trainer):
    return [v for v in trainer.model.variables if "seed_generator" in v.path]


def _statistics(trainer):
    return [v for v in trainer.model.variables if "moving_" in v.path]


def _weights(trainer):
    return list(trainer.model.trainable_variables)


PIECES = {
    "nothing": lambda trainer: [],
    "weights": _weights,
    "dropout seeds": _seeds,
    "batch statistics": _statistics,
    "recurrent states": lambda trainer: trainer.model.layers[0].states,
    "moments": lambda trainer: [v for v in trainer.optimizer.variables if "momentum" in v.path or "velocity" in v.path],
    "learning rate": lambda trainer: [trainer.optimizer._learning_rate],
    "iterations": lambda trainer: [trainer.optimizer.iterations],
    "averages": lambda trainer: trainer._engine.main.pipeline.averages,
    "combiner": lambda trainer: trainer.combiner.variables,
    "step": lambda trainer: [trainer.step],
    "loss scale": lambda trainer: trainer._engine.loss_scale.variables,
}


@pytest.mark.parametrize("piece", PIECES)
def test_without_this_piece_of_state_the_result_differs(piece, runs, monkeypatch):
    reached, _, killed = runs
    load = checkpoints.load

    def forgetful(path, state):
        left_out = [getattr(v, "value", v) if isinstance(v, keras.Variable) else v for v in PIECES[piece](trainer)]
        before = [v.numpy() for v in left_out]
        arrays = load(path, state)
        changed = [(v.numpy() != value).any() for v, value in zip(left_out, before, strict=True)]
        assert any(changed) == (piece != "nothing"), "what the checkpoint holds is what a new trainer has"
        for variable, value in zip(left_out, before, strict=True):
            variable.assign(value)
        return arrays

    monkeypatch.setattr(checkpoints, "load", forgetful)
    trainer = reborn().reset()
    victim.fit(trainer, copied(killed, f"without-{piece.replace(' ', '-')}"), STEPS, eval_every=3)
    assert (victim.digest(trainer) == reached) == (piece == "nothing")


def test_without_the_metrics_the_row_differs(runs, monkeypatch):
    """They begin anew at the evaluation of step 9; the row of step 12 has the updates from 10 on."""
    _, whole, killed = runs
    load = checkpoints.load

    def forgetful(path, state):
        arrays = load(path, state)
        trainer.metrics["mae"].reset_state()
        return arrays

    monkeypatch.setattr(checkpoints, "load", forgetful)
    trainer, workdir = reborn().reset(), copied(killed, "without-metrics")
    victim.fit(trainer, workdir, STEPS, eval_every=3)
    assert scalars(whole)[12]["metrics/mae"] != pytest.approx(scalars(workdir)[12]["metrics/mae"], rel=1e-6)


def test_without_the_position_in_the_data_the_result_differs(runs, monkeypatch):
    reached, _, killed = runs
    load = checkpoints.load

    def forgetful(path, state):
        arrays = load(path, state)
        [source] = trainer._engine.sources.values()
        source.iterator = iter(victim.make_data())
        return arrays

    monkeypatch.setattr(checkpoints, "load", forgetful)
    trainer = reborn().reset()
    victim.fit(trainer, copied(killed, "without-data"), STEPS, eval_every=3)
    assert victim.digest(trainer) != reached


def test_without_the_memory_of_the_callbacks_the_result_differs(runs, monkeypatch):
    reached, _, killed = runs
    monkeypatch.setattr("looptape.trainer.loop.callbacks.CallbackBridge.restore", lambda *_: None)
    trainer = reborn().reset()
    victim.fit(trainer, copied(killed, "without-callbacks"), STEPS, eval_every=3)
    assert victim.digest(trainer) != reached


def test_options_of_callbacks_are_those_they_were_made_with(tmp_path):
    """Keras turns the sign of `min_delta` at the first epoch's end: restored, it would turn once more."""
    x, y = regression(24)

    def fit(steps, patience):
        plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=patience, min_delta=1e9)
        trainer = Trainer(dense_model(), keras.optimizers.SGD(0.01), {"error": mse()})
        options = {"eval_dataset": (x, y), "eval_every": 1, "workdir": tmp_path, "progress": False}
        trainer.fit(shuffled(x, y, 4), steps=steps, callbacks=[plateau], **options)
        return plateau

    assert fit(3, patience=5).wait == 2
    resumed = fit(4, patience=9)
    assert resumed.wait == 3 and resumed.patience == 9 and resumed.min_delta == -1e9


def test_without_the_sums_of_the_open_row_the_row_differs(runs, monkeypatch):
    """The checkpoint is at step 10; the row of step 12 has the updates from 9 on."""
    _, whole, killed = runs
    monkeypatch.setattr("looptape.trainer.checkpoints.trainer_state.restore_windows", lambda *_: None)
    workdir = copied(killed, "without-windows")
    victim.fit(reborn().reset(), workdir, STEPS, eval_every=3)
    left, right = scalars(whole)[12], scalars(workdir)[12]
    assert left["loss/error"] != pytest.approx(right["loss/error"], rel=1e-6)


# ---- Other kinds of runs, each with a new trainer after the kill.


def interrupted(make, fit, workdir, kill_at, forget=lambda: None):
    """Two trainers: one that was never interrupted, one that went on after a kill; `forget` is called in between."""
    whole = make()
    fit(whole, os.path.join(workdir, "whole"), [])
    dying = make()
    with pytest.raises(Killed):
        fit(dying, os.path.join(workdir, "killed"), [Killer(dying, kill_at)])
    forget()
    resumed = make()
    fit(resumed, os.path.join(workdir, "killed"), [])
    return whole, resumed


class TwoLosses(Trainer):
    def compute_losses(self, batch, training):
        x, y = batch
        prediction = self.model(x, training=training)
        return {"error": tf.square(prediction - y)[:, 0], "size": 0.1 + tf.abs(prediction)[:, 0]}


@pytest.mark.parametrize("combiner", every_combiner(lambda cls: cls.name, without=["weighted_sum"]))
def test_every_combiner(combiner, tmp_path):
    x, y = regression(24)

    def make():
        return TwoLosses(dense_model(), keras.optimizers.Adam(0.01), combiner=losses.combiner_from_name(combiner))

    def fit(trainer, workdir, callbacks):
        options = {"workdir": workdir, "callbacks": callbacks, "checkpoint_every": 4, "progress": False}
        trainer.fit(shuffled(x, y, 4), steps=9, log_every=3, **options)

    whole, resumed = interrupted(make, fit, str(tmp_path), 6)
    assert victim.digest(whole) == victim.digest(resumed)


def test_float16_with_a_loss_scale_that_fell(tmp_path):
    x, y = regression(24)

    def make():
        keras.utils.set_random_seed(1)
        policy = "mixed_float16"
        layers = [keras.layers.Dense(4, dtype=policy), keras.layers.Dense(1, dtype=policy)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        return Trainer(model, keras.optimizers.SGD(1e-7), {"error": mse()})

    def fit(trainer, workdir, callbacks):
        options = {"workdir": workdir, "callbacks": callbacks, "checkpoint_every": 4, "progress": False}
        trainer.fit(shuffled(1000 * x, 1000 * y, 4), steps=12, **options)

    whole, resumed = interrupted(make, fit, str(tmp_path), 6)
    scale = float(whole._engine.loss_scale.value())
    assert scale < 2.0**15 and whole._engine.counters.skips.total > 1, "nothing was skipped, so nothing is shown"
    assert (
        float(resumed._engine.loss_scale.value()) == scale
        and resumed._engine.counters.skips.total == whole._engine.counters.skips.total
    )
    assert victim.digest(whole) == victim.digest(resumed)


def test_a_schedule_and_several_optimizers(tmp_path):
    x, y = regression(24)

    def make():
        schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
        optimizers = {".*kernel": keras.optimizers.Adam(schedule), ".*": keras.optimizers.SGD(0.01, momentum=0.9)}
        weights = {"error": losses.LinearRamp(0.0, 1.0, 8)}
        return Trainer(dense_model(), optimizers, {"error": mse()}, loss_weights=weights)

    def fit(trainer, workdir, callbacks):
        options = {"workdir": workdir, "callbacks": callbacks, "checkpoint_every": 4, "progress": False}
        trainer.fit(shuffled(x, y, 4), steps=12, **options)

    whole, resumed = interrupted(make, fit, str(tmp_path), 6)
    assert victim.digest(whole) == victim.digest(resumed)


@pytest.mark.parametrize("kind", ["arrays", "generator", "random"])
def test_passes_over_shuffled_data(kind, tmp_path):
    """Killed in the third of four passes, each in an order of its own; with a position that can be saved or not."""
    x, y = regression(24)

    def data():
        if kind == "arrays":
            return x, y
        if kind == "generator":
            return lambda: iter([(x[i : i + 4], y[i : i + 4]) for i in range(0, 24, 4)])
        seeded = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(24, seed=3)
        same = lambda a: tf.ensure_shape(tf.numpy_function(lambda x: x, [a], tf.float32), [None, 3])  # noqa: E731
        return seeded.batch(4).map(lambda a, b: (same(a), b))

    def make():
        return Trainer(dense_model(), keras.optimizers.Adam(0.01), {"error": mse()})

    def fit(trainer, workdir, callbacks):
        options = {"workdir": workdir, "callbacks": callbacks, "checkpoint_every": 5, "progress": False}
        trainer.fit(data(), epochs=4, batch_size=4, **options)

    with pytest.warns(UserWarning, match="position in this dataset cannot be saved") if kind != "arrays" else _quiet():
        whole, resumed = interrupted(make, fit, str(tmp_path), 17)
    assert whole._engine.counters.step == resumed._engine.counters.step == 24
    assert victim.digest(whole) == victim.digest(resumed)


def _quiet():
    return np.errstate()


def test_probed_updates(tmp_path):
    """Probes on: the same bits as without them, and one row per probed step."""
    whole = victim.make_trainer()
    victim.fit(whole, str(tmp_path / "whole"), 12)
    dying = victim.make_trainer()
    with pytest.raises(Killed):
        victim.fit(dying, str(tmp_path / "killed"), 12, callbacks=[Killer(dying, 11)])
    resumed = victim.make_trainer()
    victim.fit(resumed, str(tmp_path / "killed"), 12)
    assert victim.digest(whole) == victim.digest(resumed)
    left, right = scalars(tmp_path / "whole"), scalars(tmp_path / "killed")
    assert left.keys() == right.keys() and any(tag.startswith("timestep/gru/") for tag in left[12])
    assert right[12] == pytest.approx(left[12], rel=1e-6)


@pytest.mark.parametrize("forgotten", [False, True])
def test_without_the_best_weights_of_early_stopping_the_result_differs(forgotten, tmp_path, monkeypatch):
    """Nothing is better than the first evaluation by so much: its weights are put back at the end."""
    x, y = regression(24)

    def make():
        return Trainer(dense_model(), keras.optimizers.Adam(0.01), {"error": mse()})

    def fit(trainer, workdir, callbacks):
        stopping = keras.callbacks.EarlyStopping("val_loss", patience=99, min_delta=1e9, restore_best_weights=True)
        options = {"eval_dataset": (x, y), "eval_every": 2, "checkpoint_every": 4, "progress": False}
        trainer.fit(shuffled(x, y, 4), steps=8, workdir=workdir, callbacks=[stopping, *callbacks], **options)

    def forget():
        if forgotten:
            monkeypatch.setattr("looptape.trainer.loop.callbacks.CallbackBridge.restore_best_weights", lambda *_: None)

    whole, resumed = interrupted(make, fit, str(tmp_path), 6, forget)
    assert (victim.digest(whole) == victim.digest(resumed)) == (not forgotten)


@pytest.mark.parametrize("forgotten", ["nothing", "position", "passes"])
def test_without_running_forward_to_the_position_the_result_differs(forgotten, tmp_path, monkeypatch):
    """Data whose position cannot be saved, killed in the third pass; each pass has an order of its own."""
    x, y = regression(24)
    same = lambda a: tf.ensure_shape(tf.numpy_function(lambda x: x, [a], tf.float32), [None, 3])  # noqa: E731

    def make():
        return Trainer(dense_model(), keras.optimizers.Adam(0.01), {"error": mse()})

    def fit(trainer, workdir, callbacks):
        tf.random.set_seed(4)
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(24, seed=3).batch(4)
        options = {"workdir": workdir, "callbacks": callbacks, "checkpoint_every": 5, "progress": False}
        trainer.fit(data.map(lambda a, b: (same(a), b)), epochs=4, **options)

    skip_to = Source.skip_to
    broken = {
        "nothing": skip_to,
        "position": lambda source, position, passes: skip_to(source, 0, passes),
        "passes": lambda source, position, passes: skip_to(source, position, 0),
    }[forgotten]
    with pytest.warns(UserWarning, match="position in this dataset cannot be saved"):
        forget = lambda: monkeypatch.setattr(Source, "skip_to", broken)  # noqa: E731
        whole, resumed = interrupted(make, fit, str(tmp_path), 17, forget)
    assert whole._engine.counters.step == resumed._engine.counters.step == 24
    assert (victim.digest(whole) == victim.digest(resumed)) == (forgotten == "nothing")


# ---- The end of a run.


@pytest.mark.parametrize("stopped_early", [False, True])
def test_a_run_killed_between_its_last_step_and_its_end_is_ended(stopped_early, tmp_path, caplog):
    """A checkpoint is there, but neither the last evaluation nor the best weights of EarlyStopping nor the model."""
    x, y = regression(24)

    def fit(trainer, workdir, callbacks=()):
        stopping = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=1e9, restore_best_weights=True)
        options = {"eval_dataset": (x, y), "eval_every": 2, "checkpoint_every": 2, "progress": False}
        steps = 9 if stopped_early else 4
        callbacks = [*([stopping] if stopped_early else []), *callbacks]
        return trainer.fit(shuffled(x, y, 4), steps=steps, workdir=workdir, callbacks=callbacks, **options)

    class Dies(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            raise Killed

    def make():
        return Trainer(dense_model(), keras.optimizers.Adam(0.01), {"error": mse()})

    whole, killed, resumed = make(), make(), make()
    history = fit(whole, tmp_path / "whole").history
    with pytest.raises(Killed):
        fit(killed, tmp_path / "killed", [Dies()])
    assert not os.path.exists(tmp_path / "killed" / "model.keras")
    fit(resumed, tmp_path / "killed")
    assert resumed._engine.counters.step == whole._engine.counters.step == 4
    assert victim.digest(whole) == victim.digest(resumed)
    assert os.path.exists(tmp_path / "killed" / "model.keras")
    caplog.clear()
    assert fit(make(), tmp_path / "killed").history == history, "the whole run's, from the checkpoint"
    assert "Nothing to do" in caplog.text, "it is complete now"


# ---- What does not fit.


def test_another_optimizer_is_refused(tmp_path):
    x, y = regression(24)
    options = {"steps": 2, "workdir": tmp_path, "progress": False}
    Trainer(dense_model(), keras.optimizers.RMSprop(0.01), {"error": mse()}).fit(shuffled(x, y, 4), **options)
    other = Trainer(dense_model(), keras.optimizers.Adagrad(0.01), {"error": mse()})
    with pytest.raises(ValueError, match=r"was made with \['RMSprop'\], this trainer has \['Adagrad'\]. Use the same"):
        other.fit(shuffled(x, y, 4), **{**options, "steps": 4})


def test_another_learning_rate_is_told(tmp_path, caplog):
    x, y = regression(24)
    options = {"workdir": tmp_path, "progress": False}
    Trainer(dense_model(), keras.optimizers.SGD(0.25), {"error": mse()}).fit(shuffled(x, y, 4), steps=2, **options)
    other = Trainer(dense_model(), keras.optimizers.SGD(0.5), {"error": mse()})
    with caplog.at_level("WARNING", logger="absl"):
        other.fit(shuffled(x, y, 4), steps=3, **options)
    assert "given as 0.25 when the checkpoint was made, and as 0.5 now" in caplog.text
    assert float(other.optimizer.learning_rate) == 0.25


def test_other_versions_are_told(tmp_path, monkeypatch):
    x, y = regression(24)
    options = {"workdir": tmp_path, "progress": False}
    make = lambda: Trainer(dense_model(), keras.optimizers.SGD(0.25), {"error": mse()})  # noqa: E731
    make().fit(shuffled(x, y, 4), steps=2, **options)
    now = checkpoints.read_manifest(tmp_path / "checkpoints" / "step-0000000002")["host"]["environment"]
    monkeypatch.setattr(
        "looptape.trainer.checkpoints.contents.compatibility.environment", lambda: {**now, "keras": "99"}
    )
    with pytest.warns(UserWarning, match=f"keras: {now['keras']} → 99"):
        make().fit(shuffled(x, y, 4), steps=3, **options)


@pytest.mark.parametrize("name", ["[lr=0.1]", "back\\slash", "many*"])
def test_a_work_directory_named_like_a_pattern(name, tmp_path):
    """TensorFlow matches patterns where it reads checkpoints; `many*` would also match a neighbour."""
    data = dataset(*regression(8), batch=4).repeat()
    (tmp_path / "many-more").mkdir()
    first = Trainer(dense_model(), keras.optimizers.SGD(0.1), {"error": mse()})
    first.fit(data, steps=2, workdir=tmp_path / name, progress=False)
    second = Trainer(dense_model(seed=2), keras.optimizers.SGD(0.1), {"error": mse()})
    second.fit(data, steps=3, workdir=tmp_path / name, progress=False)
    first.fit(data, steps=3, progress=False)
    assert_identical_weights(first.model, second.model)
    [again] = first._engine.sources[id(data)].refetch(1)  # from the checkpoint of step 2
    np.testing.assert_array_equal(again[0], regression(8)[0][:4])
