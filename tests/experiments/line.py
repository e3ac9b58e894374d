"""A small experiment to launch in the tests: a straight line to be fitted."""

import dataclasses
import os

import keras
import tensorflow as tf

from looptape import Trainer, launch
from looptape.losses import squared_error

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@dataclasses.dataclass(frozen=True)
class Config(launch.Config):
    steps: int = 4
    batch_size: int = 8
    learning_rate: float = 0.1
    optimizer: str = "sgd"
    log_every: int = 2

    slope: float = launch.option(3.0, "slope of the line", most=10.0)
    features: int = launch.option(1, "inputs", least=1)


def data(config, seed=0):
    def batch(index):
        x = tf.random.stateless_uniform([config.batch_size, config.features], [config.seed + seed, index])
        return x, config.slope * tf.reduce_sum(x, axis=1, keepdims=True) + 2.0

    return tf.data.Dataset.counter().map(batch)


def build(config):
    model = keras.Sequential([keras.Input((config.features,)), keras.layers.Dense(1, name="line")])
    trainer = Trainer(model, launch.optimizer(config), {"error": squared_error}, **launch.trainer_options(config))
    goal = launch.Goal("error", below=0.5, baseline=1.0)
    return launch.Experiment(trainer, data(config), data(config, seed=1000).take(3), goals=(goal,))


def run(**options):
    """Launches the line in this process, silently. Returns its results."""
    return launch.run(Config(**options), build, name="line", show=False)


def kept(**options):
    """Launches the line and returns (results, the experiment that ran)."""
    made = []

    def remember(config):
        made.append(build(config))
        return made[-1]

    return launch.run(Config(**options), remember, name="line", show=False), made[0]


def own_project(directory, **files):
    """A user's directory with experiments {name: source}. Returns the environment to run in it."""
    for name, source in files.items():
        with open(os.path.join(directory, f"{name}.py"), "w") as file:
            file.write(source)
    return {**os.environ, "PYTHONPATH": REPOSITORY, "TF_CPP_MIN_LOG_LEVEL": "2"}
