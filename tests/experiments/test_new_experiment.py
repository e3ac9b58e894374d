"""An experiment is one new file: it is listed, shows its flags, runs, resumes and says what was reached."""

import json
import os
import subprocess
import sys

import pytest

from tests.experiments.tools import copied_package

PARABOLA = '''"""The parabola: fit x² by a small network.

    python -m experiments.parabola

Expect an `error` below 0.1 after a second.
"""

import dataclasses

import keras
import tensorflow as tf

from experiments import launch
from losses import squared_error
from trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Config(launch.Config):
    steps: int = 6
    eval_every: int | None = 3
    units: int = launch.option(8, "hidden units", least=1)


def data(config, seed):
    def batch(index):
        x = tf.random.stateless_uniform([config.batch_size, 1], [seed, index], -1.0, 1.0)
        return x, x * x

    return tf.data.Dataset.counter().map(batch)


def build(config):
    layers = [keras.Input((1,)), keras.layers.Dense(config.units, "tanh"), keras.layers.Dense(1)]
    trainer = Trainer(
        keras.Sequential(layers), launch.optimizer(config), {"error": squared_error}, **launch.trainer_options(config)
    )
    goal = launch.Goal("error", below=0.1, baseline=4 / 45, baseline_name="always 1/3")
    return launch.Experiment(trainer, data(config, config.seed), data(config, -1).take(2), goals=(goal,))


if __name__ == "__main__":
    launch.main(Config, build)
'''


@pytest.fixture
def launch(tmp_path):
    environment = copied_package(tmp_path, parabola=PARABOLA)

    def run(*arguments, module="experiments.parabola"):
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def test_one_new_file_is_an_experiment(tmp_path, launch):
    assert "experiments.parabola        The parabola: fit x² by a small network." in launch(module="experiments").stdout

    first = launch("--workdir=runs/it", "--units=5", "--strategy=mirrored:2")
    assert first.returncode == 0, first.stderr
    assert "parabola after 6 steps" in first.stdout
    assert "Expect an `error` below 0.1 after a second." in first.stdout
    assert "tensorboard --logdir runs/it" in first.stdout
    assert "cuda" not in first.stderr.lower()

    second = launch("--flagfile=runs/it/flags.txt", "--workdir=runs/it", "--steps=8")
    assert second.returncode == 0, second.stderr
    assert "parabola after 8 steps" in second.stdout and "--steps=6 → --steps=8" in second.stderr
    with open(tmp_path / "runs" / "it" / "config.json") as file:
        stored = json.load(file)
    assert stored["experiment"] == "parabola" and stored["config"]["units"] == 5

    third = launch("--workdir=runs/it", "--units=6", "--steps=9")
    assert third.returncode == 2
    assert "  --units=5 → --units=6\n" in third.stderr and "Traceback" not in third.stderr


def test_it_answers_from_the_terminal(tmp_path, launch):
    printed = launch("--print_config", "--units=3", "--workdir=runs/none")
    assert printed.returncode == 0 and "--units=3\n" in printed.stdout and "--print_config" not in printed.stdout
    assert not os.path.exists(tmp_path / "runs")
    wrong = launch("--unit=3")
    assert wrong.returncode == 2
    assert wrong.stderr.endswith("parabola: --unit is not a flag; did you mean --units? --help lists them all.\n")
