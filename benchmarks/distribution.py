"""What a strategy costs: one replica against none, two workers on this machine against one process.

python -m benchmarks.distribution
"""

import os
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from benchmarks import workers
from benchmarks.measure import Clock, interleave, machine, row, table
from benchmarks.overhead import mlp, mlp_data
from looptape import Trainer

INSTANCES = 3
HIDDEN = (64, 512, 1536)  # units of two hidden layers: 6 thousand to 2.4 million parameters
BATCH = 256


class BothClocks(Clock):
    """The processor's time beside that on the wall, which depends on what else the machine has to do."""

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self._processor = time.process_time()

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        self.processor_seconds = time.process_time() - self._processor


def contestant(strategy, make_model, dataset, per_call):
    """A function that runs so many updates and returns the seconds of one, by the clock and by the processor."""
    with strategy.scope() if strategy else tf.init_scope():
        model, optimizer = make_model(), keras.optimizers.Adam(1e-3)
    trainer = Trainer(model, optimizer, {"error": "mse"}, strategy=strategy, steps_per_call=per_call)

    def run(updates):
        clock = BothClocks()
        steps = trainer._engine.counters.step + updates
        trainer.fit(dataset, steps=steps, log_every=per_call, callbacks=[clock], progress=False)
        return np.array([clock.seconds, clock.processor_seconds]) / updates

    return run


def one_replica(rounds=21, updates=1000, per_call=100):
    """A mirrored update on one replica against an update without a strategy, in one process."""
    dataset = mlp_data().repeat()
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    makers = {
        "mirrored, one replica": lambda: contestant(strategy, mlp, dataset, per_call),
        "no strategy": lambda: contestant(None, mlp, dataset, per_call),
    }
    runs = {(name, i): make() for i in range(INSTANCES) for name, make in makers.items()}
    for run in runs.values():
        run(2 * per_call)
    single = interleave({key: (lambda run=run: run(updates)) for key, run in runs.items()}, rounds)
    rows = []
    for column, kind in enumerate(("", ", processor time")):
        times = {
            name: [float(np.mean([seconds[column] for seconds in own])) for own in _by_round(single, name)]
            for name in makers
        }
        rows.append([f"MLP 32-64-64-1, batch 64{kind}", *row(times, "mirrored, one replica", "no strategy", 1.05)])
    return rows


def _by_round(single, name):
    return zip(*(single[name, instance] for instance in range(INSTANCES)), strict=True)


def dense(units):
    return keras.Sequential(
        [
            keras.Input((32,)),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(1),
        ]
    )


def data(batch):
    x = np.random.default_rng(0).normal(size=(batch * 8, 32)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(batch, drop_remainder=True).cache().repeat()


def worker(batch):
    """Measures in a process of its own, alone or as one of several: {units: [parameters, seconds per update]}."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else None
    found = {}
    for units in HIDDEN:
        run = contestant(strategy, lambda units=units: dense(units), data(batch), 10)
        run(10)
        found[units] = [units * units + 35 * units + 1, statistics.median(run(10)[0] for _ in range(5))]
    workers.publish(found)


def processes(count, batch):
    """{units: seconds per update} of so many workers that share batches of this size."""
    found = workers.measured("distribution", [batch], count)
    return {int(units): seconds for units, (_, seconds) in found.items()}


def two_workers(rounds=3):
    """Two workers against the same work in one process, and against half of it: the rest is communication."""
    kinds = {"two workers": (2, BATCH), "one process": (1, BATCH), "one process, half the batch": (1, BATCH // 2)}
    times = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, (count, batch) in kinds.items():
            times[name].append(processes(count, batch))
    rows = []
    for units in HIDDEN:
        own = {name: [each[units] for each in found] for name, found in times.items()}
        ratios = [a / b for a, b in zip(own["two workers"], own["one process"], strict=True)]
        medians = {name: statistics.median(values) * 1e3 for name, values in own.items()}
        parameters = units * units + 35 * units + 1
        rows.append(
            [
                f"MLP 32-{units}-{units}-1, batch {BATCH}",
                f"{parameters:,}",
                *(f"{medians[name]:.2f}" for name in kinds),
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f}–{max(ratios):.2f}",
            ]
        )
    return rows


def main():
    rows = one_replica()
    print(machine())
    print(f"load: {os.getloadavg()[0]:.1f}")
    print(table(["model", "compared", "ratio", "spread", "limit", "reached"], rows), flush=True)
    header = ["model", "parameters", "two workers, ms", "one process, ms", "half the batch, ms", "ratio", "spread"]
    print("\n" + table(header, two_workers()), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(int(sys.argv[2]))
    else:
        main()
