"""A sweep that searches: Optuna proposes the next flags from the results so far, and bad runs end early.

    looptape sweep --experiment=adding_problem --workdir=runs/search --metric=error --trials=30 --jobs=2 \\
        --search=learning_rate=1e-4..1e-1:log --search=units=16..128 --search=cell=lstm,gru -- --steps=500

The study lies in `study.journal` below the workdir: started again, the search continues, and interrupted runs resume.
"""

import difflib
import os
import sys
import time
from typing import Any, NamedTuple

from looptape import read
from looptape.experiments.tools import live_lines, sweep

STORAGE = "study.journal"
_SECONDS_BETWEEN_READINGS = 5.0


class Axis(NamedTuple):
    """One flag to be searched: a range of numbers, or a list of choices."""

    name: str
    low: float | int | None = None
    high: float | int | None = None
    log: bool = False
    choices: tuple = ()

    @property
    def kind(self):
        """Describes the settings that must stay the same when a study is continued; the ends of a range may change."""
        if self.choices:
            return f"{self.name} ({', '.join(self.choices)})"
        numbers = "integers" if isinstance(self.low, int) and isinstance(self.high, int) else "real numbers"
        return f"{self.name} ({numbers}{', log' if self.log else ''})"

    def draw(self, trial):
        """The value of a trial as a flag has it."""
        if self.choices:
            return trial.suggest_categorical(self.name, list(self.choices))
        if isinstance(self.low, int) and isinstance(self.high, int):
            return str(trial.suggest_int(self.name, self.low, self.high, log=self.log))
        return f"{trial.suggest_float(self.name, self.low, self.high, log=self.log):.6g}"


def axes(texts):
    """[Axis] of ["learning_rate=1e-4..1e-1:log", "units=16..128", "cell=lstm,gru"].

    >>> axes(["units=16..128"])[0].high
    128
    """
    found = [_axis(text) for text in texts]
    names = [axis.name for axis in found]
    for name in names:
        if names.count(name) > 1 or name == "workdir":
            reason = "the search gives each run its own" if name == "workdir" else "it is given twice"
            raise ValueError(f"--search={name}=… cannot be: {reason}. Leave it out.")
    return found


def _axis(text):
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-")
    message = (
        f"--search={text} is not of the form flag=low..high, flag=low..high:log or flag=value,value. Use e.g. "
        "--search=learning_rate=1e-4..1e-1:log."
    )
    if not equals or not name or not values:
        raise ValueError(message)
    if ".." not in values:
        choices = tuple(dict.fromkeys(value.strip() for value in values.split(",") if value.strip()))
        if len(choices) < 2:
            raise ValueError(message)
        return Axis(name, choices=choices)
    ends, colon, scale = values.partition(":")
    try:
        low, high = (_number(end) for end in ends.split(".."))
    except ValueError:
        raise ValueError(message) from None
    if colon and scale != "log":
        raise ValueError(message)
    if not low < high or (colon and low <= 0):
        need = "be above 0 and " if colon else ""
        raise ValueError(f"--search={text}: the low end must {need}lie below the high end. Turn them round.")
    return Axis(name, low, high, bool(colon))


def _number(text):
    try:
        return int(text)
    except ValueError:
        return float(text)


def open_study(workdir, metric, maximize):
    """The study of a work directory, new or continued.

    Raises:
        ValueError: Optuna is missing, or the study there is about another metric.
    """
    try:
        import optuna
    except ImportError:
        raise ValueError(
            "--search needs Optuna, which is not installed. Use `pip install 'looptape[search]'`, or use --grid."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    os.makedirs(workdir, exist_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(os.path.join(workdir, STORAGE))
    wanted = "maximize" if maximize else "minimize"
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name="looptape",
        direction=wanted,
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
    )
    # Another seed for each session: a continued search must not propose its first runs again.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    # Without a result the name may have been misspelt.
    compared = any(trial.state.is_finished() or trial.intermediate_values for trial in study.trials)
    known = study.user_attrs.get("metric", metric) if compared else metric, study.direction.name.lower()
    if known != (metric, wanted):
        raise ValueError(
            f"The study in {workdir} has --metric={known[0]} to {known[1]}; now it is {metric} to {wanted}. Use the "
            "same, or another --workdir."
        )
    study.set_user_attr("metric", metric)
    return study


def check_continued(study, searched, command, workdir):
    """Refuses to continue a study whose trials cannot be compared with those to come.

    Args:
        study: from `open_study`.
        searched: [Axis].
        command: [str], the experiment and the flags that every run has.
        workdir: of the study.
    """
    now = {"--search": sorted(axis.kind for axis in searched), "the experiment and its flags": list(command)}
    for what, value in now.items():
        known = study.user_attrs.get(what, value) if study.trials else value  # nothing ran: the first try was refused
        if known != value:
            raise ValueError(
                f"The study in {workdir} was begun with other values of {what}: {', '.join(known) or 'none'}; now "
                f"there is {', '.join(value) or 'none'}. Use the same (the ends of a range may change), or another "
                "--workdir."
            )
        study.set_user_attr(what, value)


class MissingResult(ValueError):
    """The runs have no result with the name of `--metric`."""


class Search:
    """Runs trials until there are enough of them. A metric that the first of them does not have ends the search.

    Args:
        study: from `open_study`.
        searched: [Axis].
        make_run: `({flag: value}) -> sweep.Run`.
        metric: the result that counts.
        report: gets a line when a run ends.
    """

    def __init__(self, study, searched, make_run, metric, report=print):
        self._study, self._axes, self._make_run = study, searched, make_run
        self._metric, self._report = metric, report
        self.runs = []  # all of them, those of earlier sessions included

    def execute(self, trials, jobs, board=None):
        """Runs until `trials` have ended, `jobs` at a time. Interrupted ones of an earlier session come first."""
        import optuna

        board = board or live_lines.LiveLines(sys.stdout)
        known = self._study.trials
        interrupted = [trial for trial in known if not trial.state.is_finished()]
        self.runs = [self._make_run(self._settings(trial)) for trial in known if trial.state.is_finished()]
        for run, trial in zip(self.runs, [t for t in known if t.state.is_finished()], strict=True):
            run.ending = "pruned" if trial.state == optuna.trial.TrialState.PRUNED else run.ending
        waiting = [optuna.trial.Trial(self._study, trial._trial_id) for trial in interrupted]
        left, running = trials - len(known), []
        self._report(f"{trials} trials, {len(self.runs)} of them ended before")
        try:
            while waiting or left > 0 or running:
                while len(running) < jobs and (waiting or left > 0):
                    left -= not waiting
                    running.append(self._start(waiting.pop(0) if waiting else self._study.ask()))
                time.sleep(0.1)
                running = [entry for entry in running if not self._ended(entry, board)]
                board.show(lambda shown=running: [f"  {run.name}  {run.progress}" for _, run, _ in shown])
        finally:
            board.clear()
            for _, run, _ in running:
                run.stop()

    def _settings(self, trial):
        return {axis.name: axis.draw(_Known(trial)) for axis in self._axes}

    def _start(self, trial):
        run = self._make_run({axis.name: axis.draw(trial) for axis in self._axes})
        self.runs.append(run)
        if not run.finished:
            run.start()
        reported = self._study.trials[trial.number].intermediate_values  # of a trial that was interrupted
        return trial, run, {"read": 0.0, "step": max(reported, default=-1)}

    def _ended(self, entry, board):
        """Whether a trial has ended, or was ended because it is worse than the others were at this step."""
        import optuna

        trial, run, reading = entry
        if run.process is not None and not run.poll():
            if not self._should_prune(trial, run, reading):
                return False
            run.stop()
            run.ending = "pruned"
        if run.ending != "pruned":
            self._report_evaluations(trial, run, reading)  # the last ones: later trials are compared with them
        if run.results and self._metric not in run.results:
            names = sorted(run.results)
            near = difflib.get_close_matches(self._metric, names, n=1, cutoff=0.5)
            raise MissingResult(
                f"--metric is {self._metric!r}, which is not among the results of {run.name}: {', '.join(names)}. Use "
                f"--metric={near[0] if near else names[0]} with the same --workdir: what has run is kept."
            )
        value = run.results.get(self._metric)
        state = optuna.trial.TrialState
        if run.ending == "pruned":
            self._study.tell(trial, state=state.PRUNED)
        elif value is None or value != value:
            self._study.tell(trial, state=state.FAIL)
            run.failure = run.failure or f"{self._metric} is NaN"
        else:
            self._study.tell(trial, value)
        board.clear()
        outcome = f"FAILED, {run.failure}" if run.failure else run.ending or f"{self._metric} {value:.5g}"
        self._report(f"[trial {trial.number}] {run.name}  {outcome}")
        return True

    def _should_prune(self, trial, run, reading):
        """Reports evaluations that were not reported yet, and asks the pruner."""
        if time.monotonic() - reading["read"] < _SECONDS_BETWEEN_READINGS:
            return False
        reading["read"] = time.monotonic()
        self._report_evaluations(trial, run, reading)
        return reading["step"] >= 0 and trial.should_prune()

    def _report_evaluations(self, trial, run, reading):
        for step, value in evaluations(run.path, self._metric):
            if step > reading["step"]:
                reading["step"] = step
                trial.report(value, step)


class _Known:
    """Stands for a trial that was drawn before: gives its values."""

    def __init__(self, trial: Any) -> None:
        self._values = trial.params

    def suggest_categorical(self, name, choices):
        return self._values[name]

    def suggest_int(self, name, low, high, log=False):
        return self._values[name]

    def suggest_float(self, name, low, high, log=False):
        return self._values[name]


def evaluations(path, metric):
    """[(step, value)] of a run's evaluations so far, by one of its results, e.g. `error`, `loss` or `noisy_loss`."""
    if not os.path.isdir(os.path.join(path, "eval")):
        return []
    found = read(path).scalars
    tags = results_by_name([tag.removeprefix("eval/") for tag in found if tag.startswith("eval/")])
    if metric not in tags:
        return []
    return [(int(step), float(value)) for step, value in zip(*found[f"eval/{tags[metric]}"], strict=True)]


def results_by_name(tags):
    """{result: tag}, as `Trainer.evaluate` names them: of several sets `<set>_<result>`.

    >>> results_by_name(["loss/error", "noisy/metrics/accuracy"])
    {'error': 'loss/error', 'loss': 'loss/error', 'noisy_accuracy': 'noisy/metrics/accuracy'}
    """
    found = {tag: tag for tag in tags}
    for kind in ("loss", "metrics"):
        for tag in tags:
            head, middle, name = f"/{tag}".partition(f"/{kind}/")
            if not middle:
                continue
            prefix = f"{head[1:]}_" if head else ""
            own = [other for other in tags if other.startswith(f"{head[1:]}/{kind}/".lstrip("/"))]
            found.pop(tag, None)
            found[prefix + ("loss" if (kind, name) == ("loss", "sum") else name)] = tag
            if kind == "loss" and len(own) == 1:  # the sum of one loss is that loss
                found[f"{prefix}loss"] = tag
    return found


def main(program, workdir, options, further):
    """The search behind `looptape sweep --search=…`. Returns the exit code."""
    try:
        searched = axes(options.search)
        if options.grid:
            raise ValueError("--grid and --search are both given; a sweep does one of them. Use --search=flag=a,b.")
        study = open_study(workdir, options.metric, options.maximize)
        check_continued(study, searched, [program[-1], *further], workdir)
    except ValueError as error:
        print(f"looptape sweep: {error}", file=sys.stderr)
        return 2

    def make_run(settings):
        return sweep.Run(program, workdir, settings, further)

    first = {axis.name: axis.choices[0] if axis.choices else str(axis.low) for axis in searched}
    refusal = make_run(first).refusal()
    if refusal:
        print(refusal, file=sys.stderr)
        return 2
    search = Search(study, searched, make_run, options.metric)
    try:
        search.execute(options.trials, options.jobs)
    except MissingResult as error:
        print(f"looptape sweep: {error}", file=sys.stderr)
        return 2
    print(sweep.table(search.runs, options.metric, options.maximize))
    return 0 if any(run.finished for run in search.runs) else 1
