"""Compares combiners on an experiment, over seeds: a table and a picture.

    looptape compare-combiners --experiment=multi_task \\
        --combiners=config,upgrad,pcd:goal=arm --seeds=0,1,2 \\
        --metric=accuracy --maximize --jobs=2 -- --steps=2000

The plain sum and random weights always take part: a combiner that does not
beat both on most seeds does not help. `--combiners=all` runs every
combiner; a combiner's arguments follow a colon, separated by semicolons.
Flags after `--` go to every run. Each run has its own directory; if you
start the command again, only the missing runs run. The table and the
picture are `combiners.txt` and `combiners.png` in the workdir (the picture
needs matplotlib).
"""

import math
import os
import statistics
import sys
from typing import NamedTuple

from absl import flags

from looptape.experiments.tools import commands, listing, sweep

ALWAYS = ("weighted_sum", "random_weights")
_OPTIONS = ("experiment", "combiners", "seeds", "workdir", "jobs", "metric", "maximize")


def define(flag_values=flags.FLAGS):
    """Defines the flags of a comparison."""
    common = {"flag_values": flag_values}
    flags.DEFINE_string("experiment", None, "name of an experiment, path of a file, or module", **common)
    flags.DEFINE_string(
        "combiners", None, "names, separated by commas, as name or name:argument=value;…; or all", **common
    )
    flags.DEFINE_string("seeds", "0,1,2", "seeds of the runs, separated by commas", **common)
    flags.DEFINE_string("workdir", None, "directory of the runs; runs/combiners_<experiment> by default", **common)
    flags.DEFINE_integer("jobs", 1, "runs at a time", lower_bound=1, **common)
    flags.DEFINE_string("metric", "loss", "result to compare", **common)
    flags.DEFINE_boolean("maximize", False, "the largest metric is the best", **common)
    for name in _OPTIONS:
        flag_values.register_key_flag_for_module(sys.argv[0], flag_values[name])


def main(arguments):
    options = flags.FLAGS
    try:
        experiment = listing.find(options.experiment or "")
        seeds, chosen = parse_seeds(options.seeds), parse_combiners(options.combiners)
    except ValueError as error:
        print(f"looptape compare-combiners: {error}", file=sys.stderr)
        return 2
    workdir = options.workdir or os.path.join("runs", f"combiners_{experiment.name}")
    runs = make_runs(experiment.command, workdir, chosen, seeds, arguments[1:])
    refusal = runs[0].refusal()
    if refusal:
        print(refusal, file=sys.stderr)
        return 2
    sweep.execute(runs, options.jobs)
    return conclude(runs, workdir, options.metric, options.maximize)


class Chosen(NamedTuple):
    """A combiner to compare."""

    name: str
    arguments: str  # as for --combiner_args, "" for none

    @property
    def title(self):
        return f"{self.name}({self.arguments})" if self.arguments else self.name


def parse_combiners(text):
    """Parses "config,pcd:goal=arm;tau=0.2" into [Chosen]: the plain sum and random weights first. Checks the names.

    >>> [each.title for each in parse_combiners("config,pcd:tau=0.2;memory=0")]
    ['weighted_sum', 'random_weights', 'config', 'pcd(tau=0.2,memory=0)']
    """
    from looptape import losses  # imports TensorFlow: after what can be refused without it
    from looptape.experiments.launch import factories
    from looptape.losses.combiners.names import exported

    if not text:
        raise ValueError(
            "--combiners is missing; it must name what to compare with the plain sum and random weights. Use e.g. "
            "--combiners=config,upgrad, or --combiners=all."
        )
    words = sorted(cls.name for cls in exported()) if text == "all" else [word.strip() for word in text.split(",")]
    found = [Chosen(name, "") for name in ALWAYS]
    for word in filter(None, words):
        name, _, arguments = word.partition(":")
        pairs = arguments.replace(";", ",")
        try:
            combiner = losses.combiner_from_name(name, **factories.pairs(pairs))
        except ValueError as error:
            raise ValueError(f"--combiners: {error}") from None
        found.append(Chosen(type(combiner).name, pairs))
    return list(dict.fromkeys(found))


def parse_seeds(text):
    """Parses "0,1" into ["0", "1"].

    >>> parse_seeds("0, 1,1")
    ['0', '1']
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = [word for word in words if not word.isdecimal()]
    if wrong or not words:
        raise ValueError(
            f"--seeds={text} was given; it must be whole numbers, separated by commas. Use e.g. --seeds=0,1,2."
        )
    return list(dict.fromkeys(words))


def make_runs(program, workdir, chosen, seeds, further=()):
    """Returns a [sweep.Run] for every combiner and seed: all combiners of one seed, then the next seed."""
    settings = []
    for seed in seeds:
        for each in chosen:
            arguments = {"combiner_args": each.arguments} if each.arguments else {}
            settings.append({"combiner": each.name, **arguments, "seed": seed})
    return [sweep.Run(program, workdir, each, further) for each in settings]


def conclude(runs, workdir, metric, maximize):
    """Prints and writes the table, and draws the picture. Returns the exit code."""
    known = sorted({name for run in runs for name in run.results})
    if known and metric not in known:
        print(
            f"--metric={metric} is not among the results; it must be one of {', '.join(known)}. Correct it and start "
            "again: finished runs do not run again.",
            file=sys.stderr,
        )
        return 2
    rows = compared(runs, metric, maximize)
    text = table(rows, runs, metric)
    print(text)
    with open(os.path.join(workdir, "combiners.txt"), "w") as file:
        file.write(text + "\n")
    picture = os.path.join(workdir, "combiners.png")
    try:
        draw(rows, metric, picture)
        print(f"The picture is in {picture}.")
    except ModuleNotFoundError:
        print("There is no picture: matplotlib is missing. Install it with `pip install looptape[pictures]`.")
    return 0 if all(run.finished for run in runs) else 1


class Row(NamedTuple):
    """The results of one combiner."""

    title: str
    values: dict  # {seed: metric} of the finished runs; NaN where a run diverged
    wins: tuple  # for each of `ALWAYS`: (seeds on which this was better, seeds that both have)
    seeds: int  # that were asked for

    @property
    def finite(self):
        return [value for value in self.values.values() if math.isfinite(value)]

    @property
    def mean(self):
        """The mean of all runs; NaN if one of them is not finite."""
        return statistics.mean(self.finite) if len(self.finite) == len(self.values) else math.nan


def compared(runs, metric, maximize):
    """Returns [Row] without combiners that have no finished run.

    Complete ones come first, from the best mean to the worst; then those with a missing run; then those with a run
    that is not finite.
    """
    values: dict[str, dict[str, float]] = {}
    seeds = {run.settings["seed"] for run in runs}
    for run in runs:
        title = Chosen(run.settings["combiner"], run.settings.get("combiner_args", "")).title
        values.setdefault(title, {})
        if metric in run.results:
            values[title][run.settings["seed"]] = run.results[metric]
    sign = -1 if maximize else 1
    rows = []
    for title, own in values.items():
        wins = []
        for base in ALWAYS:
            both = [seed for seed in own if seed in values.get(base, {})]
            wins.append((sum(better(sign * own[s], sign * values[base][s]) for s in both), len(both)))
        if own:
            rows.append(Row(title, own, tuple(wins), len(seeds)))

    def place(row):
        diverged = not math.isfinite(row.mean)
        return diverged, len(row.values) < row.seeds, 0.0 if diverged else sign * row.mean

    return sorted(rows, key=place)


def better(value, other):
    """Whether a run beats another one, the smaller the better. A run that is not finite beats none."""
    return math.isfinite(value) and (value < other or not math.isfinite(other))


def table(rows, runs, metric):
    """Returns the table: runs, means, ranges, and how often each combiner beat the plain sum and random weights."""
    width = max([len(row.title) for row in rows] + [8])
    head = f"{'combiner':{width}}  {'runs':>7}  {metric + ', mean':>14}  {'lowest':>9}  {'highest':>9}"
    lines = [f"{head}  beats sum  beats random"]
    for row in rows:
        cells = [
            "-" if row.title == base else f"{won} of {both}" for base, (won, both) in zip(ALWAYS, row.wins, strict=True)
        ]
        count = f"{len(row.values)} of {row.seeds}"
        lowest, highest = (pick(row.finite, default=math.nan) for pick in (min, max))
        numbers = f"{count:>7}  {row.mean:>14.5g}  {lowest:>9.4g}  {highest:>9.4g}"
        lines.append(f"{row.title:{width}}  {numbers}  {cells[0]:>9}  {cells[1]:>12}")
    failed = [run for run in runs if metric not in run.results]
    lines += [f"not finished: {run.name}  ({run.ending or 'not run'}; {run.log})" for run in failed]
    return "\n".join([*lines, verdict(rows)])


def verdict(rows):
    """Returns what the runs show: which combiners beat both baselines on every seed, if the baselines have all runs."""
    whole = {row.title for row in rows if len(row.values) == row.seeds}
    missing = [base for base in ALWAYS if base not in whole]
    if missing:
        return f"No conclusion: runs of {' and '.join(missing)} are missing. Start the command again to run them."
    others = [row for row in rows if row.title not in ALWAYS]
    sure = [row.title for row in others if all(won == row.seeds for won, _ in row.wins)]
    part = [row.title for row in others if row.title not in whole]
    rest = f" Not judged, because runs are missing: {', '.join(part)}." if part else ""
    if sure:
        return f"Better than the plain sum and random weights on every seed: {', '.join(sure)}.{rest}"
    if rest:
        return f"None with all runs is better than both the plain sum and random weights on every seed.{rest}"
    return "None is better than both the plain sum and random weights on every seed: fixed weights are enough here."


def draw(rows, metric, path):
    """Draws a dot for each seed and a line at each mean, the best at the top and the baselines in grey."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(7, 0.8 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(reversed(rows)):
        colour = "#777777" if row.title in ALWAYS else "#0072B2"
        axes.plot(list(row.values.values()), [place] * len(row.values), "o", color=colour, alpha=0.5, markersize=5)
        if math.isfinite(row.mean):
            axes.plot([row.mean, row.mean], [place - 0.3, place + 0.3], color=colour, linewidth=2)
    for base in ALWAYS:
        for row in rows:
            if row.title == base and math.isfinite(row.mean):
                axes.axvline(row.mean, color="#777777", linewidth=0.8, linestyle="--" if base == ALWAYS[0] else ":")
    axes.set_yticks(range(len(rows)), [row.title for row in reversed(rows)])
    axes.set_xlabel(f"{metric}: a dot for each seed, a line for the mean; dashed: plain sum, dotted: random weights")
    figure.savefig(path, dpi=120)


def launch(arguments):
    """Runs the comparison with a command line without the program's name. Does not return."""
    commands.launch("compare-combiners", arguments, __doc__, define, main)
