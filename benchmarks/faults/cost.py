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
from looptape import Trainer
from looptape.trainer.checkpoints import store as checkpoints

INTERVAL_SECONDS = 60.0
LONGEST_STOP_SECONDS = 0.05


def make(width, layers):
    keras.utils.set_random_seed(0)
    stack = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *stack, keras.layers.Dense(1)])
    return Trainer(model, keras.optimizers.Adam(1e-3), {"error": keras.losses.MeanSquaredError()})


def data(width, batch):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(batch, width)).astype("float32"), rng.normal(size=(batch, 1)).astype("float32")
    return tf.data.Dataset.from_tensors((x, y)).repeat()


class Pauses(keras.callbacks.Callback):
    """Seconds between the ends of updates. `after[i]` is the time from update i to the next one, a save included."""

    def __init__(self):
        super().__init__()
        self.ends = []

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.perf_counter())

    def after(self, step):
        return self.ends[step] - self.ends[step - 1]


def saving(rounds=7, between=40):
    """What saves of a model of 10 M parameters with Adam cost, each `between` updates after the one before.

    Returns (parameters, megabytes, [seconds that training stood still], [seconds of writing], seconds of a check). The
    time of the update after a save counts as standing still where it is above the median: TensorFlow copies there.
    """
    trainer, pauses, writing = make(1024, 10), Pauses(), []
    write = checkpoints.Store.write

    def timed(*arguments):
        start = time.perf_counter()
        found = write(*arguments)
        writing.append(time.perf_counter() - start)
        return found

    checkpoints.Store.write = timed
    try:
        with tempfile.TemporaryDirectory() as workdir:
            options = {"checkpoint_every": between, "workdir": workdir, "progress": False, "log_every": 10**6}
            trainer.fit(data(1024, 64), steps=rounds * between + 1, callbacks=[pauses], **options)
            directory = checkpoints.Store(os.path.join(workdir, "checkpoints"))
            path = os.path.join(directory.directory, directory.names()[-1])
            start = time.perf_counter()
            assert checkpoints.verify(path) is None
            check = time.perf_counter() - start
            size = sum(os.path.getsize(os.path.join(path, name)) for name in os.listdir(path)) / 1e6
    finally:
        checkpoints.Store.write = write
    usual = statistics.median(np.diff(pauses.ends))
    stops = [pauses.after(step) - usual for step in range(between, rounds * between + 1, between)]
    return trainer.model.count_params(), size, stops, writing, check


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
            trainer.fit(
                stream,
                steps=trainer._engine.counters.step + updates,
                log_every=updates,
                callbacks=[clock],
                progress=False,
            )
            return clock.seconds / updates

        return run

    return measure.interleave({"checked": contestant(True), "unchecked": contestant(False)}, rounds)


def main():
    print(measure.machine(), "\n")
    parameters, size, stops, writing, check = saving()
    share, stop = 1 + statistics.median(writing) / INTERVAL_SECONDS, statistics.median(stops)
    times = finite_check()
    what = f"{parameters / 1e6:.1f} M parameters, {size:.0f} MB"
    rows = [
        [
            f"a save: training stands still, {what}",
            f"{1000 * stop:.0f} ms",
            f"{1000 * min(stops):.0f}–{1000 * max(stops):.0f} ms",
            f"≤ {1000 * LONGEST_STOP_SECONDS:.0f} ms",
            "yes" if stop <= LONGEST_STOP_SECONDS else "**no**",
        ],
        [
            f"a save every {INTERVAL_SECONDS:.0f} s, as if training waited for the disk",
            f"{share:.4f}",
            f"{1 + min(writing) / INTERVAL_SECONDS:.4f}–{1 + max(writing) / INTERVAL_SECONDS:.4f}",
            "≤ 1.01",
            "yes" if share <= 1.01 else "**no**",
        ],
        measure.row(times, "checked", "unchecked", 1.05),
    ]
    print(measure.table(["what", "median", "range", "limit", "reached"], rows))
    print(f"\nwriting a save: {statistics.median(writing):.2f} s; its check at a start: {check:.2f} s")
    print(f"an update: {1000 * statistics.median(times['unchecked']):.1f} ms")


if __name__ == "__main__":
    main()
