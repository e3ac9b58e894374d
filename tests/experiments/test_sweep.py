"""Sweeps: many runs, some of which fail. What they run here is a small program."""

import json
import os
import subprocess
import sys

import pytest

from experiments import sweep
from tests.experiments.test_hparams import Board
from tests.experiments.tools import REPOSITORY

TOY = '''"""A toy."""
import json, os, sys, time
class Config: ...
def build(config): ...
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
with open(os.path.join(flags["workdir"], "starts"), "a") as file:
    file.write("x")
print("running", flags["a"])
if flags["a"] == "bad":
    sys.exit("a is bad")
if flags["a"] == "slow":
    time.sleep(60)
if flags["a"] == "dead":
    os.kill(os.getpid(), 9)
results = {"loss": float(flags["a"]) + float(flags.get("b", 0)), "score": 1.0}
with open(os.path.join(flags["workdir"], "results.json"), "w") as file:
    json.dump({"step": 1, "results": results}, file)
'''


@pytest.fixture
def make(tmp_path):
    """Makes the runs of a grid of the toy, as `sweep.main` makes those of an experiment."""
    (tmp_path / "toy.py").write_text(TOY)

    def runs(*grid, further=()):
        program = [sys.executable, str(tmp_path / "toy.py")]
        return [sweep.Run(program, str(tmp_path / "out"), settings, further) for settings in sweep.grid(grid)]

    return runs


def execute(runs, jobs=1):
    said = []
    sweep.execute(runs, jobs, said.append)
    return said


def starts(run):
    with open(os.path.join(run.path, "starts")) as file:
        return len(file.read())


def test_one_that_fails_and_one_that_is_killed_do_not_stop_the_others(make):
    runs = make("a=bad,2,dead,1")
    said = execute(runs, jobs=2)
    assert said[0] == "4 runs, 0 of them finished before"
    assert sorted(line.partition("] ")[2] for line in said[1:]) == [
        "a=1  finished",
        "a=2  finished",
        "a=bad  FAILED, exit status 1: a is bad",
        "a=dead  FAILED, killed by SIGKILL: running dead",
    ]
    assert sweep.table(runs, "loss").split("\n") == [
        "        loss  run",
        "           1  a=1",
        "           2  a=2",
        f"           -  a=bad  (exit status 1; {runs[0].log})",
        f"           -  a=dead  (killed by SIGKILL; {runs[2].log})",
    ]
    with open(runs[0].log) as file:
        assert file.read() == "running bad\na is bad\n"


def test_started_again_only_what_is_missing_runs(make):
    runs = make("a=1,2")
    execute(runs)
    os.remove(os.path.join(runs[1].path, "results.json"))
    runs = make("a=1,2,3")
    assert execute(runs)[0] == "3 runs, 1 of them finished before"
    assert [starts(run) for run in runs] == [1, 2, 1]


def test_other_flags_run_again(make):
    execute(make("a=1"))
    (run,) = make("a=1", further=["--b=10"])
    assert not run.finished and run.results == {}
    assert execute([run])[0] == "1 runs, 0 of them finished before"
    assert starts(run) == 2 and run.results["loss"] == 11


def test_the_best_comes_first(make):
    runs = make("a=1,3,2")
    execute(runs)
    assert [line.split()[1] for line in sweep.table(runs, "loss", True).split("\n")] == ["run", "a=3", "a=2", "a=1"]
    assert "a=1  (no 'accuracy' among ['loss', 'score']; " in sweep.table(runs, "accuracy")


def test_no_more_than_jobs_at_once_and_none_is_left_behind(make):
    runs = make("a=slow", "b=1,2,3")
    started = []

    def interrupt(self):
        if all(os.path.exists(run.log) for run in runs[:2]):
            started.extend(run for run in runs if os.path.exists(run.log))
            raise KeyboardInterrupt
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep.Run, "poll", interrupt)
        with pytest.raises(KeyboardInterrupt):
            execute(runs, jobs=2)
    assert started == runs[:2]
    assert [run.process.poll() for run in started] == [-15, -15]


def test_the_program_checks_what_it_is_asked_for(tmp_path):
    def answer(*arguments, code=1):
        command = [sys.executable, "-m", "experiments.sweep", *arguments]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == code
        return done.stdout + done.stderr

    shown = answer("--experiment=ading_problem")
    assert "--experiment is 'ading_problem', which is no experiment. Did you mean 'adding_problem'?" in shown
    assert "--grid=cell is not of the form flag=value,value." in answer("--experiment=adding_problem", "--grid=cell")
    shown = answer("--experiment=adding_problem", "--grid=cel=gru", f"--workdir={tmp_path / 'sweep'}", code=2)
    assert shown.strip() == "adding_problem: --cel is not a flag; did you mean --cell? --help lists them all."
    assert not os.path.exists(tmp_path / "sweep")


@pytest.mark.long
def test_a_sweep_of_a_real_experiment(tmp_path):
    flags = ["--length=6", "--units=4", "--nojit_compile", "--steps=10", "--eval_examples=20"]
    command = [sys.executable, "-m", "experiments.sweep", "--experiment=adding_problem", f"--workdir={tmp_path}"]
    command += ["--grid=cell=gru,lsdm", "--grid=seed=0,1", "--jobs=2", "--metric=error", "--", *flags]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert sorted(os.listdir(tmp_path)) == [f"cell={cell},seed={seed}" for cell in ("gru", "lsdm") for seed in (0, 1)]
    assert done.stdout.count("Did you mean 'lstm'?") == 2
    groups = Board(tmp_path).groups()
    assert [len(group.sessions) for group in groups] == [2]
    again = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert "4 runs, 2 of them finished before" in again.stdout


def test_grids():
    assert sweep.grid([]) == [{}]
    assert sweep.grid(["a=1,1", "--b=x"]) == [{"a": "1", "b": "x"}]
    for text, message in [
        ("a", "is not of the form"),
        ("a=", "is not of the form"),
        ("workdir=x", "gives each run its"),
    ]:
        with pytest.raises(ValueError, match=message):
            sweep.grid([text])
    with pytest.raises(ValueError, match="it is given twice"):
        sweep.grid(["a=1", "a=2"])


def test_a_damaged_result_is_not_finished(tmp_path):
    run = sweep.Run(["toy"], str(tmp_path), {"a": "1"})
    os.makedirs(run.path)
    for name, content in (("results.json", '{"res'), ("command.json", json.dumps(["--a=1"]))):
        with open(os.path.join(run.path, name), "w") as file:
            file.write(content)
    assert not run.finished and run.results == {}
