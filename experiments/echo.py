"""Echo: at every time step, repeat the bit of two time steps ago and the one of fifteen time steps ago.

    looptape run echo --workdir=runs/echo/gru
    looptape run echo --workdir=runs/echo/rnn --cell=rnn

One recurrent layer has two losses at every time step, `near` and `far`. The run fills *Loss shares* and *Credit matrix*
in the Gradient Flow tab. Guessing has a cross-entropy of ln 2 = 0.693 for either of them.

Expect a `far` below 0.1 in less than a minute on two CPU cores: the GRU reached 0.0004, 0.0005 and 0.007 with seeds 0
to 2, the plain `rnn` 0.0002 and 0.00004 with seeds 0 and 1.

*Loss shares*: at the first step of seed 0 the near echo drives about a third of the GRU's state gradient in the
middle of the sequence, and all of it in the first time steps, which have no far target. From step 100 on the network
knows the near echo, and the far one drives nearly everything. *Credit matrix*, logged at every evaluation: at step
1,000 the GRU's loss at time step 35 depends on the state 15 time steps before half as much as on the present one, so
its matrix is level. In the plain RNN it depends 6,000 times less, so the matrix fades away from its diagonal.
"""

import dataclasses

import keras
import tensorflow as tf

from looptape import Trainer, launch

CELLS = {"gru": keras.layers.GRUCell, "lstm": keras.layers.LSTMCell, "rnn": keras.layers.SimpleRNNCell}


@dataclasses.dataclass(frozen=True)
class Config(launch.Config):
    steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 1e-2
    clip_norm: float | None = 1.0
    jit_compile: bool = True
    log_every: int = 20
    eval_every: int | None = 200
    checkpoint_every: int | None = 200
    probe_every: int = 20

    length: int = launch.option(40, "time steps of a sequence", least=3)
    near: int = launch.option(2, "time steps back to the bit of the first answer", least=1)
    far: int = launch.option(15, "time steps back to the bit of the second answer", least=1)
    cell: str = launch.option("gru", "the recurrent cell", choices=CELLS)
    units: int = launch.option(64, "size of the cell's state", least=1)
    eval_examples: int = launch.option(500, "held-out sequences", least=1, resume="accept")

    def __post_init__(self):
        super().__post_init__()
        if max(self.near, self.far) >= self.length:
            raise ValueError(
                f"`length` is {self.length}, with echoes of {self.near} and {self.far} time steps; it must be longer "
                "than both. Raise --length."
            )


def sequences(size, length, seed):
    """Random bits [size, length, 1] from a seed of two integers."""
    return tf.cast(tf.random.stateless_uniform([size, length, 1], seed, 0, 2, tf.int32), tf.float32)


def data(config):
    """(endless batches, held-out batches)."""
    train = tf.data.Dataset.counter().map(lambda i: sequences(config.batch_size, config.length, [config.seed, i]))
    held_out = sequences(config.eval_examples, config.length, [config.seed, -1])
    return train.prefetch(2), tf.data.Dataset.from_tensor_slices(held_out).batch(250)


class EchoTrainer(Trainer):
    """Compares both answers with the bits of so many time steps ago; before there are any, nothing is asked.

    Args:
        *args, **options: as in `Trainer`.
        lags: {loss: time steps}.
    """

    def __init__(self, *args, lags, **options):
        super().__init__(*args, **options)
        self.lags = lags

    def compute_losses(self, bits, training):
        logits = self.model(2.0 * bits - 1.0, training=training)
        losses = {}
        for index, (name, lag) in enumerate(self.lags.items()):
            targets = tf.pad(bits[:, :-lag, 0], [[0, 0], [lag, 0]])
            asked = tf.pad(tf.ones_like(bits[:, :-lag, 0]), [[0, 0], [lag, 0]])
            errors = tf.nn.sigmoid_cross_entropy_with_logits(targets, logits[:, :, index])
            losses[name] = errors, asked
        return losses


class LogCredit(keras.callbacks.Callback):
    """Logs the credit matrix at every evaluation.

    Args:
        trainer: the trainer.
        batch: what it is measured on.
        workdir: of the run.
    """

    remembers = False  # nothing to save in a checkpoint

    def __init__(self, trainer, batch, workdir):
        super().__init__()
        self._trainer, self._batch, self._workdir = trainer, batch, workdir

    def on_epoch_end(self, epoch, logs=None):
        self._trainer.credit_matrix(self._batch, workdir=self._workdir)


def build(config):
    bits = keras.Input((config.length, 1))
    states = keras.layers.RNN(CELLS[config.cell](config.units), return_sequences=True, name=config.cell)(bits)
    model = keras.Model(bits, keras.layers.Dense(2, name="logits")(states))
    lags = {"near": config.near, "far": config.far}
    trainer = EchoTrainer(model, launch.optimizer(config), lags=lags, **launch.trainer_options(config))
    dataset, held_out = data(config)
    callbacks = ()
    if config.workdir:
        batch = sequences(8, config.length, [config.seed, -2])
        callbacks = (LogCredit(trainer, batch, config.workdir),)
    goal = launch.Goal("far", below=0.1, baseline=0.693, baseline_name="guessing")
    return launch.Experiment(trainer, dataset, held_out, goals=(goal,), callbacks=callbacks)


if __name__ == "__main__":
    launch.main(Config, build)
