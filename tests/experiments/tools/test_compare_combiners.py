"""Comparisons of combiners. What they run here is a small program."""

import os
import subprocess
import sys

import pytest

from looptape.experiments.tools import compare_combiners, sweep
from tests.experiments.line import REPOSITORY

TOY = '''"""A toy: the metric is made of the flags."""
import json, os, sys
flags = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
if flags["combiner"] == "log_sum" and flags["seed"] == "1":
    sys.exit("a loss is 0")
base = {"weighted_sum": 2.0, "random_weights": 3.0, "config": 1.0, "mgda": 2.5, "log_sum": 9.0}[flags["combiner"]]
if "combiner_args" in flags:
    base += 10
results = {"error": base + 0.1 * int(flags["seed"])}
with open(os.path.join(flags["workdir"], "results.json"), "w") as file:
    json.dump({"step": 1, "results": results}, file)
'''


@pytest.fixture
def finished(tmp_path):
    """Runs of a toy with four combiners and two seeds, one of which failed."""
    (tmp_path / "toy.py").write_text(TOY)
    chosen = [compare_combiners.Chosen(name, "") for name in (*compare_combiners.ALWAYS, "config", "log_sum")]
    chosen.append(compare_combiners.Chosen("mgda", "normalize=l2"))
    program = [sys.executable, str(tmp_path / "toy.py")]
    runs = compare_combiners.make_runs(program, str(tmp_path / "out"), chosen, ["0", "1"])
    sweep.execute(runs, 2, lambda line: None)
    return runs


def test_the_table(finished, tmp_path, capsys):
    code = compare_combiners.conclude(finished, str(tmp_path / "out"), "error", False)
    lines = capsys.readouterr().out.split("\n")
    assert code == 1  # one run failed
    columns = ["combiner", "runs", "error,", "mean", "lowest", "highest", "beats", "sum", "beats", "random"]
    assert lines[0].split() == columns
    assert [line.split() for line in lines[1:6]] == [
        ["config", "2", "of", "2", "1.05", "1", "1.1", "2", "of", "2", "2", "of", "2"],
        ["weighted_sum", "2", "of", "2", "2.05", "2", "2.1", "-", "2", "of", "2"],
        ["random_weights", "2", "of", "2", "3.05", "3", "3.1", "0", "of", "2", "-"],
        ["mgda(normalize=l2)", "2", "of", "2", "12.55", "12.5", "12.6", "0", "of", "2", "0", "of", "2"],
        ["log_sum", "1", "of", "2", "9", "9", "9", "0", "of", "1", "0", "of", "1"],
    ]
    assert lines[6].startswith("not finished: combiner=log_sum,seed=1  (exit status 1; ")
    assert lines[7] == (
        "Better than the plain sum and random weights on every seed: config. "
        "Not judged, because runs are missing: log_sum."
    )
    with open(tmp_path / "out" / "combiners.txt") as file:
        assert file.read() == "\n".join(lines[:8]) + "\n"
    with open(tmp_path / "out" / "combiners.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"


def test_the_largest_may_be_the_best(finished):
    rows = compare_combiners.compared(finished, "error", maximize=True)
    assert [row.title for row in rows][:2] == ["mgda(normalize=l2)", "random_weights"]
    assert rows[0].wins == ((2, 2), (2, 2)) and rows[-2].wins == ((0, 2), (0, 2))
    assert rows[-1].title == "log_sum"  # a run is missing


def test_where_nobody_wins_the_verdict_says_so(finished):
    rows = compare_combiners.compared(finished, "error", False)
    rows = [row for row in rows if row.title not in ("config", "log_sum")]
    assert compare_combiners.verdict(rows).endswith("fixed weights are enough here.")


class Result:
    """A run of three with its result: a number, NaN where it diverged, None where it failed."""

    def __init__(self, combiner, seed, value):
        self.settings = {"combiner": combiner, "seed": seed}
        self.name, self.ending, self.log = f"{combiner},{seed}", "exit status 1", "log"
        self.results = {} if value is None else {"loss": value}


def verdict_of(**values):
    runs = [Result(name, str(seed), value) for name, own in values.items() for seed, value in enumerate(own)]
    rows = compare_combiners.compared(runs, "loss", False)
    compare_combiners.table(rows, runs, "loss")
    return [row.title for row in rows], compare_combiners.verdict(rows)


SUM, RANDOM = [2.0] * 3, [3.0] * 3


def test_a_combiner_without_all_runs_does_not_win():
    titles, said = verdict_of(weighted_sum=SUM, random_weights=RANDOM, config=[1.0, None, None])
    assert titles[-1] == "config"
    assert said.startswith("None with all runs is better") and said.endswith("runs are missing: config.")


@pytest.mark.parametrize("missing", ["weighted_sum", "random_weights"])
@pytest.mark.parametrize("left", [[], [3.0]])
def test_without_a_baseline_there_is_no_conclusion(missing, left):
    base = {"weighted_sum": SUM, "random_weights": RANDOM, missing: left + [None] * (3 - len(left))}
    _, said = verdict_of(**base, config=[1.0] * 3)
    assert said == f"No conclusion: runs of {missing} are missing. Start the command again to run them."


def test_runs_that_are_not_finite_come_last_and_lose():
    titles, said = verdict_of(
        mgda=[float("nan"), 1.0, 1.0],
        random_weights=[3.0, float("nan"), float("inf")],
        config=[1.0] * 3,
        weighted_sum=SUM,
        upgrad=[1.0, 1.0, float("inf")],
    )
    assert titles[:2] == ["config", "weighted_sum"] and set(titles[2:]) == {"mgda", "random_weights", "upgrad"}
    assert said == "Better than the plain sum and random weights on every seed: config."


def test_a_metric_that_no_run_has(finished, tmp_path, capsys):
    assert compare_combiners.conclude(finished, str(tmp_path / "out"), "eror", False) == 2
    said = capsys.readouterr().err
    assert said.startswith("--metric=eror is not among the results; it must be one of error. Correct it")


def test_without_matplotlib_there_is_no_picture(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    compare_combiners.conclude(finished, str(tmp_path / "out"), "error", False)
    assert "There is no picture: matplotlib is missing. Install it" in capsys.readouterr().out


def test_started_again_only_what_is_missing_runs(finished):
    said = []
    sweep.execute(finished, 2, said.append)
    assert said[0] == "10 runs, 9 of them already finished"


def test_the_baselines_are_always_among_them():
    titles = [each.title for each in compare_combiners.parse_combiners("ConFIG, weighted_sum,mgda:normalize=l2")]
    assert titles == ["weighted_sum", "random_weights", "config", "mgda(normalize=l2)"]
    everyone = [each.title for each in compare_combiners.parse_combiners("all")]
    assert everyone[:2] == list(compare_combiners.ALWAYS) and len(everyone) == len(set(everyone)) >= 28


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--combiners is missing; it must name.*Use e.g."),
        ("confg", "--combiners: 'confg' is not a combiner; did you mean 'config'.*it must be one of.*Correct"),
        ("mgda:normalise=l2", "--combiners: 'normalise' is not an argument of.*did you mean 'normalize'"),
    ],
)
def test_bad_combiners(text, message):
    with pytest.raises(ValueError, match=message):
        compare_combiners.parse_combiners(text)


@pytest.mark.parametrize("text", ["", "a", "1,-2", "0.5"])
def test_bad_seeds(text):
    with pytest.raises(ValueError, match=f"--seeds={text} was given; it must be whole numbers.*Use e.g. --seeds=0,1,2"):
        compare_combiners.parse_seeds(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experiment=mlti_task"], "'mlti_task' is not an experiment: it must be"),
        (["--experiment=multi_task", "--seeds=a"], "--seeds=a was given; it must be whole numbers"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_sentence(arguments, message):
    """Without the list of flags, and without TensorFlow."""
    program = (
        "import sys\nsys.modules['tensorflow'] = None\n"
        f"from looptape import _command\n_command.main(['compare-combiners', *{arguments!r}])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"looptape compare-combiners: {message}") and done.stderr.count("\n") == 1


@pytest.mark.long
def test_a_real_experiment(tmp_path):
    command = [
        sys.executable,
        "-m",
        "looptape",
        "compare-combiners",
        "--experiment=multi_task",
        f"--workdir={tmp_path}",
    ]
    command += ["--combiners=upgrad", "--seeds=0", "--metric=accuracy", "--maximize", "--jobs=2", "--", "--steps=20"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "upgrad" in done.stdout and os.path.exists(tmp_path / "combiners.png")
