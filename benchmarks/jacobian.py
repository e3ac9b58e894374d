"""The loss Jacobian against `tape.jacobian`: time, and peak memory in a process of its own.

    python -m benchmarks.jacobian [--rounds 4] [--only time|memory]

LSTM, batch 32, 64 units, 32 features, the loss [batch, time] squares of the outputs; all rows of all weights.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.measure import interleave, machine, peak_memory, ratio, table, timed
from looptape import Trainer
from looptape.trainer.analysis.loss_jacobian import Passes, Request

BATCH, UNITS, FEATURES = 32, 64, 32
MOST = 14 * 2**30
# (time steps, what is asked for, limit in MiB)
MEMORY = [(200, "rows", 512), (200, "rows", 1024), (200, "credit", 512), (1000, "rows", 2048), (1000, "norms", 2048)]


def make(length):
    """(model, trainer, batch)."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((length, FEATURES)), keras.layers.LSTM(UNITS, return_sequences=True)])
    x = np.random.default_rng(0).normal(size=[BATCH, length, FEATURES]).astype("float32")
    trainer = Trainer(model, "sgd", {"square": lambda targets, outputs: tf.square(outputs)})
    return model, trainer, (x, np.zeros([BATCH, length, 1], "float32"))


def by_tape(model, length):
    """A traced `tape.jacobian` of the same rows."""

    @tf.function(autograph=False)
    def jacobian(x):
        with tf.GradientTape() as tape:
            shares = tf.reduce_mean(tf.square(model(x, training=True)), axis=[0, 2]) / length
        return tape.jacobian(shares, [variable.value for variable in model.trainable_variables])

    return lambda x: [rows.numpy() for rows in jacobian(x)]


def table_time(rounds):
    """T = 200: once traced, and from nothing, as in a notebook."""
    length = 200
    model, trainer, batch = make(length)
    x = tf.constant(batch[0])
    passes, tape = Passes(trainer._engine, batch, Request(trainer._engine.trainable_variables)), by_tape(model, length)
    norms = Passes(trainer._engine, batch, Request([], norms=True))
    contestants = {
        "loss_jacobian, traced": lambda: list(passes.run(range(length), 32)),
        "tape.jacobian, traced": lambda: tape(x),
        "credit matrix, traced": lambda: list(norms.run(range(length), 32)),
        "loss_jacobian, whole call": lambda: trainer.loss_jacobian(batch),
        "tape.jacobian, whole call": lambda: by_tape(model, length)(x),
    }
    for name, run in contestants.items():
        if name.endswith(", traced"):
            run()
    times = interleave({name: lambda run=run: timed(run) for name, run in contestants.items()}, rounds)
    rows = []
    for ours, other in [
        ("loss_jacobian, traced", "tape.jacobian, traced"),
        ("loss_jacobian, whole call", "tape.jacobian, whole call"),
        ("loss_jacobian, whole call", "tape.jacobian, traced"),
        ("credit matrix, traced", "tape.jacobian, traced"),
    ]:
        median, low, high = ratio(times, other, ours)
        seconds = [f"{statistics.median(times[name]):.2f}" for name in (ours, other)]
        reached = "yes" if median >= 1 else "**no**"
        rows.append([ours, other, *seconds, f"{median:.2f} × faster", f"{low:.2f}–{high:.2f}", "≥ 1 (aim 3)", reached])
    print(table(["ours", "against", "s", "s", "ratio", "spread", "limit", "reached"], rows), flush=True)


def table_memory(rounds):
    """Peak memory of a process over that before the call, tracing and result included."""
    rows = []
    for length, what, limit in MEMORY:
        used = _peak(length, what, limit)
        reached = "yes" if used <= limit else "**no**"
        rows.append([length, what, f"{used:.0f}", f"≤ {limit}", reached])
    for length in (200, 1000):
        used = _peak(length, "tape", 0)
        rows.append([length, "`tape.jacobian`", used if isinstance(used, str) else f"{used:.0f}", "", "printed"])
    print(table(["T", "what", "peak MiB", "limit", "reached"], rows), flush=True)


def _peak(length, what, limit):
    command = [sys.executable, "-m", "benchmarks.jacobian", "--measure", f"{length},{what},{limit}"]
    done = subprocess.run(command, capture_output=True, text=True)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else f"more than {MOST // 2**30} GiB: stopped"


def print_peak(length, what, limit):
    """The growth of this process's peak memory by one call, in MiB."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST, MOST))  # so that the one without a limit does not stop the machine
    model, trainer, batch = make(length)
    model(batch[0][:1])
    before = peak_memory()
    options = {"memory_limit_bytes": limit * 2**20}
    if what == "tape":
        kept = by_tape(model, length)(tf.constant(batch[0]))
    elif what == "credit":
        kept = trainer.credit_matrix(batch, **options)
    else:
        kept = trainer.loss_jacobian(batch, norms_only=what == "norms", **options)
    print(len(kept), peak_memory() - before)


TABLES = {"time": table_time, "memory": table_memory}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", choices=TABLES)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        length, what, limit = arguments.measure.split(",")
        print_peak(int(length), what, int(limit))
        return
    print(machine())
    for name, make_table in TABLES.items():
        if arguments.only in (None, name):
            print(f"\n{make_table.__doc__}\n")
            make_table(arguments.rounds)


if __name__ == "__main__":
    main()
