"""The work directory of a run: its flags, what it ran on, and whether it may be resumed with these flags."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys

import keras

from experiments import hparams
from experiments.command_line import flag_lines
from experiments.options import options, to_text

_PACKAGES = ("looptape", "tensorflow", "keras", "tensorboard", "numpy", "absl-py")
# Not compared on resume, and no part of a replay.
_NOT_COMPARED = ("workdir", "print_config", "accept_changes", "fast_dev_run", "profile")


class Refused(Exception):
    """The work directory belongs to a run with other flags."""


def open_workdir(config, name):
    """A `Workdir`, after comparing the flags with those it was used with; raises `Refused`. Writes nothing."""
    workdir = Workdir(config, name)
    workdir.compare()
    return workdir


class Workdir:
    """Files of one run beside those of the trainer.

    flags.txt         replays the run: `python -m experiments.<name> --flagfile=…/flags.txt`
    config.json       the same for programs, with the name of the experiment
    environment.json  a list with an entry per session: time, command, git commit, versions
    results.json      the last evaluation, when the run is finished
    """

    def __init__(self, config, name):
        self._config, self._name = config, name
        self.path = config.workdir
        self.known = _read_json(self._file("config.json"))
        checkpoints = self._file("checkpoints")
        self.resuming = os.path.isdir(checkpoints) and any(n.startswith("step-") for n in os.listdir(checkpoints))
        self.changed = {}
        self._session = None

    def compare(self):
        """Finds changed flags, says so, and refuses those that change the model or the data."""
        if not self.resuming or self.known is None:
            return
        if self.known["experiment"] != self._name:
            raise Refused(
                f"The workdir {self.path} holds a run of the experiment {self.known['experiment']}. "
                "Use another --workdir."
            )
        known, now = self.known["config"], _values(self._config)
        self.changed = {
            name: (known.get(name), now[name]) for name in now if known.get(name, now[name]) != now[name]
        }
        if not self.changed:
            return
        resume = {name: option.resume for name, option in options(type(self._config)).items()}
        refused = [name for name in self.changed if resume[name] == "refuse"]
        if refused and not self._config.accept_changes:
            raise Refused(
                f"The run in {self.path} was made with other flags:\n{self._diff(refused)}\nThey change the model or "
                "the data. Use another --workdir, the flags of "
                f"{self._file('flags.txt')}, or --accept_changes to resume all the same."
            )
        print(f"Resuming {self.path} with changed flags:\n{self._diff(self.changed)}", file=sys.stderr)

    def write(self, experiment):
        """Writes the files of a session that is about to begin."""
        os.makedirs(self.path, exist_ok=True)
        _write(self._file("flags.txt"), "\n".join(_replay(self._config)) + "\n")
        _write_json(self._file("config.json"), {"experiment": self._name, "config": _values(self._config)})
        sessions = _read_json(self._file("environment.json")) or []
        _write_json(self._file("environment.json"), [*sessions, environment()])
        run = "train" if experiment.eval_dataset is None else "eval"
        self._session = hparams.Session(os.path.join(self.path, run), self._config, self._name)
        self._session.start()

    def finish(self, outcome):
        """Writes the results of a finished run."""
        self._session.end()
        _write_json(
            self._file("results.json"),
            {"step": outcome.step, "results": outcome.results, "seconds": round(outcome.seconds, 3)},
        )

    def _file(self, name):
        return os.path.join(self.path, name)

    def _diff(self, names):
        return "\n".join(
            f"  --{name}: {to_text(self.changed[name][0])} → {to_text(self.changed[name][1])}" for name in names
        )


def warm_start(experiment, path):
    """Loads the weights of another run into the model that is to be trained."""
    trainer = experiment.trainer
    trainer.build(experiment.dataset.element_spec)
    file = os.path.join(path, "model.weights.h5") if os.path.isdir(path) else path
    if not os.path.isfile(file) or not file.endswith((".weights.h5", ".keras")):
        raise ValueError(
            f"`init_from` is {path!r}, where there are no weights; it must be the workdir of a finished run, a "
            "*.weights.h5 or a *.keras file."
        )
    try:
        trainer.model.load_weights(file)
    except (ValueError, KeyError) as error:
        raise ValueError(f"`init_from` {file!r} does not fit this model: {error}") from error


def overrides(config, experiment, workdir):
    """Callbacks that put changed options in force after the checkpoint, which holds the old ones, is restored."""
    rate_changed = workdir is not None and "learning_rate" in workdir.changed
    if rate_changed and config.learning_rate_schedule == "constant" and not config.warmup_steps:
        return [_SetLearningRate(experiment.trainer.optimizer, config.learning_rate)]
    return []


class _SetLearningRate(keras.callbacks.Callback):
    def __init__(self, optimizer, rate):
        super().__init__()
        self._optimizer, self._rate = optimizer, rate

    def on_train_begin(self, logs=None):
        self._optimizer.learning_rate = self._rate


def environment():
    """What a session runs on: the time, the command, git's commit, versions, the machine."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    here = os.path.dirname(os.path.abspath(__file__))
    changes = _git(here, "status", "--porcelain")
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "commit": _git(here, "rev-parse", "HEAD"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "python": platform.python_version(),
        "versions": versions,
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
    }


def _git(directory, *arguments):
    try:
        done = subprocess.run(
            ["git", "-C", directory, *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _values(config):
    return {name: getattr(config, name) for name in options(type(config)) if name not in _NOT_COMPARED}


def _replay(config):
    left_out = tuple(f"--{name}=" for name in _NOT_COMPARED)
    return [line for line in flag_lines(config) if not line.startswith(left_out)]


def _read_json(path):
    try:
        with open(path) as file:
            return json.load(file)
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _write_json(path, value):
    _write(path, json.dumps(value, indent=2) + "\n")


def _write(path, text):
    with open(path + ".tmp", "w") as file:
        file.write(text)
    os.replace(path + ".tmp", path)
