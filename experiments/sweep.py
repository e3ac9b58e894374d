"""Runs an experiment with every combination of some flags, a few at a time.

    python -m experiments.sweep --experiment=adding_problem --workdir=runs/cells \\
        --grid=cell=lstm,gru --grid=learning_rate=1e-3,1e-2 --jobs=2 --metric=error -- --steps=500

What follows `--` goes to every run. Each run has a directory of its own with a `log.txt`; one that fails does not
stop the others. Started again, only what is missing runs, and an interrupted run goes on from its checkpoint. The
closing table is sorted by the metric; TensorBoard's HParams tab on the workdir compares the runs.
"""

import difflib
import itertools
import json
import os
import signal
import subprocess
import sys
import time

from absl import app, flags

from experiments import commands, listing

_FINISHED = "results.json"  # written by a run that reached its last step
_COMMAND = "command.json"


def define(flag_values=flags.FLAGS):
    """Defines the flags of a sweep."""
    common = {"flag_values": flag_values}
    flags.DEFINE_string("experiment", None, "name of the experiment", **common)
    flags.DEFINE_multi_string("grid", [], "flag=value,value,…; given several times, every combination runs", **common)
    flags.DEFINE_string("workdir", None, "directory of the sweep; runs/sweep_<experiment> by default", **common)
    flags.DEFINE_integer("jobs", 1, "runs at a time", lower_bound=1, **common)
    flags.DEFINE_string("metric", "loss", "result by which the closing table is sorted", **common)
    flags.DEFINE_boolean("maximize", False, "the largest metric is the best", **common)
    for name in ("experiment", "grid", "workdir", "jobs", "metric", "maximize"):
        flag_values.register_key_flag_for_module(sys.argv[0], flag_values[name])


def main(arguments):
    options = flags.FLAGS
    known = listing.experiments()
    if options.experiment not in known:
        near = difflib.get_close_matches(options.experiment or "", known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Use one of {', '.join(known)}."
        raise app.UsageError(f"--experiment is {options.experiment!r}, which is no experiment. {hint}")
    try:
        combinations = grid(options.grid)
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    workdir = options.workdir or os.path.join("runs", f"sweep_{options.experiment}")
    program = [sys.executable, "-m", f"experiments.{options.experiment}"]
    runs = [Run(program, workdir, settings, arguments[1:]) for settings in combinations]
    refusal = runs[0].refusal()
    if refusal:
        print(refusal, file=sys.stderr)
        return 2
    execute(runs, options.jobs)
    print(table(runs, options.metric, options.maximize))
    print(f"{commands.tensorboard()} --logdir {workdir}")
    return 0 if all(run.finished for run in runs) else 1


def grid(texts):
    """[{flag: value}, …]: every combination of ["cell=lstm,gru", "learning_rate=1e-3,1e-2"].

    >>> grid(["a=1,2", "b=x"])
    [{'a': '1', 'b': 'x'}, {'a': '2', 'b': 'x'}]
    """
    axes = {}
    for text in texts:
        name, equals, values = text.partition("=")
        values = [value.strip() for value in values.split(",") if value.strip()]
        name = name.strip().lstrip("-")
        if not equals or not name or not values:
            raise ValueError(f"--grid={text} is not of the form flag=value,value. Use e.g. --grid=cell=lstm,gru.")
        if name in axes or name == "workdir":
            reason = "the sweep gives each run its own" if name == "workdir" else "it is given twice"
            raise ValueError(f"--grid={text} cannot be: {reason}. Leave it out.")
        axes[name] = list(dict.fromkeys(values))
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


class Run:
    """One combination of flags, run as a process of its own.

    Args:
        program: the command to start, without flags.
        workdir: of the sweep; the run has a directory below it.
        settings: {flag: value} of this combination.
        further: flags that every run gets.
    """

    def __init__(self, program, workdir, settings, further=()):
        self.settings = settings
        self.name = ",".join(f"{flag}={value}" for flag, value in settings.items()).replace("/", "_") or "run"
        self.path = os.path.join(workdir, self.name)
        self.log = os.path.join(self.path, "log.txt")
        self._flags = [*further, *(f"--{flag}={value}" for flag, value in settings.items())]
        self._command = [*program, *self._flags, f"--workdir={self.path}"]
        self.process = None
        self.failure = None  # in words
        self.ending = None  # in a few words

    def refusal(self):
        """What the experiment says of these flags if it does not take them, else "". Trains nothing."""
        command = [part for part in self._command if not part.startswith("--workdir=")]
        done = subprocess.run([*command, "--print_config"], capture_output=True, text=True, check=False)
        return done.stderr.strip() if done.returncode else ""

    @property
    def finished(self):
        """Whether the run reached its end with these very flags."""
        return _read(self._file(_FINISHED)) is not None and _read(self._file(_COMMAND)) == self._flags

    @property
    def results(self):
        return _read(self._file(_FINISHED))["results"] if self.finished else {}

    def start(self):
        os.makedirs(self.path, exist_ok=True)
        if os.path.exists(self._file(_FINISHED)):
            os.remove(self._file(_FINISHED))
        with open(self._file(_COMMAND), "w") as file:
            json.dump(self._flags, file)
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def poll(self):
        """Whether the process has ended."""
        code = self.process.poll()
        if code is None:
            return False
        if code != 0 or not self.finished:
            self.ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            self.failure = f"{self.ending}: {_last_line(self.log)}"
        return True

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def _file(self, name):
        return os.path.join(self.path, name)


def execute(runs, jobs, report=print):
    """Runs what is not finished, `jobs` at a time."""
    waiting = [run for run in runs if not run.finished]
    report(f"{len(runs)} runs, {len(runs) - len(waiting)} of them finished before")
    running, done = [], len(runs) - len(waiting)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0))
                running[-1].start()
            time.sleep(0.1)
            for run in [run for run in running if run.poll()]:
                running.remove(run)
                done += 1
                report(f"[{done}/{len(runs)}] {run.name}  " + (f"FAILED, {run.failure}" if run.failure else "finished"))
    finally:
        for run in running:
            run.stop()


def table(runs, metric, maximize=False):
    """The closing table: finished runs from the best to the worst, then those that failed."""
    finished = [run for run in runs if metric in run.results]
    finished.sort(key=lambda run: run.results[metric] if not maximize else -run.results[metric])
    lines = [f"{metric:>12}  run"]
    lines += [f"{run.results[metric]:>12.5g}  {run.name}" for run in finished]
    for run in runs:
        if run not in finished:
            known = f"no {metric!r} among {sorted(run.results)}" if run.finished else run.ending or "not run"
            lines.append(f"{'-':>12}  {run.name}  ({known}; {run.log})")
    return "\n".join(lines)


def _read(path):
    try:
        with open(path) as file:
            return json.load(file)
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _last_line(path):
    with open(path, errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    return lines[-1][:200] if lines else "its log is empty"


if __name__ == "__main__":
    define()
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit(130)
