"""Accumulation of 8 micro-batches: peak memory against one large batch, time against a hand-written loop.

    python -m benchmarks.accumulation

The peak is that of a process of its own (maximum resident size, less what it had before the first update).
"""

import os
import resource
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.measure import Clock, interleave, machine, row, table, timed
from trainer import Trainer

EXAMPLES, PARTS = 2048, 8
LARGE = 8 * EXAMPLES  # for memory: activations of 670 MB


def model():
    """Activations dominate: 40 layers of 256 units, 2.6 million weights."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(256, activation="tanh") for _ in range(40)]
    return keras.Sequential([keras.Input((256,)), *layers, keras.layers.Dense(1)])


def data(batch, examples):
    x = np.random.default_rng(0).normal(size=(examples, 256)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(batch, drop_remainder=True).cache().repeat()


def trainer_of(parts, examples=EXAMPLES):
    trainer = Trainer(
        model(), keras.optimizers.SGD(1e-3), {"error": keras.losses.MeanSquaredError()}, accumulation_steps=parts
    )
    dataset = data(examples // parts, examples)

    def run(updates):
        clock = Clock()
        trainer.fit(dataset, steps=trainer.host_step + updates, callbacks=[clock], progress=False)
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


def peak(parts):
    """Mebibytes that training adds to a process, measured in this one."""
    run = trainer_of(parts, LARGE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(3)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def peak_elsewhere(parts):
    command = [sys.executable, "-m", "benchmarks.accumulation", str(parts)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main():
    peaks = {parts: sorted(peak_elsewhere(parts) for _ in range(3)) for parts in (1, PARTS)}
    share = peaks[PARTS][1] / peaks[1][1]
    rows = [
        [
            f"peak memory, {PARTS} micro-batches / one batch of {LARGE}",
            f"{share:.3f}",
            f"{peaks[PARTS][1]:.0f} / {peaks[1][1]:.0f} MiB",
            "≤ 0.35",
            "yes" if share <= 0.35 else "**no**",
        ]
    ]
    contestants = {"Trainer.fit": trainer_of(PARTS), "hand-written loop": hand_written()}
    for run in contestants.values():
        run(2)
    times = interleave({name: (lambda run=run: run(8)) for name, run in contestants.items()}, 9)
    rows.append(row(times, "Trainer.fit", "hand-written loop", 1.1))
    print(machine())
    print(table(["compared", "ratio", "spread", "limit", "reached"], rows))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(peak(int(sys.argv[1])))
    else:
        main()
