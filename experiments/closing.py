"""What a run prints at its end: what was reached, what was expected, how fast, and where to look."""

import dataclasses
import re
import shlex
import textwrap
import time

import keras

from experiments import commands
from experiments.options import options

# Flags that change what is seen of a run, not what it reaches; any seed is to reach it.
_BESIDE = {"seed", "log_every", "eval_every", "checkpoint_every", "probe_every"}


@dataclasses.dataclass(frozen=True)
class Goal:
    """A result that the experiment's docstring expects with the default flags.

    Args:
        name: of the result, e.g. a loss or a metric.
        below: the result is to be smaller than this.
        above: the result is to be larger than this.
        baseline: what a trivial answer reaches, or None.
        baseline_name: the trivial answer in words.

    >>> Goal("error", below=0.01, baseline=1 / 6, baseline_name="always answering 1").met(0.002)
    True
    """

    name: str
    below: float | None = None
    above: float | None = None
    baseline: float | None = None
    baseline_name: str = "baseline"

    def __post_init__(self):
        if (self.below is None) == (self.above is None):
            raise ValueError(f"Goal {self.name!r} needs exactly one of `below` and `above`.")

    def met(self, value):
        return value < self.below if self.below is not None else value > self.above

    def words(self):
        return f"< {self.below:g}" if self.below is not None else f"> {self.above:g}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finished run: {name: number} of the last evaluation, the updates of this session and their time."""

    results: dict
    step: int
    updates: int
    seconds: float
    rate: float | None


class Clock(keras.callbacks.Callback):
    """Counts and times the updates of a session, with everything that `fit` does between them."""

    remembers = False

    def __init__(self, trainer):
        super().__init__()
        self._trainer = trainer
        self.begin, self.updates, self.seconds = None, 0, 0.0

    def on_train_begin(self, logs=None):
        self.begin = self._trainer.host_step
        self._started = time.monotonic()

    def on_train_end(self, logs=None):
        self.updates = self._trainer.host_step - self.begin
        self.seconds = time.monotonic() - self._started


def outcome(config, experiment, history, clock):
    """The outcome of a `fit`; a run with nothing left to do is evaluated once more."""
    trainer = experiment.trainer
    prefix = "val_"
    results = {
        name.removeprefix(prefix): values[-1]
        for name, values in history.history.items()
        if name.startswith(prefix) and values
    }
    if not results and experiment.eval_dataset is not None:
        results = trainer.evaluate(experiment.eval_dataset, averaged=config.evaluate_averaged)
    if not results:
        results = {name: values[-1] for name, values in history.history.items() if values}
    rate = clock.updates / clock.seconds if clock.updates and clock.seconds > 0 else None
    return Outcome(results, trainer.host_step, clock.updates, clock.seconds, rate)


def table(config, name, doc, goals, outcome):
    """The closing table as text."""
    if config.fast_dev_run:
        return f"\n{name}: it runs. Four updates, two evaluations, a checkpoint; nothing was kept."
    rows = [("", "reached", "expected", "")]
    named = {goal.name: goal for goal in goals}
    for result, value in outcome.results.items():
        if result == "loss" and len(outcome.results) == 2:
            continue  # the sum of one loss
        goal = named.get(result)
        rows.append((result, f"{value:.4g}", *(_expectation(goal, value) if goal else ("", ""))))
    lines = ["", f"{name} after {outcome.step:,} steps", *_aligned(rows)]
    if outcome.rate is not None:
        lines.append(f"  {outcome.updates:,} updates in {outcome.seconds:.0f} s, {outcome.rate:.1f} steps per second")
    quoted = expectation(doc)
    if quoted:
        lines += textwrap.wrap(quoted, 100, initial_indent="  ", subsequent_indent="  ")
    changed = changed_flags(config)
    if changed and (quoted or goals):
        lines.append(f"  (the expectation is for the default flags; this run had {' '.join(changed)})")
    if config.workdir:
        lines.append(f"  {commands.tensorboard()} --logdir {shlex.quote(config.workdir)}")
    else:
        lines.append("  nothing was kept; --workdir=runs/… keeps checkpoints and TensorBoard's files")
    return "\n".join(lines)


def expectation(doc):
    """The paragraph of a docstring that begins with "Expect", on one line, or nothing."""
    for paragraph in re.split(r"\n\s*\n", doc):
        if paragraph.strip().startswith("Expect"):
            return " ".join(paragraph.split())
    return ""


def changed_flags(config):
    """["--name=value", …] of the flags that change what may be expected."""
    return [
        f"--{name}={getattr(config, name)}"
        for name, option in options(type(config)).items()
        if option.resume != "ignore" and name not in _BESIDE and getattr(config, name) != option.default
    ]


def _expectation(goal, value):
    baseline = "" if goal.baseline is None else f"{goal.baseline_name}: {goal.baseline:.4g}"
    return f"{goal.words()} {'reached' if goal.met(value) else 'NOT reached'}", baseline


def _aligned(rows):
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip() for row in rows
    ]
