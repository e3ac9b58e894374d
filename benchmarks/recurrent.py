"""Recurrent layers under `Trainer.fit` against PyTorch and Keras: whole updates with Adam, interleaved.

    python -m venv torchenv && torchenv/bin/pip install torch        # for the rows of PyTorch
    LOOPTAPE_TORCH=torchenv/bin/python python -m benchmarks.recurrent [--only lstm gru generic probed memory long mlp]

PyTorch runs in a process of its own (`--torch` or the variable LOOPTAPE_TORCH names its interpreter; without it its
rows are left out), Keras and Looptape share one, all on two threads. A round lets each contestant make a few updates,
in turn; ratios are medians over rounds. Memory is measured in processes of their own.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.measure import (
    RETURN_FREED,
    Clock,
    another_process,
    interleave,
    machine,
    peak_memory,
    ratio,
    resident_memory,
    table,
)
from benchmarks.overhead import hand_written, mlp, mlp_data
from looptape import Trainer

THREADS = 2
PER_CALL = 20
SECONDS = 0.6  # of one contestant in one round
SIZES = [(32, 100, 32, 64), (32, 200, 32, 128), (64, 50, 64, 256), (8, 1600, 16, 16)]
PYTORCH_LIMITS = {"LSTM": (1.35, 1.25, 1.10, 1.10), "GRU": (1.35,) * 4}
HEADER = ["update", "compared", "ratio", "spread", "limit", "reached"]


class MinimalGatedUnit(keras.Layer):
    """Zhou et al. 2016: one gate. No layer of Keras has it, so that no loop can know its equations."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = self.state_size = units

    def build(self, shape):
        for name in ("gate", "candidate"):
            setattr(self, f"{name}_kernel", self.add_weight(shape=(shape[-1], self.units), name=f"{name}_kernel"))
            setattr(
                self, f"{name}_recurrent", self.add_weight(shape=(self.units, self.units), name=f"{name}_recurrent")
            )

    def call(self, inputs, states):
        gate = keras.ops.sigmoid(inputs @ self.gate_kernel + states[0] @ self.gate_recurrent)
        candidate = keras.ops.tanh(inputs @ self.candidate_kernel + (gate * states[0]) @ self.candidate_recurrent)
        hidden = (1 - gate) * states[0] + gate * candidate
        return hidden, [hidden]


def network(layer, batch, length, features):
    return keras.Sequential([keras.Input((length, features), batch_size=batch), layer, keras.layers.Dense(1)])


def data(batch, length, features):
    x = np.random.default_rng(0).normal(size=(batch, length, features)).astype("float32")
    return tf.data.Dataset.from_tensors((x, x[:, 0, :1])).repeat()


def by_trainer(model, dataset, workdir, per_call=PER_CALL, **options):
    """run(updates) -> seconds."""
    trainer = Trainer(model, keras.optimizers.Adam(1e-3), {"error": keras.losses.MeanSquaredError()}, **options)

    def run(updates):
        clock = Clock()
        made = int(trainer.step.numpy())
        settings = {"log_every": per_call, "workdir": workdir, "callbacks": [clock], "progress": False}
        trainer.fit(dataset, steps=made + updates, **settings)
        return clock.seconds

    return run


def by_keras(model, dataset, per_call=PER_CALL, jit_compile=False):
    """run(updates) -> seconds."""
    model.compile(
        keras.optimizers.Adam(1e-3),
        loss="mse",
        steps_per_execution=per_call,
        jit_compile=jit_compile,
        auto_scale_loss=False,
    )

    def run(updates):
        clock = Clock()
        model.fit(dataset, epochs=1, steps_per_epoch=updates, verbose=0, callbacks=[clock])
        return clock.seconds

    return run


def by_pytorch(interpreter, kind, size):
    """run(updates) -> seconds, in a process of its own."""
    script = os.path.join(os.path.dirname(__file__), "torch_peer.py")
    command = [interpreter, script, kind, *map(str, size), str(THREADS)]
    return another_process(command)


def measured(contestants, rounds, per_call=PER_CALL):
    """{name: [seconds per update, …]}, after two calls of each."""
    counts = {}
    for name, run in contestants.items():
        run(per_call)
        each = run(per_call) / per_call
        counts[name] = per_call * max(1, round(SECONDS / each / per_call))
    return interleave({name: (lambda run=run, n=counts[name]: run(n) / n) for name, run in contestants.items()}, rounds)


def row(title, times, name, base, limit):
    median, low, high = ratio(times, name, base)
    both = " / ".join(f"{1e3 * statistics.median(times[key]):.2f}" for key in (name, base))
    reached = "yes" if median <= limit else "**no**"
    return [title, f"{name} / {base}, {both} ms", f"{median:.2f}", f"{low:.2f}–{high:.2f}", f"≤ {limit}", reached]


def cells(kind):
    """A section: the four sizes of a layer."""

    def section(arguments):
        for size, limit in zip(SIZES, PYTORCH_LIMITS[kind], strict=True):
            yield from cell(kind, size, limit, arguments)

    return section


def cell(kind, size, limit, arguments):
    batch, length, features, units = size
    title = f"{kind} B{batch} T{length} F{features} H{units}"
    dataset = data(batch, length, features)
    with contextlib.ExitStack() as stack:
        workdir = stack.enter_context(tempfile.TemporaryDirectory())
        layer = getattr(keras.layers, kind)
        contestants = {
            "Trainer.fit": by_trainer(network(getattr(keras.layers, kind)(units), *size[:3]), dataset, workdir),
            "Keras": by_keras(network(layer(units), *size[:3]), dataset),
            "Keras, XLA": by_keras(network(layer(units, use_cudnn=False), *size[:3]), dataset, jit_compile=True),
        }
        if arguments.torch:
            contestants["PyTorch"] = stack.enter_context(by_pytorch(arguments.torch, kind, size))
        times = measured(contestants, arguments.rounds)
    limits = {"PyTorch": limit, "Keras": 0.92, "Keras, XLA": 0.92}
    return [row(title, times, "Trainer.fit", base, limits[base]) for base in limits if base in contestants]


def generic(arguments):
    """A cell whose equations nobody knows."""
    size = (32, 100, 32, 64)
    dataset = data(*size[:3])
    with tempfile.TemporaryDirectory() as workdir:
        layer = lambda: keras.layers.RNN(MinimalGatedUnit(size[-1]))  # noqa: E731
        contestants = {
            "Trainer.fit": by_trainer(network(layer(), *size[:3]), dataset, workdir),
            "Keras": by_keras(network(layer(), *size[:3]), dataset),
        }
        times = measured(contestants, arguments.rounds)
    yield row("minimal gated unit B32 T100 F32 H64", times, "Trainer.fit", "Keras", 1.0)


def probed(arguments):
    """Every update probed against none."""
    size = (32, 200, 32, 128)
    dataset = data(*size[:3])
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        contestants = {
            "probed": by_trainer(network(keras.layers.LSTM(size[-1]), *size[:3]), dataset, first, probe_every=1),
            "plain": by_trainer(network(keras.layers.LSTM(size[-1]), *size[:3]), dataset, second),
        }
        times = measured(contestants, arguments.rounds)
    yield row("LSTM B32 T200 F32 H128", times, "probed", "plain", 1.10)


def peak(which):
    """Prints mebibytes that an update adds to this process, those with tracing, and the seconds of an update.

    Run in a process of its own. The peak of the first update, which traces and compiles, counts only "with tracing".
    """
    long = which.startswith("long")
    size = (8, 100_000, 16, 64) if long else (32, 10_000, 32, 128)
    dataset = data(*size[:3])
    if which == "Keras":
        run = by_keras(network(keras.layers.LSTM(size[-1]), *size[:3]), dataset, per_call=1)
    else:
        options = {} if which == "plain" else {"recurrent_memory": "sqrt"}
        # Without a work directory: a checkpoint would hold the data, which are one tensor here.
        run = by_trainer(network(keras.layers.LSTM(size[-1]), *size[:3]), dataset, None, 1, **options)
    next(iter(dataset))
    start = resident_memory()
    first = run(1)
    traced = peak_memory() - start
    resident_memory()  # the peak of the next updates alone
    seconds = min(run(1) for _ in range(2 if long else 4))
    print(f"peak {peak_memory() - start} {traced} {seconds} {first}", flush=True)


def peak_elsewhere(which):
    command = [sys.executable, "-m", "benchmarks.recurrent", "--peak", which]
    environment = {**os.environ, **RETURN_FREED}
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    return [float(number) for number in printed.split("peak ")[1].split()[:4]]


def memory(arguments):
    """√T memory: growth of the process against Keras, time against all states kept."""
    found = {which: peak_elsewhere(which) for which in ("sqrt", "plain", "Keras")}
    title = "LSTM B32 T10,000 F32 H128"
    for what, name, base, place, limit, unit in (
        ("peak growth, sqrt / Keras", "sqrt", "Keras", 0, 0.08, "MiB"),
        ("peak growth, plain / Keras", "plain", "Keras", 0, 1.0, "MiB"),
        ("the same with tracing, sqrt / Keras", "sqrt", "Keras", 1, None, "MiB"),
        ("time, sqrt / plain", "sqrt", "plain", 2, 1.4, "s"),
        ("first update with tracing, sqrt / plain", "sqrt", "plain", 3, None, "s"),
    ):
        ours, theirs = found[name][place], found[base][place]
        reached = "" if limit is None else "yes" if ours / theirs <= limit else "**no**"
        stated = "" if limit is None else f"≤ {limit}"
        yield [title, f"{what}, {ours:.4g} / {theirs:.4g} {unit}", f"{ours / theirs:.3f}", "", stated, reached]


def long(arguments):
    """One update over 100,000 time steps."""
    grown, traced, seconds, _ = peak_elsewhere("long")
    reached = "yes" if traced < 1.5 * 1024 else "**no**"
    title = "LSTM B8 T100,000 F16 H64"
    what = f"peak growth, sqrt, {grown:.0f} MiB, with tracing {traced:.0f} MiB, {seconds:.1f} s"
    yield [title, what, "", "", "< 1.5 GB", reached]


def small(arguments):
    """An update that is nothing but overhead."""
    dataset = mlp_data().repeat()
    with tempfile.TemporaryDirectory() as workdir:
        contestants = {
            "Trainer.fit": by_trainer(mlp(), dataset, workdir, 100),
            "bare loop": hand_written(mlp(), dataset, 100, safe=False),
            "Keras": by_keras(mlp(), dataset, 100),
        }
        times = measured(contestants, arguments.rounds, 100)
    for base, limit in (("bare loop", 1.10), ("Keras", 1.0)):
        yield row("MLP 32-64-64-1, batch 64", times, "Trainer.fit", base, limit)


SECTIONS = {"lstm": cells("LSTM"), "gru": cells("GRU"), "generic": generic, "probed": probed, "memory": memory}
SECTIONS |= {"long": long, "mlp": small}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch", default=os.environ.get("LOOPTAPE_TORCH"), help="interpreter that has PyTorch")
    parser.add_argument("--peak", choices=["sqrt", "plain", "Keras", "long"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    if arguments.peak:
        peak(arguments.peak)
        return
    if not arguments.torch:
        print("Without PyTorch: name an interpreter that has it, see the docstring.")
    rows = []
    for name in arguments.only:
        start = time.perf_counter()
        for found in SECTIONS[name](arguments):
            rows.append(found)
            print(*found[:4], flush=True)
        print(f"({name}: {time.perf_counter() - start:.0f} s)", flush=True)
    print(machine())
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
