"""Launching in this process: what the common flags do."""

import dataclasses
import glob
import os
import shutil
import sys

import keras
import numpy as np
import pytest

from looptape import Trainer, launch, timesteps
from looptape.dashboard.rules import findings
from looptape.experiments.launch import factories, results_table, runner
from looptape.experiments.launch.options import Refused
from looptape.experiments.launch.runner import limited
from looptape.experiments.tools import commands
from looptape.losses import GradNorm
from looptape.trainer.step.forward.loss_weights import WrongLossNames
from tests.experiments import line
from tests.experiments.line import Config, kept, run


def test_common_flags_reach_the_trainer():
    config = Config(
        accumulation_steps=2,
        clip_norm=0.5,
        ema_decay=0.9,
        probe_every=3,
        health_every=5,
        health="positions",
        jit_compile=True,
        combiner="gradnorm",
        combiner_args="alpha=0.5",
        recurrent="adjoint",
        recurrent_memory="sqrt",
        bptt_window=4,
        loss_weights="error=2",
    )
    made = launch.trainer_options(config, {"error": 1.0, "penalty": 0.1})
    combiner = made.pop("combiner")
    assert isinstance(combiner, GradNorm) and combiner.alpha == 0.5
    assert made == {
        "accumulation_steps": 2,
        "clip_norm": 0.5,
        "ema_decay": 0.9,
        "probe_every": 3,
        "health_every": 5,
        "health": "positions",
        "jit_compile": True,
        "run_eagerly": False,
        "recurrent": "adjoint",
        "recurrent_memory": "sqrt",
        "bptt_window": 4,
        "timestep_actions": [],
        "loss_weights": {"error": 2.0, "penalty": 0.1},
    }


def test_flags_of_actions_on_time_steps():
    given = {"cut": 5, "detach": 0.25, "scale": 0.9, "normalize": 2.0, "clip": 1.5}
    config = Config(seed=3, **{f"timestep_{name}": value for name, value in given.items()})
    carried = [timesteps.Cut(every=5), timesteps.Detach(0.25, seed=3)]
    summed = [timesteps.Scale(0.9), timesteps.Normalize(2.0), timesteps.ClipNorm(1.5)]
    assert factories.trainer_options(config)["timestep_actions"] == carried + summed
    assert factories.trainer_options(Config())["timestep_actions"] == []


def test_eager_runs_are_not_compiled():
    made = launch.trainer_options(Config(jit_compile=True, run_eagerly=True))
    assert made["run_eagerly"] and not made["jit_compile"]


@pytest.mark.parametrize("name", factories.OPTIMIZERS)
def test_every_optimizer_can_be_made(name):
    optimizer = launch.optimizer(Config(optimizer=name, learning_rate=0.25))
    assert float(optimizer.learning_rate) == 0.25
    assert isinstance(optimizer, keras.optimizers.SGD) == (name in ("sgd", "momentum"))


def test_the_learning_rate_follows_its_schedule():
    config = Config(learning_rate=2.0, learning_rate_schedule="cosine", warmup_steps=4, steps=14)
    schedule = factories.learning_rate(config)
    expected = [0.5, 1.0, 1.5, 2.0]
    expected += [2.0 * (0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * t / 10))) for t in range(11)]
    np.testing.assert_allclose([float(schedule(step)) for step in range(15)], expected, rtol=1e-5)
    constant = factories.learning_rate(dataclasses.replace(config, learning_rate_schedule="constant"))
    np.testing.assert_allclose([float(constant(step)) for step in (0, 3, 4, 100)], [0.5, 2.0, 2.0, 2.0])
    assert factories.learning_rate(Config(learning_rate=0.5)) == 0.5
    decaying = factories.learning_rate(dataclasses.replace(config, learning_rate_schedule="exponential"))
    expected = [0.5, 2.0, 2.0, 2.0 * 0.9**0.5, 2.0 * 0.9**3]
    np.testing.assert_allclose([float(decaying(step)) for step in (0, 3, 4, 504, 3004)], expected, rtol=1e-5)


def test_a_schedule_is_part_of_a_saved_optimizer():
    config = Config(learning_rate=2.0, learning_rate_schedule="cosine", warmup_steps=4, steps=14)
    saved = keras.optimizers.serialize(launch.optimizer(config))
    rates = keras.optimizers.deserialize(saved).get_config()["learning_rate"]
    again, schedule = keras.saving.deserialize_keras_object(rates), factories.learning_rate(config)
    assert [float(again(step)) for step in range(15)] == [float(schedule(step)) for step in range(15)]


def test_the_same_seed_gives_the_same_run_and_another_does_not():
    assert run(seed=3) == run(seed=3) != run(seed=4)


def test_a_fast_run_does_everything_and_keeps_nothing(tmp_path, capsys):
    seen = []

    def build(config):
        seen.append(config)
        return line.build(config)

    config = Config(workdir=str(tmp_path / "kept"), steps=10_000, fast_dev_run=True, eval_every=5000)
    launch.run(config, build, name="line")
    assert not os.listdir(tmp_path) and not os.path.exists(seen[0].workdir)
    assert (seen[0].steps, seen[0].eval_every, seen[0].checkpoint_every) == (4, 2, 2)
    assert "line: it runs." in capsys.readouterr().out


def test_overfitting_trains_and_evaluates_on_the_same_few_batches():
    config = Config(overfit_batches=2)
    experiment = limited(line.build(config), config)
    x = [batch[0].numpy() for batch in experiment.dataset.take(4)]
    np.testing.assert_array_equal(x[0], x[2])
    np.testing.assert_array_equal(x[1], x[3])
    assert not np.array_equal(x[0], x[1])
    held_out = [batch[0].numpy() for batch in experiment.eval_dataset]
    np.testing.assert_array_equal(held_out, x[:2])


def test_evaluation_can_be_limited():
    for limit, count in ((2, 2), (None, 3), (9, 3)):
        config = Config(limit_eval_batches=limit)
        assert len(list(limited(line.build(config), config).eval_dataset)) == count


def test_each_of_several_evaluation_sets_can_be_limited():
    config = Config(limit_eval_batches=2)
    made = line.build(config)
    several = dataclasses.replace(made, eval_dataset={"a": made.eval_dataset, "b": made.eval_dataset.take(1)})
    found = limited(several, config).eval_dataset
    assert {name: len(list(data)) for name, data in found.items()} == {"a": 2, "b": 1}


def test_loggers_by_their_names(tmp_path):
    run(workdir=str(tmp_path), loggers="csv, jsonl")
    assert {"metrics.csv", "metrics.jsonl"} <= set(os.listdir(tmp_path))


def test_loggers_that_cannot_write_are_refused_before_the_work_directory_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(
        Refused, match=r"`loggers` is 'mlflow'. .*is not installed. Run `pip install looptape\[mlflow\]`"
    ):
        run(workdir=str(tmp_path / "run"), loggers="mlflow")
    assert os.listdir(tmp_path) == []
    with pytest.raises(
        Refused, match="`loggers` is 'jsonl', but there is no work directory for its file. Set --workdir"
    ):
        run(loggers="jsonl")


@pytest.mark.parametrize("path", ["", "model.weights.h5", "model.keras"])
def test_a_warm_start_takes_the_weights_of_another_run(tmp_path, path):
    _, source = kept(workdir=str(tmp_path / "source"), steps=20)
    weights = source.trainer.model.get_weights()
    results, experiment = kept(init_from=str(tmp_path / "source" / path), learning_rate=1e-12, seed=9)
    for one, other in zip(weights, experiment.trainer.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert experiment.trainer._engine.counters.step == 4


def test_a_resumed_run_does_without_the_warm_start(tmp_path):
    run(workdir=str(tmp_path / "source"), steps=20)
    options = {"workdir": str(tmp_path / "run"), "init_from": str(tmp_path / "source"), "seed": 1}
    _, first = kept(**options)
    before = first.trainer.model.get_weights()
    shutil.rmtree(tmp_path / "source")
    _, second = kept(**options, steps=5, learning_rate=1e-12)
    np.testing.assert_allclose(second.trainer.model.get_weights()[0], before[0], atol=1e-6)


def test_a_warm_start_from_nothing_is_refused(tmp_path):
    with pytest.raises(Refused, match="`init_from` is .*nowhere', which has no weights; it must be the workdir of a"):
        run(init_from=str(tmp_path / "nowhere"))


def test_a_warm_start_says_what_it_took_over(tmp_path, capsys):
    """Also from a run that was never finished, of which the best weights are left."""
    _, source = kept(workdir=str(tmp_path), steps=20, features=2)
    count = len(source.trainer.model.weights)
    launch.run(Config(init_from=str(tmp_path)), line.build)
    said = capsys.readouterr().err
    assert f"model.keras: {count - 1} weights taken over; 1 of another shape, left as they are: " in said
    assert "(2, 1) in the source, " in said
    for name in ("model.keras", "model.weights.h5"):
        os.remove(tmp_path / name)
    launch.run(Config(init_from=str(tmp_path), features=2), line.build)
    assert f"best.weights.h5: {count} weights taken over\n" in capsys.readouterr().err


def test_a_file_of_weights_must_fit_as_a_whole(tmp_path):
    run(workdir=str(tmp_path), features=2)
    with pytest.raises(Refused, match="`init_from` is .*model.weights.h5', which does not fit this model"):
        run(init_from=str(tmp_path / "model.weights.h5"))


def test_a_profile_is_written(tmp_path):
    results = run(workdir=str(tmp_path), profile="2-3")
    assert glob.glob(str(tmp_path / "train" / "plugins" / "profile" / "*" / "*.xplane.pb"))
    assert results == run()  # looking changes nothing


def test_precision_is_that_of_the_model():
    try:
        _, experiment = kept(precision="mixed_bfloat16")
        assert experiment.trainer.model.get_layer("line").compute_dtype == "bfloat16"
    finally:
        keras.config.set_dtype_policy("float32")


def test_the_closing_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(commands.shutil, "which", lambda name: f"/somewhere/{name}")
    outcome = results_table.Outcome({"loss": 0.25, "error": 0.25, "accuracy": 0.5}, 4, 3, 1.5, 2.0)
    goals = (launch.Goal("error", below=0.5, baseline=1.0), launch.Goal("accuracy", above=0.9))
    doc = "A line.\n\nExpect an error\nbelow 0.5.\n\nMore."
    text = results_table.table(Config(workdir="runs/my run", seed=5), "line", doc, goals, outcome)
    assert text.split("\n") == [
        "",
        "line after 4 steps",
        "            reached  expected",
        "  loss      0.25",
        "  error     0.25     < 0.5 reached      baseline: 1",
        "  accuracy  0.5      > 0.9 NOT reached",
        "  3 updates in 2 s, 2.0 steps per second",
        "  Expect an error below 0.5.",
        "  tensorboard --logdir 'runs/my run'",
    ]
    changed = results_table.table(Config(slope=1.0), "line", doc, goals, outcome)
    assert "(the expectation is for the default flags; this run had --slope=1.0)" in changed
    assert "nothing was kept; --workdir=" in changed


@pytest.mark.parametrize("columns, most", [(80, 80), (200, 100)])
def test_the_closing_table_is_as_wide_as_the_terminal(monkeypatch, columns, most):
    monkeypatch.setenv("COLUMNS", str(columns))
    said = findings.finding("lstm reaches back 9 of 100 time steps. " * 4, "lstm", 9, "vanishing")
    outcome = results_table.Outcome({"error": 0.25}, 4, 3, 1.5, 2.0, (said,))
    changed = Config(slope=1.0, steps=3, batch_size=16, learning_rate=1e-5, clip_norm=1.0, warmup_steps=100)
    lines = results_table.table(changed, "line", "Expect " + "an error below 0.5, " * 9, (), outcome).split("\n")
    assert most - 12 < max(map(len, lines)) <= most


def test_tensorboard_is_named_as_it_can_be_typed(monkeypatch, tmp_path):
    """By its name on the PATH; else beside the interpreter, from here if that is near."""
    monkeypatch.setattr(commands.shutil, "which", lambda name: None)
    monkeypatch.setattr(commands.sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert commands.tensorboard() == os.path.join(".venv", "bin", "tensorboard")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert commands.tensorboard() == str(tmp_path / ".venv" / "bin" / "tensorboard")


def test_a_goal_has_one_limit():
    with pytest.raises(ValueError, match="Goal 'error' needs exactly one of `below` and `above`"):
        launch.Goal("error")


def test_build_must_return_an_experiment():
    with pytest.raises(TypeError, match=r"`build` returned a NoneType; it must return launch.Experiment\(trainer"):
        launch.run(Config(), lambda config: None, show=False)


def test_an_experiment_without_evaluation_ends_with_its_training_losses(tmp_path):
    def build(config):
        return dataclasses.replace(line.build(config), eval_dataset=None, goals=())

    results = launch.run(Config(workdir=str(tmp_path), eval_every=2), build, name="line", show=False)
    assert set(results) == {"loss", "error"}


def test_a_main_without_a_config_or_a_build_is_answered():
    class Loose:
        pass

    with pytest.raises(TypeError, match="as the config; it must be a class that inherits from launch.Config. Write"):
        launch.main(Loose, line.build)
    with pytest.raises(TypeError, match="got None as `build`; it must be a function from a config"):
        launch.main(Config, None)


@pytest.mark.parametrize("given", [None, {"error": 1.0}], ids=["in the constructor", "the experiment's own"])
def test_a_misspelt_loss_is_answered_like_other_wrong_flags(given, capsys):
    def build(config):
        options = factories.trainer_options(config, given)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        trainer = Trainer(model, "sgd", {"error": keras.losses.MeanSquaredError()}, **options)
        return launch.Experiment(trainer, None)

    with pytest.raises(SystemExit) as stop:
        runner._main(Config(loss_weights="errr=1"), build, "line", "", None)
    assert stop.value.code == 2
    said = "line: `loss_weights` names 'errr', which is not a loss; did you mean 'error'? The losses are error."
    assert said in capsys.readouterr().err


def test_wrong_weights_of_the_experiment_itself_are_shown_with_their_traceback():
    error = WrongLossNames(["error"], ["errr"], ["error"])
    assert factories.wrong_loss_weight("", error) is None
    assert factories.wrong_loss_weight("error=2", error) is None
