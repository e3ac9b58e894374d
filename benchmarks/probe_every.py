"""What probing costs a training that probes every 100 steps, against none.

python -m benchmarks.probe_every
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tempfile

import keras
import numpy as np
import tensorflow as tf

from benchmarks.measure import Clock, interleave, machine, row, table
from looptape import Trainer


def contestant(probe_every, workdir):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((50, 2)), keras.layers.LSTM(64, name="lstm"), keras.layers.Dense(1)])
    x = np.random.default_rng(0).normal(size=(640, 50, 2)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, 0, :1])).batch(32, drop_remainder=True).cache().repeat()
    trainer = Trainer(
        model, keras.optimizers.Adam(1e-3), {"error": keras.losses.MeanSquaredError()}, probe_every=probe_every
    )

    def run(updates=400):
        clock = Clock()
        steps = trainer._engine.counters.step + updates
        trainer.fit(dataset, steps=steps, log_every=100, workdir=workdir, callbacks=[clock], progress=False)
        return clock.seconds

    return run


def main():
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        contestants = {"probe_every=100": contestant(100, first), "no probing": contestant(0, second)}
        for run in contestants.values():
            run()
        times = interleave(contestants, 15)
    print(machine())
    rows = [["LSTM 64, batch 32, T 50", *row(times, "probe_every=100", "no probing", 1.01)]]
    print(table(["model", "compared", "ratio", "spread", "limit", "reached"], rows))


if __name__ == "__main__":
    main()
