"""The table at the end of a run: results, goals, speed, and where to look next."""

import dataclasses
import re
import shlex
import shutil
import textwrap
import time

import keras

from looptape.experiments.launch.options import OBSERVING, options
from looptape.experiments.tools import commands

_BESIDE = {"seed", *OBSERVING}  # any seed is to reach the goal


@dataclasses.dataclass(frozen=True)
class Goal:
    """A result that the experiment should reach with the default flags.

    Args:
        name: name of the result, e.g. a loss or a metric.
        below: upper limit of the result.
        above: lower limit of the result.
        baseline: the result of a trivial answer, or None.
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
    """A finished run: {name: number} of the last evaluation, updates and seconds of this session, findings."""

    results: dict
    step: int
    updates: int
    seconds: float
    rate: float | None
    findings: tuple = ()  # of `trainer.diagnose()`


class Clock(keras.callbacks.Callback):
    """Counts and times the updates of a session, including everything that `fit` does between them."""

    remembers = False

    def __init__(self, trainer):
        super().__init__()
        self._trainer = trainer
        self.begin, self.updates, self.seconds = None, 0, 0.0

    def on_train_begin(self, logs=None):
        self.begin = self._trainer.step.numpy()
        self._started = time.monotonic()

    def on_train_end(self, logs=None):
        self.updates = self._trainer.step.numpy() - self.begin
        self.seconds = time.monotonic() - self._started


def outcome(config, experiment, history, clock):
    """Returns the outcome of a `fit`. Evaluates again if the run had nothing left to do."""
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
    step, findings = trainer.step.numpy().item(), tuple(trainer.diagnose())
    return Outcome(results, step, clock.updates, clock.seconds, rate, findings)


def table(config, name, doc, goals, outcome):
    """Returns the closing table as text."""
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
    lines += verdict_lines(outcome.findings)
    quoted = expectation(doc)
    if quoted:
        lines += _wrapped(quoted)
    changed = changed_flags(config)
    if changed and (quoted or goals):
        lines += _wrapped(f"(the expectation is for the default flags; this run had {' '.join(changed)})")
    if config.workdir:
        lines.append(f"  {commands.tensorboard()} --logdir {shlex.quote(config.workdir)}")
    else:
        lines.append("  nothing was kept; --workdir=runs/… keeps checkpoints and TensorBoard's files")
    return "\n".join(lines)


def verdict_lines(findings, most=3):
    """Returns the findings of a run as lines: at most `most` per kind, with its advice once."""
    lines = []
    for word in dict.fromkeys(finding.word for finding in findings):
        own = [finding for finding in findings if finding.word == word]
        texts = [finding.text for finding in own[:most]]
        if len(own) > most:
            texts.append(f"And {len(own) - most} more, see `trainer.diagnose()`.")
        advice = next((finding.advice for finding in own if finding.advice), "")
        text = " ".join([f"{word}:", *texts, *([f"Try: {advice}"] if advice else [])])
        lines += _wrapped(text, further="    ")
    return lines


def _wrapped(text, further="  "):
    """Lines as wide as the terminal, at most 100 columns; 80 where there is none."""
    width = min(max(shutil.get_terminal_size().columns, 60), 100)
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent=further, break_on_hyphens=False)


def expectation(doc):
    """Returns the paragraph of a docstring that begins with "Expect" on one line, or ""."""
    for paragraph in re.split(r"\n\s*\n", doc):
        if paragraph.strip().startswith("Expect"):
            return " ".join(paragraph.split())
    return ""


def changed_flags(config):
    """Returns ["--name=value", …] of the changed flags that affect the expected result."""
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
