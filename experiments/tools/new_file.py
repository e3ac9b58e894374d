"""`looptape new`: writes a starter experiment."""

import os

_TEXT = '''"""{title}: one line that `looptape list` shows.

    looptape run {file} --workdir=runs/{name}

This file trains a small recurrent network to remember the first number of a sequence. Replace the data, the model and
the losses with your own.

Expect an `error` below 0.01 in half a minute on two CPU cores.
"""

import dataclasses

from looptape import Trainer, launch  # import it first to hide TensorFlow's log lines
from looptape.losses import squared_error
from looptape.models import LoopRNN

import keras
import tensorflow as tf


# Every field is a flag, e.g. --length=20. launch.Config has the common ones: steps, batch_size, learning_rate, …
@dataclasses.dataclass(frozen=True)
class Config(launch.Config):
    steps: int = 500  # another default for a common flag
    learning_rate: float = 0.01
    eval_every: int | None = 100

    length: int = launch.option(10, "time steps of a sequence", least=1)
    units: int = launch.option(16, "size of the recurrent state", least=1)


def batch(config, seed):
    """(sequences [batch, length, 1], targets [batch, 1])."""
    x = tf.random.stateless_uniform([config.batch_size, config.length, 1], seed)
    return x, x[:, 0]


def build(config):
    """The trainer and the data. Called once, after the flags are parsed."""
    model = keras.Sequential(
        [keras.Input((config.length, 1)), LoopRNN(keras.layers.GRUCell(config.units)), keras.layers.Dense(1)]
    )
    # Each loss is logged under its name; --loss_weights=error=2 weights it.
    trainer = Trainer(model, launch.optimizer(config), {{"error": squared_error}}, **launch.trainer_options(config))
    # Endless batches, made from a counter, so that a resumed run gets the same ones.
    dataset = tf.data.Dataset.counter().map(lambda index: batch(config, [config.seed, index])).prefetch(2)
    held_out = tf.data.Dataset.range(10).map(lambda index: batch(config, [config.seed, -1 - index]))
    goal = launch.Goal("error", below=0.01, baseline=1 / 12, baseline_name="always answering 1/2")
    return launch.Experiment(trainer, dataset, held_out, goals=(goal,))


if __name__ == "__main__":
    launch.main(Config, build)
'''


def write(path):
    """Writes the file. Raises a ValueError if the path cannot be that of an experiment."""
    name, ending = os.path.splitext(os.path.basename(path))
    if ending != ".py":
        raise ValueError(f"{path!r} does not end in .py; an experiment is a Python file. Write e.g. {path}.py.")
    if not name.isidentifier() or name == "looptape":
        reason = "hides this package" if name == "looptape" else "is not a name that Python can import"
        raise ValueError(f"{path!r} {reason}; choose a name like my_experiment.py.")
    if os.path.lexists(path):
        raise ValueError(f"{path!r} already exists and is not overwritten. Choose another name, or remove it first.")
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "x") as file:
        file.write(_TEXT.format(title=name.replace("_", " ").capitalize(), name=name, file=path))
