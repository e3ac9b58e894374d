"""What the health of every variable costs: an update with it, `health_every=100`, positions, bytes in the event file.

python -m benchmarks.health [rounds]
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pathlib
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf
from tensorboard.compat.proto import event_pb2

from benchmarks.measure import Clock, interleave, machine, row, table, timed
from looptape import Trainer
from looptape.experiments import sorting

UPDATES = 10  # measured at once


def convolutional():
    """(model of 1 M parameters, a batch of 64 images of 32 × 32)."""
    keras.utils.set_random_seed(0)
    layers = []
    for filters in (32, 64, 128):
        layers += [keras.layers.Conv2D(filters, 3, activation="relu", padding="same"), keras.layers.MaxPooling2D()]
    layers += [keras.layers.Flatten(), keras.layers.Dense(440, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((32, 32, 3)), *layers])
    generator = np.random.default_rng(0)
    return model, (generator.normal(size=(64, 32, 32, 3)).astype("float32"), generator.integers(0, 10, 64))


def transformer():
    """(model of 4 layers, a batch of 64 sequences of 64)."""
    keras.utils.set_random_seed(0)
    config = sorting.Config(layers=4, units=128, length=64)
    inputs, targets = sorting.sequences(64, 64, config.digits, [0, 0])
    return sorting.transformer(config), (inputs, targets)


def contestant(make, workdir=None, **options):
    """(a function that runs some updates in `fit` and gives its seconds, the trainer, its data)."""
    model, batch = make()
    data = tf.data.Dataset.from_tensors(batch).cache().repeat()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = Trainer(model, keras.optimizers.Adam(1e-4), {"loss_of_labels": loss}, **options)
    trainer.fit(data, steps=4, progress=False, workdir=workdir)

    def run(updates):
        clock = Clock()
        steps = trainer.step.numpy().item() + updates
        trainer.fit(data, steps=steps, progress=False, callbacks=[clock], workdir=workdir, log_every=1000)
        return clock.seconds

    return run, trainer, data


def one_update(make, **options):
    """A function that gives the seconds of some updates, all of the same kind, without what `fit` does around them."""
    _, trainer, data = contestant(make, **options)
    engine, iterator = trainer._engine, iter(data)
    if not options:
        return lambda: timed(lambda: [engine.calls.run(iterator, 1) for _ in range(UPDATES)])
    engine.calls.run_observed(iterator, False, True)
    return lambda: timed(lambda: [engine.calls.run_observed(iterator, False, True) for _ in range(UPDATES)])


def row_bytes(directory):
    """Mean bytes of a health row in the event file, the first left out."""
    sizes = []
    for path in sorted(pathlib.Path(directory, "train").glob("events*")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = event_pb2.Event.FromString(record)
            if any(value.tag.startswith("health/") for value in event.summary.value):
                sizes.append(len(record) + 16)
    return float(np.mean(sizes[1:]))


def bytes_of_hundred():
    """Bytes per row of a model with 100 variables."""
    layers = [keras.layers.Dense(4, name=f"hidden_layer_{index}") for index in range(50)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    data = tf.data.Dataset.from_tensors((tf.ones([2, 4]), tf.ones([2, 4]))).repeat()
    with tempfile.TemporaryDirectory() as workdir:
        trainer = Trainer(model, keras.optimizers.SGD(1e-3), {"error": "mse"}, health_every=1)
        trainer.fit(data, steps=30, progress=False, workdir=workdir, log_every=1000)
        return row_bytes(workdir)


def main(rounds):
    rows = []
    for name, make in (("CNN, 1 M parameters", convolutional), ("Transformer, 4 layers", transformer)):
        contestants = {"with health": one_update(make, health_every=1000), "plain": one_update(make)}
        if make is transformer:
            contestants["with positions"] = one_update(make, health_every=1000, health="positions")
        for run in contestants.values():
            run()
        times = interleave(contestants, rounds)
        rows.append([name, *row(times, "with health", "plain", 1.05)])
        if make is transformer:
            rows.append([name, *row(times, "with positions", "with health", 1.05)])
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            long = {
                "health_every=100": contestant(make, first, health_every=100)[0],
                "none": contestant(make, second)[0],
            }
            for run in long.values():
                run(100)  # with its first update with health, which is traced
            times = interleave({key: (lambda run=run: run(200)) for key, run in long.items()}, max(rounds // 5, 2))
        rows.append([name, *row(times, "health_every=100", "none", 1.005)])
    size = bytes_of_hundred()
    rows.append(["100 variables", "bytes per row", f"{size:.0f}", "", "≤ 1024", "yes" if size <= 1024 else "**no**"])
    print(machine())
    print(table(["model", "compared", "ratio", "spread", "limit", "reached"], rows))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
