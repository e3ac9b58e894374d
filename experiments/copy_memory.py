"""Copy memory: repeat ten symbols after a hundred blank time steps.

    looptape run copy_memory --workdir=runs/copy/orthogonal
    looptape run copy_memory --workdir=runs/copy/rnn --cell=rnn

The input is ten symbols out of eight, blanks, a start sign, and ten more blanks. During these the network must answer
the symbols; before, the right answer is a blank. A network that knows when to answer but not what has a cross-entropy
of 10 ln 8 / (delay + 20) = 0.173.

Expect a `cross_entropy` below 0.01 in about a minute on two CPU cores: the orthogonal RNN reached 0.0064, 0.0031 and
0.0025 with seeds 0 to 2. The plain `rnn` stayed at 0.1739 with seeds 0 and 1 and reached 0.1642 with seed 2; the LSTM
reached 0.1695 with seed 0 and 0.1693 with seed 1.

The Gradient Flow tab shows why (`tensorboard --logdir runs/copy`). At step 1,000 the state of the plain RNN of seed 0
has a gradient of 1.0e-2 at time step 110, the first answer, and of 2.1e-6 at time step 9, the last symbol: nothing
tells the weights what to keep. Its horizon shrank from 120 time steps at step 50 to 25. With seed 2 the gradient
arrives (1.7e-3 at time step 9, a median gain of 1.00), and that run begins to learn. The orthogonal cell's rows are
level from the start, 2.1e-3 and 2.2e-3 at these two places, with a median gain of 1.000.
"""

import dataclasses
import math

import keras
import tensorflow as tf

from looptape import Trainer, launch
from looptape.losses import sparse_categorical_cross_entropy
from looptape.models import LoopRNN, OrthogonalRNNCell

SYMBOLS, REMEMBERED = 8, 10
BLANK, GO = 0, SYMBOLS + 1  # the symbols are 1 to 8

CELLS = {
    "orthogonal": lambda units: OrthogonalRNNCell(units, reflections=max(units // 2, 1), start="random"),
    "gru": keras.layers.GRUCell,
    "lstm": keras.layers.LSTMCell,
    "rnn": keras.layers.SimpleRNNCell,
}


@dataclasses.dataclass(frozen=True)
class Config(launch.Config):
    steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 3e-3
    clip_norm: float | None = 1.0
    jit_compile: bool = True
    log_every: int = 20
    eval_every: int | None = 100
    checkpoint_every: int | None = 200
    probe_every: int = 50

    delay: int = launch.option(100, "time steps between the symbols and the place to repeat them", least=1)
    cell: str = launch.option("orthogonal", "the recurrent cell", choices=CELLS)
    units: int = launch.option(128, "size of the cell's state", least=1)
    eval_examples: int = launch.option(1000, "held-out sequences", least=1, resume="accept")


def sequences(size, delay, seed):
    """(one-hot tokens [size, delay + 20, 10], targets [size, delay + 20]) from a seed of two integers."""
    symbols = tf.random.stateless_uniform([size, REMEMBERED], seed, 1, SYMBOLS + 1, tf.int32)
    blanks = tf.fill([size, delay - 1], BLANK)
    tokens = tf.concat([symbols, blanks, tf.fill([size, 1], GO), tf.fill([size, REMEMBERED], BLANK)], axis=1)
    targets = tf.concat([tf.fill([size, delay + REMEMBERED], BLANK), symbols], axis=1)
    return tf.one_hot(tokens, GO + 1), targets


def data(config):
    """(endless batches, held-out batches)."""
    train = tf.data.Dataset.counter().map(lambda i: sequences(config.batch_size, config.delay, [config.seed, i]))
    held_out = sequences(config.eval_examples, config.delay, [config.seed, -1])
    return train.prefetch(2), tf.data.Dataset.from_tensor_slices(held_out).batch(250)


def build(config):
    tokens = keras.Input((config.delay + 2 * REMEMBERED, GO + 1))
    states = LoopRNN(CELLS[config.cell](config.units), return_sequences=True, name=config.cell)(tokens)
    model = keras.Model(tokens, keras.layers.Dense(SYMBOLS + 1, name="logits")(states))
    trainer = Trainer(
        model,
        launch.optimizer(config),
        {"cross_entropy": sparse_categorical_cross_entropy},
        **launch.trainer_options(config),
    )
    dataset, held_out = data(config)
    baseline = REMEMBERED * math.log(SYMBOLS) / (config.delay + 2 * REMEMBERED)
    goal = launch.Goal("cross_entropy", below=0.01, baseline=baseline, baseline_name="guessing the symbols")
    return launch.Experiment(trainer, dataset, held_out, goals=(goal,))


if __name__ == "__main__":
    launch.main(Config, build)
