"""The tables of experiments/README.md: what a run's closing words say, and that only the rows that ran change."""

import json

import pytest

from looptape import launch
from looptape.experiments.launch import results_table
from looptape.experiments.tools import reproduce
from looptape.experiments.tools.reproduce import RESULTS, Case, Table, closing_words, make_runs, rewritten, row
from tests.experiments.line import Config


def words(error, share, seconds=40.0):
    """The closing table of a run with two goals, as `launch` prints it."""
    goals = (
        launch.Goal("error", below=0.01, baseline=0.1667, baseline_name="always 1"),
        launch.Goal("share", above=0.5),
    )
    outcome = results_table.Outcome({"loss": 9.0, "error": error, "share": share}, 1000, 1000, seconds, 1000 / seconds)
    return results_table.table(Config(workdir="runs/it"), "line", "Expect an `error` below 0.01.", goals, outcome)


def test_closing_words_are_those_of_the_closing_table():
    found = closing_words("step 20/1000 loss 3\n" + words(0.002, 0.4))
    assert found.goals == {"error": ("< 0.01", True), "share": ("> 0.5", False)}
    assert found.seconds == 40
    resumed = closing_words(words(0.02, 0.4) + "\n" + words(0.002, 0.6, seconds=12.0))
    assert [goal.reached for goal in resumed.goals.values()] == [True, True] and resumed.seconds == 52


@pytest.fixture
def runs(tmp_path):
    """Three runs of a case; all are finished, the last one misses a goal."""
    case = Case("line", ("--slope=2",))
    made = make_runs(case, tmp_path, ["0", "1", "5"])
    for run, (error, share) in zip(made, [(0.002, 0.61), (0.0031, 0.7), (0.2, 0.8)], strict=True):
        (tmp_path / "line_slope=2" / run.name).mkdir(parents=True)
        with open(run.log, "w") as file:
            file.write(words(error, share))
        for name, content in {
            "results.json": {"step": 1000, "results": {"loss": 9.0, "error": error, "share": share}},
            "command.json": ["--slope=2", f"--seed={run.settings['seed']}"],
        }.items():
            with open(tmp_path / "line_slope=2" / run.name / name, "w") as file:
                json.dump(content, file)
    return made


def test_a_row_says_what_was_reached(runs):
    cells = row(Case("line", ("--slope=2",)), runs)
    assert cells == [
        "`line` `--slope=2`",
        "0, 1, 5",
        "error 0.002, 0.0031, 0.2; share 0.61, 0.7, 0.8",
        "error < 0.01; share > 0.5",
        "no, 2 of 3",
        "40 s",
    ]
    assert row(Case("line", ("--slope=2",)), runs[:2])[4] == "yes, 2 of 2"
    assert row(Case("line", ("--slope=2",), expected=False), runs)[4] == "to compare"


def test_a_row_of_runs_that_failed_says_so(runs, tmp_path):
    missing = make_runs(Case("line"), tmp_path, ["0"])
    missing[0].failure = "exit status 2: line: no data"
    assert row(Case("line"), missing)[2:5] == ["not run: exit status 2: line: no data", "", "no"]
    assert row(Case("line", ("--slope=2",)), [runs[0], *missing])[4] == "no, 1 of 2"


def test_only_the_rows_that_ran_change():
    table = Table("results", ("experiment", "time"))
    text = "# A\n<!-- results -->\n<!-- end of results -->\nrest\n"
    text = rewritten(text, table, {"`b`": ["`b`", "2 s"]})
    text = rewritten(text, table, {"`a`": ["`a`", "1 s"], "`c`": ["`c`", ""]})
    text = rewritten(text, table, {"`b`": ["`b`", "9 s"]})
    body = "| experiment | time |\n| --- | --- |\n| `a` | 1 s |\n| `b` | 9 s |\n| `c` |  |\n"
    assert text == f"# A\n<!-- results -->\n{body}<!-- end of results -->\nrest\n"
    assert rewritten(text, table, {}) == text
    with pytest.raises(ValueError, match="There is no <!-- results -->"):
        rewritten("nothing", table, {})


def test_the_readme_has_every_experiment_and_both_tables():
    text = reproduce.README.read_text()
    for name in reproduce.listing.experiments():
        assert f"[`{name}`]({name}.py)" in text
    for table in (RESULTS, reproduce.COMBINER_TABLE):
        assert rewritten(text, table, {}) == text


def test_a_wrong_name_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        reproduce.main(["gann"])
    assert ended.value.code == 2 and "'gann' is not an experiment. Did you mean 'gan'?" in capsys.readouterr().err
