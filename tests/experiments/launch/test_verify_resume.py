"""`--verify_resume`, exit codes and the lock, by real processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from looptape.experiments.launch import verify_resume
from looptape.experiments.launch.options import Refused
from looptape.trainer.checkpoints import lock
from tests.experiments.line import own_project, run

LINE = """
import dataclasses, os
from looptape import launch
from tests.experiments import line

@dataclasses.dataclass(frozen=True)
class Config(line.Config):
    noise: bool = launch.option(False, "random data that no checkpoint holds")

def build(config):
    experiment = line.build(config)
    if not config.noise:
        return experiment
    noisy = experiment.dataset.map(lambda x, y: (x, y + int.from_bytes(os.urandom(1), "big")))
    return dataclasses.replace(experiment, dataset=noisy)

if __name__ == "__main__":
    launch.main(Config, build)
"""


def launched(directory, *flags, how=("mine.py",), **options):
    environment = own_project(directory, mine=LINE)
    command = [sys.executable, *how, *flags]
    return subprocess.Popen(
        command, cwd=directory, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


@pytest.mark.long
def test_an_exact_experiment_is_found_exact(tmp_path):
    done = launched(tmp_path, "--verify_resume", "--optimizer=adam", "--ema_decay=0.9")
    out, error = done.communicate()
    assert done.returncode == 0 and "Exact: weights, optimizer" in out, error[-2000:]


def test_the_experiment_is_the_file_that_launches_it_wherever_its_config_is_defined(tmp_path):
    """Its name, its help, and what `--verify_resume` starts again."""
    own_project(tmp_path, other='"""Another experiment."""\nimport mine\nmine.launch.main(mine.Config, mine.build)\n')
    helped, error = launched(tmp_path, "--help", how=("other.py",)).communicate()
    assert "Another experiment." in helped and "Flags of other:" in helped, error[-2000:]


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
    descriptor = os.open(held / lock.FILE, os.O_CREAT | os.O_RDWR)
    try:
        lock.fcntl.flock(descriptor, lock.fcntl.LOCK_EX)
        with pytest.raises(Refused, match="is in use by another process"):
            run(workdir=str(held))
        assert os.listdir(held) == [lock.FILE]
    finally:
        os.close(descriptor)


def test_no_other_run_kills_itself():
    assert verify_resume.callbacks(None) == []
