"""`--verify_resume`: checks that an experiment resumes exactly, by comparing two short runs, one of them killed.

Each run is a separate process with the given flags, in a temporary work directory. The second one kills itself with
SIGKILL between two checkpoints and is started again.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile

import keras

from looptape.experiments.launch.flags import flag_lines
from looptape.trainer.checkpoints import store as checkpoints

STEPS, CHECKPOINT_EVERY, KILLED_AT = 12, 5, 8
_VARIABLE = "LOOPTAPE_KILL_AT_STEP"  # how the parent tells the child that is to kill itself


class Suicide(keras.callbacks.Callback):
    """Kills the process at the step that the parent set in the environment."""

    remembers = False

    def __init__(self, trainer, step):
        super().__init__()
        self._trainer, self._step = trainer, step

    def on_train_batch_end(self, batch, logs=None):
        if self._trainer.step.numpy() >= self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def callbacks(trainer):
    """Returns the callback that kills a child of `verify`; an empty list in every other run."""
    step = os.environ.get(_VARIABLE)
    return [Suicide(trainer, int(step))] if step else []


def verify(config, module):
    """Runs the experiment twice and prints the differences. Returns the exit code, 0 if there are none.

    Args:
        config: the experiment's config.
        module: the experiment's module, which runs as a program.
    """
    with tempfile.TemporaryDirectory() as root:
        whole, killed = os.path.join(root, "whole"), os.path.join(root, "killed")
        print(f"1 of 3: {STEPS} steps without interruption", flush=True)
        _run(config, module, whole)
        print(f"2 of 3: checkpoint at step {CHECKPOINT_EVERY}, killed at step {KILLED_AT}", flush=True)
        _run(config, module, killed, kill_at=KILLED_AT)
        print(f"3 of 3: started again, from step {CHECKPOINT_EVERY} to {STEPS}", flush=True)
        _run(config, module, killed)
        differences = compare(*(os.path.join(path, "checkpoints") for path in (whole, killed)))
    if differences:
        print(f"NOT exact: {len(differences)} differ after a resume:")
        print("\n".join(f"  {line}" for line in differences))
        return 1
    print("Exact: weights, optimizer, random states and all other state have the same bits after a kill and a resume.")
    return 0


def compare(left, right):
    """Returns one line for each difference between the newest checkpoints of two directories."""
    values, hosts = [], []
    for directory in (left, right):
        path, manifest = checkpoints.Store(directory).newest()
        values.append(checkpoints.values(path))
        kept = ("epoch", "rounds", "position", "passes", "skips", "best_loss", "callbacks", "between_callbacks")
        hosts.append({name: manifest["host"][name] for name in kept})
    found = []
    for name in {**values[0], **values[1]}:
        a, b = (side.get(name) for side in values)
        if a is None or b is None:
            found.append(f"{name}: only in one of them")
        elif _hash(a) != _hash(b):
            found.append(f"{name}: {_hash(a)[:12]} without, {_hash(b)[:12]} with interruption")
    return found + [f"{n}: {hosts[0][n]} without, {hosts[1][n]} with" for n in hosts[0] if hosts[0][n] != hosts[1][n]]


def _hash(array):
    return hashlib.sha256(array.tobytes()).hexdigest()


def _run(config, module, workdir, kill_at=None):
    """Runs one process: a short run with the given flags, but its own steps, checkpoints and work directory."""
    own = {"steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY, "log_every": 4, "eval_every": 6}
    flags = [line for line in flag_lines(config) if line[2:].partition("=")[0] not in own]
    flags += [f"--{name}={value}" for name, value in own.items()]
    flags += [f"--workdir={workdir}", "--limit_eval_batches=2"]
    environment = {**os.environ, **({_VARIABLE: str(kill_at)} if kill_at else {})}
    program = [module.__file__] if module.__spec__ is None else ["-m", module.__spec__.name]
    command = [sys.executable, *program, *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    expected = -signal.SIGKILL if kill_at else 0
    if done.returncode != expected:
        raise RuntimeError(
            f"`{' '.join(program)}` ended with exit code {done.returncode} instead of {expected}. Its last output: "
            f"{done.stderr[-2000:]}"
        )
