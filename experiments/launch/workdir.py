"""The work directory of a run: its flags, its environment, and whether it may resume with the present flags."""

import contextlib
import json
import os
import sys

from looptape.experiments.launch.flags import flag_lines
from looptape.experiments.launch.options import Refused, options, run_values, to_text
from looptape.experiments.records import hparams
from looptape.experiments.records.versions import changed_versions, environment
from looptape.trainer.checkpoints import lock


class Workdir:
    """The files of a run that the launcher writes, in addition to those of the trainer.

    flags.txt         replays the run: `looptape run <name> --flagfile=…/flags.txt --workdir=…`
    config.json       the same for programs, with the name of the experiment
    environment.json  a list with one entry per session: time, command, git commit, versions
    results.json      the last evaluation of a finished run

    The constructor compares the flags with those of the last session. It prints changed flags, and raises `Refused` if
    they change the model or the data. It writes nothing; `session` does.

    Args:
        config: the experiment's config.
        name: name of the experiment.
    """

    def __init__(self, config, name):
        self.path, self._config, self._name = config.workdir, config, name
        step = checkpointed_step(self.path)
        self.resuming = step is not None
        self._finished = self.resuming and step >= config.steps
        self.changed = {}  # {flag: (before, now)}
        known = _read_json(self._file("config.json")) if self.resuming else None
        if known is not None:
            self._compare(known)

    @contextlib.contextmanager
    def session(self, evaluated):
        """Writes the files of a session, and at its end tells TensorBoard whether it succeeded.

        A run with nothing left to do keeps the files of the session that finished it.
        """
        if self._finished:
            yield
            return
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise Refused(
                f"`workdir` is {self.path!r}, which cannot be used: {error}. Choose a directory that this user may "
                "write to."
            ) from error
        with self._locked():
            yield from self._session(evaluated)

    @contextlib.contextmanager
    def _locked(self):
        """Locks the directory before anything is written there."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(lock.hold(self.path))
            except RuntimeError as error:
                raise Refused(str(error)) from error
            yield

    def _session(self, evaluated):
        _write(self._file("flags.txt"), "\n".join(flag_lines(self._config)) + "\n")
        _write_json(self._file("config.json"), {"experiment": self._name, "config": run_values(self._config)})
        self._write_environment()
        run = hparams.Session(os.path.join(self.path, "eval" if evaluated else "train"), self._config, self._name)
        run.start()
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            run.end(succeeded)

    def write_results(self, outcome):
        """Writes the last evaluation. The file marks the run as finished."""
        if self._finished and os.path.exists(self._file("results.json")):
            return  # with the speed of the session that made it
        content = {"step": outcome.step, "results": outcome.results, "steps_per_second": outcome.rate}
        _write_json(self._file("results.json"), content)

    def _compare(self, known):
        if known["experiment"] != self._name:
            raise Refused(
                f"`workdir` is {self.path!r}, which has a run of the experiment {known['experiment']!r}; a workdir "
                "holds one run. Use another."
            )
        before, now = known["config"], run_values(self._config)
        self.changed = {name: (before[name], now[name]) for name in now if before.get(name, now[name]) != now[name]}
        resume = {name: option.resume for name, option in options(type(self._config)).items()}
        refused = [name for name in self.changed if resume[name] == "refuse"]
        if refused and not self._config.accept_changes:
            raise Refused(
                f"The run in {self.path} was made with other flags:\n{self._diff(refused)}\n"
                "It cannot resume exactly with a different model, data or update. Use another --workdir, the old "
                "values, or --accept_changes to resume anyway."
            )
        if self.changed:
            print(f"Resuming {self.path} with changed flags:\n{self._diff(self.changed)}", file=sys.stderr)

    def _write_environment(self):
        path, now = self._file("environment.json"), environment()
        sessions = _read_json(path) or []
        different = changed_versions(sessions[-1], now) if sessions and self.resuming else []
        if different:
            print("Resuming with other versions, so not bit for bit: " + "; ".join(different), file=sys.stderr)
        _write_json(path, [*sessions, now])

    def _file(self, name):
        return os.path.join(self.path, name)

    def _diff(self, names):
        changes = {name: [to_text(value) for value in self.changed[name]] for name in names}
        return "\n".join(f"  --{name}={before} → --{name}={now}" for name, (before, now) in changes.items())


def checkpointed_step(path):
    """Returns the step of the newest checkpoint in a work directory, or None."""
    checkpoints = os.path.join(path, "checkpoints")
    names = os.listdir(checkpoints) if os.path.isdir(checkpoints) else ()
    return max((int(name.removeprefix("step-")) for name in names if name.startswith("step-")), default=None)


def _read_json(path):
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise Refused(f"{path} is damaged: {error}. Restore it, or use another --workdir.") from error


def _write_json(path, value):
    _write(path, json.dumps(value, indent=2) + "\n")


def _write(path, text):
    with open(path + ".tmp", "w") as file:
        file.write(text)
    os.replace(path + ".tmp", path)
