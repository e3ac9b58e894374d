"""What being safe costs: checkpoints of a 10 M-parameter model, and the finite check of a 10 ms update.

python -m benchmarks.faults.cost

A save is timed by itself and related to the 60 seconds between two of them: a run of minutes, of which the save is a
hundredth, would measure the machine's mood instead.
"""

import os
import statistics
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

from benchmarks import measure
from trainer import Trainer, checkpoints

INTERVAL_SECONDS = 60.0


def make(width, layers):
    keras.utils.set_random_seed(0)
    stack = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *stack, keras.layers.Dense(1)])
    return Trainer(model, keras.optimizers.Adam(1e-3), {"error": keras.losses.MeanSquaredError()})


def data(width, batch):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(batch, width)).astype("float32"), rng.normal(size=(batch, 1)).astype("float32")
    return tf.data.Dataset.from_tensors((x, y)).repeat()


def saving(rounds=5):
    """(parameters, megabytes, [seconds of a save]) of a model of 10 M parameters with Adam."""
    trainer = make(1024, 10)
    seconds = []
    save = checkpoints.Store.save

    def timed(*arguments, **options):
        start = time.perf_counter()
        done = save(*arguments, **options)
        seconds.append(time.perf_counter() - start)
        return done

    checkpoints.Store.save = timed
    try:
        with tempfile.TemporaryDirectory() as workdir:
            trainer.fit(data(1024, 8), steps=rounds, checkpoint_every=1, workdir=workdir, progress=False)
            directory = checkpoints.Store(os.path.join(workdir, "checkpoints"))
            path = os.path.join(directory.directory, directory.names()[-1])
            start = time.perf_counter()
            assert checkpoints.verify(path) is None
            check = time.perf_counter() - start
            size = sum(os.path.getsize(os.path.join(path, name)) for name in os.listdir(path)) / 1e6
    finally:
        checkpoints.Store.save = save
    return trainer.model.count_params(), size, seconds, check


def finite_check(rounds=9, updates=60):
    """Times of an update of about 10 ms with and without its check, interleaved."""

    def contestant(checked):
        trainer = make(512, 4)
        stream = data(512, 256)
        check = tf.debugging.check_numerics
        if not checked:  # while it is traced
            tf.debugging.check_numerics = lambda tensor, message, name=None: tensor
        try:
            trainer.fit(stream, steps=5, progress=False)
        finally:
            tf.debugging.check_numerics = check

        def run():
            clock = measure.Clock()
            trainer.fit(stream, steps=trainer.host_step + updates, log_every=updates, callbacks=[clock], progress=False)
            return clock.seconds / updates

        return run

    return measure.interleave({"checked": contestant(True), "unchecked": contestant(False)}, rounds)


def main():
    print(measure.machine(), "\n")
    parameters, size, seconds, check = saving()
    share = 1 + statistics.median(seconds) / INTERVAL_SECONDS
    times = finite_check()
    rows = [
        [
            f"a save every {INTERVAL_SECONDS:.0f} s, {parameters / 1e6:.1f} M parameters, {size:.0f} MB",
            f"{share:.4f}",
            f"{1 + min(seconds) / INTERVAL_SECONDS:.4f}–{1 + max(seconds) / INTERVAL_SECONDS:.4f}",
            "≤ 1.01",
            "yes" if share <= 1.01 else "**no**",
        ],
        measure.row(times, "checked", "unchecked", 1.05),
    ]
    print(measure.table(["what", "median", "range", "limit", "reached"], rows))
    print(f"\na save: {statistics.median(seconds):.2f} s; its check at a start: {check:.2f} s")
    print(f"an update: {1000 * statistics.median(times['unchecked']):.1f} ms")


if __name__ == "__main__":
    main()
