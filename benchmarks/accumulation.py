"""Accumulation of 8 micro-batches: peak memory against one large batch, time against a hand-written loop.

    python -m benchmarks.accumulation

The peak is the growth of the largest resident size of a process of its own, from when the same trainer has traced its
update and run it on small batches: what an update needs, without what TensorFlow needs to trace it, which is the same
for both. It is printed with that, too.
"""

import os
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.measure import Clock, interleave, machine, peak_memory, row, table, timed
from looptape import Trainer

EXAMPLES, PARTS = 2048, 8
LARGE = 8 * EXAMPLES  # for memory: activations of 670 MB


def model():
    """Activations dominate: 40 layers of 256 units, 2.6 million weights."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(256, activation="tanh") for _ in range(40)]
    return keras.Sequential([keras.Input((256,)), *layers, keras.layers.Dense(1)])


def data(batch, examples):
    x = np.random.default_rng(0).normal(size=(examples, 256)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(batch).cache().repeat()


def trainer_of(parts, examples=EXAMPLES):
    trainer = Trainer(
        model(), keras.optimizers.SGD(1e-3), {"error": keras.losses.MeanSquaredError()}, accumulation_steps=parts
    )
    large = data(examples // parts, examples)

    def run(updates, dataset=large):
        clock = Clock()
        trainer.fit(dataset, steps=trainer._engine.counters.step + updates, callbacks=[clock], progress=False)
        return clock.seconds

    return run


def hand_written():
    """Sums the gradients of the micro-batches in a graph loop and applies their mean."""
    net, optimizer = model(), keras.optimizers.SGD(1e-3)
    variables = [v.value for v in net.trainable_variables]
    optimizer.build(net.trainable_variables)
    iterator = iter(data(EXAMPLES // PARTS, EXAMPLES))

    @tf.function
    def call(iterator, updates):
        for _ in tf.range(updates):
            sums = [tf.zeros_like(v) for v in variables]
            for _ in tf.range(PARTS):
                x, y = next(iterator)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(net(x, training=True) - y))
                sums = [s + g for s, g in zip(sums, tape.gradient(loss, variables), strict=True)]
            optimizer.apply([s / PARTS for s in sums], net.trainable_variables)

    return lambda updates: timed(lambda: call(iterator, tf.constant(updates)))


def peaks(parts):
    """(mebibytes that updates add to a process, the same with tracing), measured in this one."""
    run = trainer_of(parts, LARGE)
    beginning = peak_memory()
    run(3, data(16, 16 * PARTS))
    traced = peak_memory()
    run(3)
    return peak_memory() - traced, peak_memory() - beginning


def peaks_elsewhere(parts, repeats=3):
    """The medians over several processes."""
    command = [sys.executable, "-m", "benchmarks.accumulation", str(parts)]
    printed = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(repeats)]
    return np.median([[float(number) for number in line.split()[-2:]] for line in printed], axis=0)


def main():
    large, small = peaks_elsewhere(1), peaks_elsewhere(PARTS)
    rows = []
    for name, index, limit in (("peak memory", 0, 0.35), ("the same with tracing", 1, None)):
        share = small[index] / large[index]
        reached = "" if limit is None else ("yes" if share <= limit else "**no**")
        rows.append(
            [
                f"{name}, {PARTS} micro-batches / one batch of {LARGE:,}",
                f"{share:.3f}",
                f"{small[index]:.0f} / {large[index]:.0f} MiB",
                "" if limit is None else f"≤ {limit}",
                reached,
            ]
        )
    contestants = {"Trainer.fit": trainer_of(PARTS), "hand-written loop": hand_written()}
    for run in contestants.values():
        run(2)
    times = interleave({name: (lambda run=run: run(8)) for name, run in contestants.items()}, 9)
    rows.append(row(times, "Trainer.fit", "hand-written loop", 1.1))
    print(machine())
    print(table(["compared", "ratio", "spread", "limit", "reached"], rows))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(*peaks(int(sys.argv[1])))
    else:
        main()
