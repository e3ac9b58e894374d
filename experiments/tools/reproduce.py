"""Runs the full experiments, each with several seeds, and updates the tables of `experiments/README.md`.

    make experiments                                  # all of them, one after the other
    python -m looptape.experiments.tools.reproduce gan combiners     # some of them; rows of the others stay as they are
    python -m looptape.experiments.tools.reproduce sequential_mnist --mnist=path/of/idx/files

`combiners` is `multi_task` with every combiner, with nine seeds unless `--seeds` is given. Finished runs in `--workdir`
do not run again, and interrupted runs resume.
"""

import argparse
import difflib
import json
import os
import re
import statistics
import sys
import textwrap
from typing import NamedTuple

import keras

from looptape import launch
from looptape.dashboard import metadata
from looptape.experiments import multi_task
from looptape.experiments.tools import listing, sweep
from looptape.losses.combiners.names import exported
from looptape.trainer.summaries import event_writer

README = listing.HERE / "README.md"
COMBINERS = "combiners"
SEEDS, COMBINER_SEEDS = "0,1,2", "0,1,2,3,4,5,6,7,8"
# A line of a run's closing table about a goal: name, value, limit, whether it was reached.
_GOAL = re.compile(r"^  (\S+) +(\S+) +([<>] \S+) (NOT )?reached", re.MULTILINE)
_SECONDS = re.compile(r"updates in (\d+) s,")


class Case(NamedTuple):
    """The runs behind one row of the results: an experiment with some flags."""

    experiment: str
    flags: tuple = ()
    expected: bool = True  # whether the goals of the experiment hold for these flags, too

    @property
    def title(self):
        return " ".join([f"`{self.experiment}`", *(f"`{flag}`" for flag in self.flags)])


PIXELS = ("--pixels=1", "--cell=orthogonal", "--learning_rate=1e-3", "--steps=10000")
# Beside the default flags, with which every experiment is run.
FURTHER = (
    Case("copy_memory", ("--cell=rnn",), expected=False),
    Case("helmholtz", ("--steps=40000",)),
    Case("helmholtz", ("--steps=40000", "--combiner=weighted_sum"), expected=False),
    Case("sequential_mnist", ("--cell=gru",)),
    Case("sequential_mnist", PIXELS, expected=False),
    Case("sequential_mnist", (*PIXELS, "--permuted"), expected=False),
    Case("temporal_order", ("--omega=0",), expected=False),
)


def main(arguments):
    parser = argparse.ArgumentParser(prog="reproduce", description=__doc__, formatter_class=_KEPT_LINES)
    known = [*listing.experiments(), COMBINERS]
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(known)}; all by default")
    parser.add_argument("--workdir", default=os.path.join("runs", "experiments"), help="where the runs are kept")
    parser.add_argument("--seeds", help="seeds of the runs, 0,1,2 by default; for `combiners` 0 to 8")
    parser.add_argument("--mnist", help="`--data_path` of sequential_mnist; none to let Keras find or download MNIST")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            parser.error(f"{name!r} is not an experiment. " + (f"Did you mean {near[0]!r}?" if near else "See --help."))
    seeds = [seed.strip() for seed in (options.seeds or SEEDS).split(",")]
    failed = False
    for name in options.names or known:
        if name == COMBINERS:
            compare_combiners(options.workdir, seeds if options.seeds else COMBINER_SEEDS.split(","))
            continue
        for case in (Case(name), *(case for case in FURTHER if case.experiment == name)):
            print(f"== {case.title}", flush=True)
            needed = [f"--data_path={options.mnist}"] if name == "sequential_mnist" and options.mnist else []
            runs = make_runs(case, options.workdir, seeds, needed)
            sweep.execute(runs, jobs=1, report=_say)
            failed |= not all(run.finished for run in runs)
            _rewrite(RESULTS, {case.title: row(case, runs)})
    return 1 if failed else 0


def make_runs(case, workdir, seeds, needed=()):
    """Returns one sweep.Run per seed of a case, each in its own directory. `needed` are flags of the machine."""
    directory = os.path.join(workdir, "_".join([case.experiment, *(flag.lstrip("-") for flag in case.flags)]))
    program = [sys.executable, "-m", f"looptape.experiments.{case.experiment}"]
    return [sweep.Run(program, directory, {"seed": seed}, (*case.flags, *needed)) for seed in seeds]


def row(case, runs):
    """Returns the cells of a case: title, seeds, results by seed, goal, on how many seeds it was reached, seconds."""
    seeds = ", ".join(run.settings["seed"] for run in runs)
    finished = [run for run in runs if run.finished]
    if not finished:
        reason = textwrap.shorten(runs[0].failure or "not started", 100, placeholder=" …").replace("|", "/")
        return [case.title, seeds, f"not run: {reason}", "", "no", ""]
    found = [closing_words(_read(run.log)) for run in finished]
    goals = found[0].goals
    results = [f"{name} " + ", ".join(f"{run.results[name]:.3g}" for run in finished) for name in goals]
    reached = sum(all(goal.reached for goal in words.goals.values()) for words in found)
    verdict = f"{'yes' if reached == len(runs) else 'no'}, {reached} of {len(runs)}" if case.expected else "to compare"
    limits = "; ".join(f"{name} {goal.limit}" for name, goal in goals.items())
    seconds = f"{statistics.median(words.seconds for words in found):.0f} s"
    return [case.title, seeds, "; ".join(results), limits, verdict, seconds]


class GoalWords(NamedTuple):
    limit: str
    reached: bool


class ClosingWords(NamedTuple):
    goals: dict  # {name: GoalWords}
    seconds: float


def closing_words(log):
    """Reads the goals and the time from the closing table in the log of a run. The last session counts.

    >>> closing_words("  error  0.0002  < 0.01 reached  always 1: 0.167\\n  9 updates in 40 s, 0.2 steps per second")
    ClosingWords(goals={'error': GoalWords(limit='< 0.01', reached=True)}, seconds=40.0)
    """
    goals = {name: GoalWords(limit, not missed) for name, _, limit, missed in _GOAL.findall(log)}
    return ClosingWords(goals, float(sum(map(int, _SECONDS.findall(log)))))


def compare_combiners(workdir, seeds):
    """Runs `multi_task` with every combiner in this process, and updates their table.

    The runs are short: a process for each would take longer to start than to train.
    """
    rows = {}
    for name in sorted(combiner.name for combiner in exported()):
        runs = [_run_combiner(name, int(seed), os.path.join(workdir, COMBINERS, f"{name}_{seed}")) for seed in seeds]
        cells = [f"`{name}`", *(spread([run[result] for run in runs]) for result in ("accuracy", "unexplained"))]
        cells.append(f"{statistics.mean(run['conflicts'] for run in runs):.0%}")
        cells.append(f"{statistics.mean(run['cosine'] for run in runs):.2f}")
        cells.append(f"{statistics.median(run['seconds'] for run in runs):.0f} s")
        print(" | ".join(cells), flush=True)
        rows[cells[0]] = cells
    _rewrite(COMBINER_TABLE, rows)


def _run_combiner(name, seed, workdir):
    """Runs `multi_task`, unless that run is finished, and returns its {name: number}."""
    finished = os.path.join(workdir, "results.json")
    if not os.path.exists(finished):
        keras.utils.clear_session()
        config = multi_task.Config(combiner=name, seed=seed, workdir=workdir)
        launch.run(config, multi_task.build, name="multi_task", show=False)
    content = json.loads(_read(finished))
    probed = {"optimizer/gradient_conflict/rate": [], "optimizer/gradient_cosine/arm-height": []}
    for _, value in event_writer.read(os.path.join(workdir, "train")):
        tag = metadata.current_tag(value.tag)
        if tag in probed:
            probed[tag].append(value.tensor.float_val[0])
    conflicts, cosine = (statistics.mean(values) for values in probed.values())
    seconds = content["step"] / content["steps_per_second"]
    return {**content["results"], "conflicts": conflicts, "cosine": cosine, "seconds": seconds}


def spread(values):
    """Returns the mean of some values with the lowest and the highest.

    >>> spread([0.5, 0.7, 0.6])
    '0.600 (0.500–0.700)'
    """
    return f"{statistics.mean(values):.3f} ({min(values):.3f}–{max(values):.3f})"


class Table(NamedTuple):
    name: str
    header: tuple


RESULTS = Table("results", ("experiment", "seeds", "results by seed", "goal", "reached", "time of a run"))
COMBINER_TABLE = Table(
    "combiners", ("combiner", "accuracy", "unexplained", "conflicts", "mean cosine", "time of a run")
)


def rewritten(text, table, rows):
    """Replaces or adds rows of the table between `<!-- name -->` and `<!-- end of name -->`. Returns the new text.

    Args:
        text: text of the file.
        table: the table to change.
        rows: {first cell: cells}.
    """
    begin, end = f"<!-- {table.name} -->", f"<!-- end of {table.name} -->"
    before, found, rest = text.partition(begin)
    old, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"There is no {begin} … {end}; the table belongs between them. Put both lines back.")
    kept = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in old.strip().splitlines()[2:]]
    merged = {cells[0]: cells for cells in kept} | rows
    lines = [table.header, ["---"] * len(table.header), *(merged[key] for key in sorted(merged))]
    return before + begin + "\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n" + end + after


def _rewrite(table, rows):
    README.write_text(rewritten(README.read_text(), table, rows))


def _read(path):
    with open(path, errors="replace") as file:
        return file.read()


def _say(text):
    print(text, flush=True)


_KEPT_LINES = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
