"""Sweeps: many runs, some of which fail. What they run here is a small program."""

import contextlib
import json
import os
import pty
import subprocess
import sys
import time

import pytest

from looptape.experiments.tools import live_lines, sweep
from tests.experiments.line import REPOSITORY
from tests.experiments.records.test_hparams import Board

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
    assert said[0] == "4 runs, 0 of them already finished"
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
    assert execute(runs)[0] == "3 runs, 1 of them already finished"
    assert [starts(run) for run in runs] == [1, 2, 1]


def test_other_flags_run_again(make):
    execute(make("a=1"))
    (run,) = make("a=1", further=["--b=10"])
    assert not run.finished and run.results == {}
    assert execute([run])[0] == "1 runs, 0 of them already finished"
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


def test_a_terminated_sweep_ends_its_runs(tmp_path):
    """They would go on by themselves, and hold their work directories when the sweep is started again."""
    program = "import os, sys, time; open(sys.argv[-1].partition('=')[2] + '/pid', 'w').write(str(os.getpid()))"
    sweeping = f"""
import sys
from looptape.experiments.tools import commands, sweep
run = sweep.Run([sys.executable, "-S", "-c", {program + "; time.sleep(60)"!r}], {str(tmp_path)!r}, {{"a": "1"}})
commands.launch("sweep", [], "", lambda: None, lambda arguments: sweep.execute([run], 1))
"""
    environment, noted = {**os.environ, "PYTHONPATH": REPOSITORY}, tmp_path / "a=1" / "pid"
    process = subprocess.Popen([sys.executable, "-c", sweeping], env=environment)
    end = time.monotonic() + 60
    while not (noted.exists() and noted.read_text()):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    process.terminate()
    assert process.wait(timeout=30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)


def test_the_program_checks_what_it_is_asked_for(tmp_path):
    def answer(*arguments, code=2):
        command = [sys.executable, "-m", "looptape", "sweep", *arguments]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == code
        return done.stdout + done.stderr

    shown = answer("--experiment=ading_problem")
    assert "Did you mean 'adding_problem'?" in shown
    assert "--grid=cell is not of the form flag=value,value." in answer("--experiment=adding_problem", "--grid=cell")
    shown = answer("--experiment=adding_problem", "--grid=cel=gru", f"--workdir={tmp_path / 'sweep'}")
    assert shown.strip() == "adding_problem: --cel is not a flag; did you mean --cell? --help lists them all."
    assert not os.path.exists(tmp_path / "sweep")


@pytest.mark.long
def test_a_sweep_of_a_real_experiment(tmp_path):
    flags = ["--length=6", "--units=4", "--nojit_compile", "--steps=10", "--eval_examples=20"]
    command = [sys.executable, "-m", "looptape", "sweep", "--experiment=adding_problem", f"--workdir={tmp_path}"]
    command += ["--grid=cell=gru,lsdm", "--grid=seed=0,1", "--jobs=2", "--metric=error", "--", *flags]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    assert sorted(os.listdir(tmp_path)) == [f"cell={cell},seed={seed}" for cell in ("gru", "lsdm") for seed in (0, 1)]
    assert done.stdout.count("Did you mean 'lstm'?") == 2
    groups = Board(tmp_path).groups()
    assert [len(group.sessions) for group in groups] == [2]
    again = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert "4 runs, 2 of them already finished" in again.stdout


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


def test_each_running_job_has_a_live_line(make, tmp_path):
    """On a terminal; the lines give way to what is reported."""
    toy = TOY.replace('print("running", flags["a"])', 'print("step 3/9  ETA 2 s", flush=True)')
    runs = make("a=slow", "b=1,2")
    (tmp_path / "toy.py").write_text(toy.replace("sleep(60)", "sleep(1.2)"))
    reader, writer = pty.openpty()
    os.set_blocking(reader, False)
    text = b""
    with os.fdopen(writer, "w") as stream:
        sweep.execute(runs, 2, lambda line: print(line, file=stream), live_lines.LiveLines(stream))
        stream.flush()
        with contextlib.suppress(OSError):
            while True:
                text += os.read(reader, 4096)
    os.close(reader)
    text = text.decode()
    assert "  a=slow,b=1  step 3/9  ETA 2 s\r\n  a=slow,b=2  step 3/9  ETA 2 s\r\n\x1b[2A\x1b[J" in text
    assert text.rstrip().endswith("could not convert string to float: 'slow'"), "the toy fails in the end"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--experiment=adding_problm", "Did you mean 'adding_problem'?"),
        ("--grid=cell", "--grid=cell is not of the form flag=value,value. Use e.g. --grid=cell=lstm,gru."),
    ],
)
def test_a_misspelt_word_is_answered_in_one_line(flag, message):
    command = [sys.executable, "-m", "looptape", "sweep", "--experiment=adding_problem", flag]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    said = [line for line in done.stderr.splitlines() if line.startswith("looptape sweep: ")]
    assert len(said) == 1 and message in said[0] and "--maximize" not in done.stderr
