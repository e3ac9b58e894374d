"""A run with every kind of state, to be killed, stopped and damaged.

python -m benchmarks.faults.victim <work directory> <steps>

prints `training from <step>` when the first update is about to begin, and at the end `sha256 <hash>` of everything it
reached.
"""

import hashlib
import os
import sys

import keras
import numpy as np
import tensorflow as tf

from looptape import losses
from looptape.trainer import Trainer
from looptape.trainer.checkpoints import trainer_state

BATCH, TIME, FEATURES = 4, 5, 2


class Victim(Trainer):
    """Two losses on a stateful recurrent model with dropout and batch normalization."""

    def compute_losses(self, batch, training):
        x, y = batch
        prediction = self.model(x, training=training)
        self.update_metrics(y, prediction)
        return {"error": tf.square(prediction - y)[:, 0], "size": tf.reduce_mean(tf.abs(prediction), axis=1)}


def make_model(seed=1, half=False):
    """`half`: with a layer in float16, so that the loss is scaled and the scale is a part of the state."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((TIME, FEATURES), batch_size=BATCH),
            keras.layers.GRU(3, stateful=True, recurrent_dropout=0.1, seed=5, name="gru"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3, seed=6),
            keras.layers.Dense(1, dtype="mixed_float16" if half else "float32"),
            keras.layers.Activation("linear", dtype="float32"),
        ]
    )


def make_trainer(half=False, **options):
    """Three micro-batches per update, averaged weights, learned loss weights, a metric, and probes."""
    options = {"accumulation_steps": 3, "ema_decay": 0.9, "clip_norm": 1.0, "probe_every": 4, **options}
    return Victim(
        make_model(half=half),
        keras.optimizers.Adam(0.01),
        combiner=losses.Uncertainty(),
        metrics=[keras.metrics.MeanAbsoluteError(name="mae")],
        **options,
    )


def arrays(examples=60):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(examples, TIME, FEATURES)).astype("float32")
    return x, x.sum(axis=(1, 2))[:, None].astype("float32")


def make_data(examples=60):
    """15 shuffled batches per pass: off the boundary of the accumulation, and of nearly every interval."""
    tf.random.set_seed(3)  # a part of what a shuffle is seeded with
    return tf.data.Dataset.from_tensor_slices(arrays(examples)).shuffle(40, seed=3).repeat().batch(BATCH)


def make_eval_data():
    return tf.data.Dataset.from_tensor_slices(arrays(12)).batch(BATCH)


def make_callbacks(eval_every):
    # No evaluation is better by so much: the learning rate falls at every second one, as the counter says.
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.9, patience=2, min_delta=1e9)
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=10**6, restore_best_weights=True)
    return [plateau, stopping]


def fit(trainer, workdir, steps, *, checkpoint_every=10, eval_every=6, callbacks=(), data=None, **options):
    return trainer.fit(
        make_data() if data is None else data,
        steps=steps,
        eval_dataset=make_eval_data(),
        eval_every=eval_every,
        log_every=4,
        checkpoint_every=checkpoint_every,
        workdir=workdir,
        callbacks=[*make_callbacks(eval_every), *callbacks],
        progress=False,
        **options,
    )


def pieces(trainer):
    """{name: SHA-256} of everything on the device but the data."""
    [source] = trainer._engine.sources.values()
    found = {}
    for name, variable in trainer_state.tracked_state(trainer._engine, source).items():
        if name != "iterator":
            found[f"{name} {variable.name}"] = hashlib.sha256(variable.numpy().tobytes()).hexdigest()
    return found


def digest(trainer):
    """One SHA-256 of everything that was reached."""
    state = repr(
        [
            trainer._engine.counters.step,
            trainer._engine.counters.epoch,
            trainer._engine.counters.rounds,
            trainer._engine.counters.skips.total,
            *pieces(trainer).values(),
        ]
    )
    return hashlib.sha256(state.encode()).hexdigest()


class _Announce(keras.callbacks.Callback):
    def __init__(self, trainer):
        super().__init__()
        self._trainer = trainer

    def on_train_begin(self, logs=None):
        print(f"training from {self._trainer._engine.counters.step}", flush=True)


def main(workdir, steps):
    trainer = make_trainer(half=True)
    fit(trainer, workdir, int(steps), callbacks=[_Announce(trainer)])
    print(f"sha256 {digest(trainer)}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main(*sys.argv[1:])
