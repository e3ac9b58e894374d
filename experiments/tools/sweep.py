"""Runs an experiment with every combination of some flags, a few at a time.

    looptape sweep --experiment=adding_problem --workdir=runs/cells \\
        --grid=cell=lstm,gru --grid=learning_rate=1e-3,1e-2 \\
        --jobs=2 --metric=error -- --steps=500

`--experiment` is a name, a path or a module; flags after `--` go to every
run. Each run has its own directory with a `log.txt`; a failed run does not
stop the others. If you start the sweep again, only the missing runs run,
and interrupted runs resume from their checkpoints. The closing table is
sorted by the metric; TensorBoard's HParams tab on the workdir compares the
runs. `--search=learning_rate=1e-4..1e-1:log` in place of `--grid` lets
Optuna choose the values and ends bad runs early; see
`looptape.experiments.tools.search`.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

from absl import flags

from looptape.experiments.tools import commands, listing, live_lines

_FINISHED = "results.json"  # written by a run that reached its last step
_COMMAND = "command.json"
SWEPT = "LOOPTAPE_SWEPT_FLAGS"  # names the flags of the grid to each run, for TensorBoard's HParams tab


def define(flag_values=flags.FLAGS):
    """Defines the flags of a sweep."""
    common = {"flag_values": flag_values}
    flags.DEFINE_string("experiment", None, "name of an experiment, path of a file, or module", **common)
    flags.DEFINE_multi_string("grid", [], "flag=value,value,…; given several times, every combination runs", **common)
    flags.DEFINE_multi_string("search", [], "flag=low..high, flag=low..high:log or flag=a,b; by Optuna", **common)
    flags.DEFINE_integer("trials", 20, "runs of a search in all", lower_bound=1, **common)
    flags.DEFINE_string("workdir", None, "directory of the sweep; runs/sweep_<experiment> by default", **common)
    flags.DEFINE_integer("jobs", 1, "runs at a time", lower_bound=1, **common)
    flags.DEFINE_string("metric", "loss", "result that sorts the closing table", **common)
    flags.DEFINE_boolean("maximize", False, "the largest metric is the best", **common)
    for name in ("experiment", "grid", "search", "trials", "workdir", "jobs", "metric", "maximize"):
        flag_values.register_key_flag_for_module(sys.argv[0], flag_values[name])


def main(arguments):
    options = flags.FLAGS
    try:
        experiment = listing.find(options.experiment or "")
        combinations = grid(options.grid)
    except ValueError as error:
        print(f"looptape sweep: {error}", file=sys.stderr)
        return 2
    workdir = options.workdir or os.path.join("runs", f"sweep_{experiment.name}")
    if options.search:
        from looptape.experiments.tools import search  # which uses this module

        code = search.main(experiment.command, workdir, options, arguments[1:])
        if code != 2:
            print(f"{commands.tensorboard()} --logdir {workdir}")
        return code
    runs = [Run(experiment.command, workdir, settings, arguments[1:]) for settings in combinations]
    refusal = runs[0].refusal()
    if refusal:
        print(refusal, file=sys.stderr)
        return 2
    execute(runs, options.jobs)
    print(table(runs, options.metric, options.maximize))
    print(f"{commands.tensorboard()} --logdir {workdir}")
    return 0 if all(run.finished for run in runs) else 1


def grid(texts):
    """Returns every combination of ["cell=lstm,gru", "learning_rate=1e-3,1e-2"] as [{flag: value}, …].

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
            raise ValueError(f"--grid={text} is not possible: {reason}. Leave it out.")
        axes[name] = list(dict.fromkeys(values))
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


class Run:
    """One combination of flags, which runs as a separate process.

    Args:
        program: the command to start, without flags.
        workdir: directory of the sweep; the run has a directory below it.
        settings: {flag: value} of this combination.
        further: flags for every run.
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
        """Returns the experiment's error message if it does not accept these flags, else "". Trains nothing."""
        command = [part for part in self._command if not part.startswith("--workdir=")]
        done = subprocess.run([*command, "--print_config"], capture_output=True, text=True, check=False)
        return done.stderr.strip() if done.returncode else ""

    @property
    def finished(self):
        """Whether the run finished with exactly these flags."""
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
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, SWEPT: ",".join(self.settings)},
            )

    def poll(self):
        """Returns whether the process has ended."""
        code = self.process.poll()
        if code is None:
            return False
        if code != 0 or not self.finished:
            self.ending = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            self.failure = f"{self.ending}: {_last_line(self.log)}"
        return True

    @property
    def progress(self):
        """The last progress line of its log, or "starting …"."""
        steps = [line for line in _lines(self.log) if line.startswith(("step ", "["))]
        return steps[-1] if steps else "starting …"

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def _file(self, name):
        return os.path.join(self.path, name)


def execute(runs, jobs, report=print, board=None):
    """Runs all unfinished runs, `jobs` at a time.

    Args:
        runs: all runs.
        jobs: number of runs at a time.
        report: function that receives a line when a run ends.
        board: a `live_lines.LiveLines` that shows one line per active run, or None.
    """
    board = board or live_lines.LiveLines(sys.stdout)
    waiting = [run for run in runs if not run.finished]
    report(f"{len(runs)} runs, {len(runs) - len(waiting)} of them already finished")
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
                board.clear()
                report(f"[{done}/{len(runs)}] {run.name}  " + (f"FAILED, {run.failure}" if run.failure else "finished"))
            board.show(lambda: [f"  {run.name}  {run.progress}" for run in running])
    finally:
        board.clear()
        for run in running:
            run.stop()


def table(runs, metric, maximize=False):
    """Returns the closing table: finished runs from best to worst, then failed ones."""
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
    lines = _lines(path)
    return lines[-1][:200] if lines else "its log is empty"


def _lines(path, most=65536):
    """Returns the non-empty lines at the end of a text file."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - most))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


def launch(arguments):
    """Runs the sweep with a command line without the program's name. Does not return."""
    commands.launch("sweep", arguments, __doc__, define, main)
