"""Searches by Optuna: the flags they propose, pruning, and continuing a study. They run a small program here."""

import builtins
import os
import subprocess
import sys
import types

import numpy as np
import optuna
import pytest

from looptape import Trainer
from looptape.experiments.tools import search, sweep
from looptape.trainer.summaries.event_writer import EventWriter
from tests.experiments.line import REPOSITORY
from tests.trainer.tools import linear_model

TOY = '''"""A toy: the loss is (a - 0.3)²."""
import json, os, sys
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
with open(os.path.join(flags["workdir"], "starts"), "a") as file:
    file.write("x")
results = {"loss": (float(flags["a"]) - 0.3) ** 2}
with open(os.path.join(flags["workdir"], "results.json"), "w") as file:
    json.dump({"step": 1, "results": results}, file)
'''


@pytest.fixture
def make(tmp_path):
    """(a function that makes a run of the toy, the work directory)."""
    (tmp_path / "toy.py").write_text(TOY)
    workdir = str(tmp_path / "out")
    return (lambda settings: sweep.Run([sys.executable, "-S", str(tmp_path / "toy.py")], workdir, settings)), workdir


def starts(run):
    with open(os.path.join(run.path, "starts")) as file:
        return len(file.read())


def test_what_a_flag_says():
    rate, units, cell = search.axes(["learning_rate=1e-4..1e-1:log", "--units=16..128", "cell=lstm, gru"])
    assert rate == search.Axis("learning_rate", 1e-4, 1e-1, True)
    assert units == search.Axis("units", 16, 128) and isinstance(units.low, int)
    assert cell.choices == ("lstm", "gru")
    trial = optuna.trial.FixedTrial({"learning_rate": 0.0012345678, "units": 20, "cell": "gru"})
    assert [axis.draw(trial) for axis in (rate, units, cell)] == ["0.00123457", "20", "gru"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a"], "--search=a is not of the form"),
        (["a=1..x"], "is not of the form"),
        (["a=1..2:linear"], "is not of the form"),
        (["a=1..2..3"], "is not of the form"),
        (["a=only"], "is not of the form"),
        (["a=2..1"], "the low end must lie below the high end"),
        (["a=0..1:log"], "the low end must be above 0"),
        (["a=1..2", "a=1..3"], "it is given twice"),
        (["workdir=a,b"], "the search gives each run its own"),
    ],
)
def test_bad_input(texts, message):
    with pytest.raises(ValueError, match=message):
        search.axes(texts)


def test_a_search_finds_the_minimum_and_continues_where_it_stopped(make):
    make_run, workdir = make
    searched, said = search.axes(["a=0.0..1.0"]), []
    first = search.Search(search.open_study(workdir, "loss", False), searched, make_run, "loss", said.append)
    first.execute(4, 2)
    study = search.open_study(workdir, "loss", False)
    lost = study.ask()  # as of a process that was killed: drawn, not ended
    lost_value = searched[0].draw(lost)
    second = search.Search(study, searched, make_run, "loss", said.append)
    second.execute(8, 2)
    trials = search.open_study(workdir, "loss", False).trials
    assert len(trials) == 8 and all(trial.state.is_finished() for trial in trials)
    for trial in trials:
        assert trial.value == pytest.approx((float(f"{trial.params['a']:.6g}") - 0.3) ** 2)
    assert len({trial.params["a"] for trial in trials}) == 8, "a continued search does not begin with the same values"
    assert f"a={lost_value}" in [run.name for run in second.runs]
    assert len(second.runs) == 8 and all(starts(run) == 1 for run in second.runs)
    assert said[4 + 1].startswith("8 trials, 4 of them ended before")
    table = sweep.table(second.runs, "loss").splitlines()
    found = [float(line.split()[0]) for line in table[1:]]
    assert len(found) == 8 and found == sorted(found), "from the best to the worst"


def test_a_bad_run_is_pruned_by_its_evaluations(make, monkeypatch):
    """Four good trials with evaluations; a fifth, ten times as bad at the same steps, is ended and not counted."""
    make_run, workdir = make
    study = search.open_study(workdir, "error", False)
    for value in (0.1, 0.11, 0.12, 0.13):
        trial = study.ask()
        search.Axis("a", 0.0, 1.0).draw(trial)
        trial.report(value, 10)
        study.tell(trial, value)
    monkeypatch.setattr(search, "_SECONDS_BETWEEN_READINGS", 0.0)
    run, stopped = make_run({"a": "0.5"}), []
    writer = EventWriter(os.path.join(run.path, "eval"))
    writer.scalars(10, {"loss/error": 1.0, "loss/other": 3.0})
    writer.close()
    run.process, run.poll, run.stop = object(), lambda: False, lambda: stopped.append(True)
    said = []
    searching = search.Search(study, [search.Axis("a", 0.0, 1.0)], make_run, "error", said.append)
    trial = study.ask()
    board = types.SimpleNamespace(clear=lambda: None)
    assert searching._ended((trial, run, {"read": 0.0, "step": -1}), board)
    assert stopped and study.trials[-1].state == optuna.trial.TrialState.PRUNED
    assert said == [f"[trial 4] {run.name}  pruned"]


def test_the_result_by_its_tag(tmp_path):
    writer = EventWriter(str(tmp_path / "eval"))
    writer.scalars(5, {"loss/error": 2.0, "metrics/accuracy": 0.5})
    writer.scalars(10, {"loss/error": 1.0, "metrics/accuracy": 0.75})
    writer.close()
    assert search.evaluations(str(tmp_path), "error") == [(5, 2.0), (10, 1.0)]
    assert search.evaluations(str(tmp_path), "loss") == [(5, 2.0), (10, 1.0)], "the only loss"
    assert search.evaluations(str(tmp_path), "accuracy") == [(5, 0.5), (10, 0.75)]
    assert search.evaluations(str(tmp_path), "absent") == []


def test_the_results_of_several_evaluation_sets_by_their_tags():
    """The names are those that `Trainer.evaluate` gives, the tags those that `fit` writes."""
    x = np.ones([4, 3], "float32")
    for losses in ({"error": "mse"}, {"error": "mse", "size": "mae"}):
        trainer = Trainer(linear_model(), "sgd", losses, metrics={"mae": "mae"} if len(losses) == 1 else None)
        results = trainer.evaluate({"clean": (x, x[:, :1]), "noisy": (x + 1, x[:, :1])})
        tags = trainer._engine.evaluation.tags
        found = search.results_by_name(sorted(set(tags.values())))
        for name in results:
            assert results[name] == results[next(each for each, tag in tags.items() if tag == found[name])], name


def test_a_run_that_ends_between_two_readings_reports_its_evaluations(make):
    make_run, workdir = make
    study = search.open_study(workdir, "loss", False)
    run = make_run({"a": "0.5"})
    writer = EventWriter(os.path.join(run.path, "eval"))
    writer.scalars(10, {"loss/error": 1.0})
    writer.scalars(20, {"loss/error": 0.5})
    writer.close()
    run.process, run.poll = object(), lambda: True
    searching = search.Search(study, [search.Axis("a", 0.0, 1.0)], make_run, "loss", lambda line: None)
    board = types.SimpleNamespace(clear=lambda: None)
    assert searching._ended((study.ask(), run, {"read": 0.0, "step": -1}), board)
    assert study.trials[-1].intermediate_values == {10: 1.0, 20: 0.5}


def test_a_study_of_another_metric_is_refused(make):
    _, workdir = make
    study = search.open_study(workdir, "loss", False)
    study.tell(study.ask(), 1.0)
    with pytest.raises(ValueError, match="has --metric=loss to minimize; now it is error to minimize"):
        search.open_study(workdir, "error", False)


def test_a_misspelt_metric_ends_the_search_after_one_trial_and_loses_none(make):
    make_run, workdir = make
    searched = search.axes(["a=0.0..1.0"])
    first = search.Search(search.open_study(workdir, "los", False), searched, make_run, "los", print)
    with pytest.raises(
        ValueError, match=r"^--metric is 'los', which is not among the results of a=.*: loss. Use --metric=l"
    ):
        first.execute(5, 1)
    assert len(first.runs) == 1
    second = search.Search(search.open_study(workdir, "loss", False), searched, make_run, "loss", print)
    second.execute(2, 1)
    assert second.runs[0].name == first.runs[0].name and [starts(run) for run in second.runs] == [1, 1]
    values = [trial.value for trial in search.open_study(workdir, "loss", False).trials]
    assert values == [run.results["loss"] for run in second.runs]


def test_the_command_names_the_results_where_the_metric_is_misspelt(make, monkeypatch, capsys):
    make_run, workdir = make
    options = types.SimpleNamespace(search=["a=0..1.0"], grid=[], metric="los", maximize=False, trials=5, jobs=1)
    monkeypatch.setattr(sweep.Run, "refusal", lambda run: "")
    assert search.main([sys.executable, "-S", f"{os.path.dirname(workdir)}/toy.py"], workdir, options, []) == 2
    assert "looptape sweep: --metric is 'los', which is not" in capsys.readouterr().err


def test_a_study_continues_with_the_same_axes_and_flags_only(make):
    """Other axes were a KeyError, and results of other flags would be compared with each other."""
    _, workdir = make
    study = search.open_study(workdir, "loss", False)
    search.check_continued(study, search.axes(["typo=0..1"]), ["toy.py"], workdir)  # refused, before anything ran
    begun, command = ["a=0.0..1.0", "b=x,y"], ["toy.py", "--steps=5"]
    search.check_continued(study, search.axes(begun), command, workdir)
    study.ask()
    search.check_continued(study, search.axes(["b=x,y", "a=0.5..2.0"]), command, workdir)  # the ends of a range
    for texts, flags, message in (
        (["a=0.0..1.0"], command, r"other values of --search: a \(real numbers\), b \(x, y\); now there is a \(real"),
        (["a=0..1", "b=x,y"], command, r"now there is a \(integers\), b \(x, y\)\. Use the same"),
        (["a=0.1..1.0:log", "b=x,y"], command, r"now there is a \(real numbers, log\), b"),
        (["a=0.0..1.0", "b=x,z"], command, r"now there is a \(real numbers\), b \(x, z\)"),
        (begun, ["toy.py", "--steps=9"], "of the experiment and its flags: toy.py, --steps=5; now there is toy.py"),
    ):
        with pytest.raises(ValueError, match=message):
            search.check_continued(study, search.axes(texts), flags, workdir)


def test_without_optuna_there_is_advice(make, monkeypatch):
    importing = builtins.__import__

    def missing(name, *arguments, **options):
        if name == "optuna":
            raise ImportError
        return importing(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"--search needs Optuna.*looptape\[search\].*or use --grid"):
        search.open_study(make[1], "loss", False)


def test_the_command_refuses_grid_and_search_together(make, capsys):
    options = types.SimpleNamespace(search=["a=0..1"], grid=["b=1"], metric="loss", maximize=False)
    assert search.main([], make[1], options, []) == 2
    assert "--grid and --search are both given" in capsys.readouterr().err


@pytest.mark.long
def test_the_command_searches_a_real_experiment_and_shows_it_in_hparams(tmp_path):
    """Two trials of the adding problem: results in the table, the searched flag in TensorBoard's HParams."""
    command = [sys.executable, "-m", "looptape", "sweep", "--experiment=adding_problem", "--metric=error"]
    command += ["--search=learning_rate=1e-3..1e-1:log", "--trials=2", f"--workdir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": REPOSITORY}
    options = {"capture_output": True, "text": True, "cwd": REPOSITORY, "env": environment, "check": False}
    done = subprocess.run(
        [*command, "--", "--steps=4", "--eval_every=2", "--length=6", "--units=4", "--nojit_compile"],
        timeout=500,
        **options,
    )
    assert done.returncode == 0, done.stderr
    runs = [name for name in os.listdir(tmp_path) if name.startswith("learning_rate=")]
    assert len(runs) == 2 and all(name in done.stdout for name in runs)
    shown = [path for run in runs for path in os.listdir(tmp_path / run / "eval") if path.endswith(".flags.v2")]
    assert len(shown) == 4, "the beginning and the end of each session"
    study = search.open_study(str(tmp_path), "error", False)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
