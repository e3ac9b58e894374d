"""`--verify_resume`, exit codes and the lock, by real processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from experiments import verifying
from experiments.workdirs import Refused
from tests.experiments.tools import REPOSITORY, copied_package, run
from trainer import locking

LINE = """
import dataclasses, os
from experiments import launch
from tests.experiments import tools

@dataclasses.dataclass(frozen=True)
class Config(tools.Config):
    noise: bool = launch.option(False, "random data that no checkpoint holds")

def build(config):
    experiment = tools.build(config)
    if not config.noise:
        return experiment
    noisy = experiment.dataset.map(lambda x, y: (x, y + int.from_bytes(os.urandom(1), "big")))
    return dataclasses.replace(experiment, dataset=noisy)

if __name__ == "__main__":
    launch.main(Config, build)
"""


def launched(directory, *flags, **options):
    environment = copied_package(directory, line=LINE)
    environment["PYTHONPATH"] = f"{directory}{os.pathsep}{REPOSITORY}"
    command = [sys.executable, "-m", "experiments.line", *flags]
    return subprocess.Popen(
        command, cwd=directory, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def test_an_exact_experiment_is_found_exact(tmp_path):
    done = launched(tmp_path, "--verify_resume", "--optimizer=adam", "--ema_decay=0.9")
    out, error = done.communicate()
    assert done.returncode == 0 and "Exact: weights, optimizer" in out, error[-2000:]


def test_what_differs_is_named(tmp_path):
    done = launched(tmp_path, "--verify_resume", "--noise")
    out, error = done.communicate()
    assert done.returncode == 1 and "NOT exact" in out, error[-2000:]
    assert "line/kernel" in out and "without" in out


def test_sigterm_ends_an_experiment_with_143(tmp_path):
    workdir = tmp_path / "run"
    done = launched(tmp_path, f"--workdir={workdir}", "--steps=100000000", "--checkpoint_every=10")
    try:
        end = time.monotonic() + 300
        while not os.path.isdir(workdir / "checkpoints") and done.poll() is None:
            assert time.monotonic() < end, "no checkpoint"
            time.sleep(0.05)
        done.send_signal(signal.SIGTERM)
        assert done.wait(timeout=120) == 143, done.stderr.read()[-2000:]
    finally:
        done.kill()
        done.communicate()


def test_a_directory_in_use_is_refused_before_anything_is_written(tmp_path):
    held = tmp_path / "run"
    held.mkdir()
    descriptor = os.open(held / locking.FILE, os.O_CREAT | os.O_RDWR)
    try:
        locking.fcntl.flock(descriptor, locking.fcntl.LOCK_EX)
        with pytest.raises(Refused, match="is in use by another process"):
            run(workdir=str(held))
        assert os.listdir(held) == [locking.FILE]
    finally:
        os.close(descriptor)


def test_no_other_run_kills_itself():
    assert verifying.callbacks(None) == []
