"""The work directory: what it holds, and what happens when a run starts there again."""

import importlib.metadata
import json
import os

import numpy as np
import pytest

from looptape.experiments.launch import flags
from looptape.experiments.launch.options import Refused
from looptape.experiments.records import versions
from tests.experiments.line import Config, kept, run


def read(directory, name):
    with open(os.path.join(directory, name)) as file:
        return json.load(file) if name.endswith(".json") else file.read()


def test_it_holds_everything_about_a_run(tmp_path):
    workdir = str(tmp_path / "run")
    results = run(workdir=workdir, slope=2.0)
    config = Config(workdir=workdir, slope=2.0)
    assert read(workdir, "flags.txt").split("\n")[:-1] == flags.flag_lines(config)
    stored = read(workdir, "config.json")
    assert stored["experiment"] == "line"
    assert Config(**stored["config"], workdir=workdir) == config
    (session,) = read(workdir, "environment.json")
    assert session["versions"]["tensorflow"] == importlib.metadata.version("tensorflow")
    assert session["commit"] is None or len(session["commit"]) == 40
    written = read(workdir, "results.json")
    assert written["step"] == 4 and written["results"] == results
    assert {"train", "eval", "checkpoints", "model.weights.h5", "model.keras"} <= set(os.listdir(workdir))


def test_the_same_flags_resume_and_end_where_one_run_would(tmp_path):
    whole, straight = kept(workdir=str(tmp_path / "whole"), steps=10)
    kept(workdir=str(tmp_path / "parts"), steps=4)
    parts, resumed = kept(workdir=str(tmp_path / "parts"), steps=10)
    assert parts == whole
    for one, other in zip(straight.trainer.model.get_weights(), resumed.trainer.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(read(tmp_path / "parts", "environment.json")) == 2


def test_nothing_left_to_do_gives_the_results_and_keeps_the_files(tmp_path):
    workdir = str(tmp_path)
    first = run(workdir=workdir)
    before = {name: read(workdir, name) for name in ("flags.txt", "environment.json", "results.json")}
    assert run(workdir=workdir, learning_rate=0.5) == first
    assert {name: read(workdir, name) for name in before} == before


@pytest.mark.parametrize("changed", [{"slope": 2.0}, {"features": 2}, {"batch_size": 16}, {"optimizer": "adam"}])
def test_a_changed_model_or_data_is_refused_with_the_difference(tmp_path, changed):
    workdir = str(tmp_path)
    run(workdir=workdir)
    before = {name: read(workdir, name) for name in ("flags.txt", "config.json", "results.json")}
    with pytest.raises(Refused) as error:
        run(workdir=workdir, steps=6, **changed)
    ((name, value),) = changed.items()
    assert f"  --{name}={getattr(Config(), name)} → --{name}={value}\n" in str(error.value)
    assert "--steps" not in str(error.value) and "--accept_changes" in str(error.value)
    assert {name: read(workdir, name) for name in before} == before


def test_results_that_a_killed_run_could_not_write_are_written_by_the_next(tmp_path):
    results = run(workdir=str(tmp_path))
    os.remove(tmp_path / "results.json")
    run(workdir=str(tmp_path))
    assert read(tmp_path, "results.json")["results"] == results


def test_a_workdir_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="`workdir` is '.*file/run', which cannot be used: .*Choose a directory that"):
        run(workdir=str(tmp_path / "file" / "run"))


def test_told_otherwise_it_goes_on(tmp_path, capsys):
    run(workdir=str(tmp_path))
    _, experiment = kept(workdir=str(tmp_path), steps=6, slope=2.0, accept_changes=True)
    assert experiment.trainer._engine.counters.step == 6
    assert "--slope=3.0 → --slope=2.0" in capsys.readouterr().err
    assert read(tmp_path, "config.json")["config"]["slope"] == 2.0


def test_what_may_change_is_shown_and_takes_effect(tmp_path, capsys):
    """The checkpoint holds the old learning rate and weights: they must not win."""
    run(workdir=str(tmp_path))
    results, experiment = kept(workdir=str(tmp_path), steps=5, learning_rate=0.01, loss_weights="error=2")
    shown = capsys.readouterr().err
    assert "--learning_rate=0.1 → --learning_rate=0.01" in shown and "--loss_weights= → --loss_weights=error=2" in shown
    assert float(experiment.trainer.optimizer.learning_rate.numpy()) == pytest.approx(0.01)
    assert experiment.trainer.loss_weights["error"] == 2.0
    assert results["loss"] == pytest.approx(2 * results["error"])


def test_another_experiment_is_refused(tmp_path):
    run(workdir=str(tmp_path))
    config = read(tmp_path, "config.json")
    (tmp_path / "config.json").write_text(json.dumps({**config, "experiment": "circle"}))
    with pytest.raises(Refused, match="a run of the experiment 'circle'; a workdir holds one run. Use another."):
        run(workdir=str(tmp_path), steps=6)


def test_before_the_first_checkpoint_flags_may_change(tmp_path):
    def fails(config):
        raise RuntimeError("no data")

    from looptape import launch

    with pytest.raises(RuntimeError, match="no data"):
        launch.run(Config(workdir=str(tmp_path)), fails, name="line", show=False)
    assert not os.listdir(tmp_path)  # a run that never began leaves nothing to be compared with
    run(workdir=str(tmp_path), slope=1.0)


def test_a_damaged_config_is_no_first_run(tmp_path):
    run(workdir=str(tmp_path))
    (tmp_path / "config.json").write_text('{"experiment"')
    with pytest.raises(Refused, match="config.json is damaged: .* Restore it, or use another --workdir."):
        run(workdir=str(tmp_path), steps=6)


def test_other_versions_are_named():
    before = {"commit": "a", "python": "3.11.7", "cpus": 2, "versions": {"keras": "3.15.1", "numpy": "2.0"}}
    now = {**before, "cpus": 4, "versions": {"keras": "3.16.0", "numpy": "2.0"}}
    assert versions.changed_versions(before, now) == ["cpus 2 → 4", "keras 3.15.1 → 3.16.0"]
    assert versions.changed_versions(now, now) == []
