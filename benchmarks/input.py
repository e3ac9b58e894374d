"""Input by rank: examples per second of one to three workers whose input sleeps 2 ms per example.

python -m benchmarks.input

`IndexedData`, of which each worker makes its own rows, against a `tf.data.Dataset`, of which each makes every batch.
The map sleeps, so it needs no processor: what is measured is how the input is divided.
"""

import contextlib
import os
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

from benchmarks import workers
from benchmarks.measure import Clock, machine, table
from looptape import IndexedData, Trainer, joined

EXAMPLES, BATCH, SECONDS = 4800, 48, 0.002
UPDATES, ROUNDS = 20, 5


def example(index):
    """An example that takes 2 ms to make."""

    def sleep(index):
        time.sleep(SECONDS)
        return index

    value = tf.cast(tf.ensure_shape(tf.numpy_function(sleep, [index], tf.int64), []), tf.float32)
    return tf.fill([8], value / EXAMPLES), tf.fill([1], value / EXAMPLES)


def data(kind):
    if kind == "indexed":
        return IndexedData(EXAMPLES, example, batch_size=BATCH, num_parallel_calls=1)
    dataset = tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES, seed=0).repeat().map(example)
    return dataset.batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def worker(strategy, kind):
    """Measures in a process of its own, alone or as one of several; prints examples per second."""
    with strategy.scope() if strategy else tf.init_scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        trainer = Trainer(model, keras.optimizers.SGD(0.1), {"error": "mse"}, strategy=strategy, steps_per_call=5)
    made, found = data(kind), []
    for _ in range(ROUNDS + 1):
        clock = Clock()
        trainer.fit(made, steps=int(trainer.step.numpy()) + UPDATES, callbacks=[clock], progress=False)
        found.append(UPDATES * BATCH / clock.seconds)
    workers.publish(found[1:])


def measured(kind, count):
    """Examples per second of so many workers: [each round]."""
    return workers.measured("input", [kind], count)


def main():
    print(machine())
    print(f"load: {os.getloadavg()[0]:.1f}")
    rows = []
    for kind, limit in (("indexed", 0.9), ("dataset", None)):
        alone = None
        for count in (1, 2, 3):
            found = measured(kind, count)
            median = statistics.median(found)
            alone = alone or median
            share = median / alone / count
            reached = "" if limit is None or count == 1 else "yes" if share >= limit else "**no**"
            spread = f"{min(found):.0f}–{max(found):.0f}"
            wanted = f"≥ {limit}" if limit and count > 1 else "–"
            rows.append([kind, count, f"{median:.0f}", spread, f"{share:.2f}", wanted, reached])
    header = ["input", "workers", "examples per second", "spread", "of linear", "limit", "reached"]
    print(table(header, rows), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        with joined() if "TF_CONFIG" in os.environ else contextlib.nullcontext() as everybody:
            worker(everybody, sys.argv[2])
    else:
        main()
