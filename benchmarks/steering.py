"""Acting on the gradient through time: what an action costs, and what truncated back-propagation saves.

    python -m benchmarks.steering

An action: whole updates of an LSTM (batch 32, 200 time steps, 128 units) with `ClipNorm` against those without.
Truncated: a pass over sequences of 2,000 time steps in windows of a tenth, one update each, against one update on the
whole. Its peak is the growth of the largest resident size of a process of its own, after the update was traced on short
sequences.
"""

import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf

from benchmarks.measure import Clock, interleave, machine, peak_memory, row, table
from looptape import Trainer, timesteps

BATCH, FEATURES, UNITS = 32, 32, 128
SHORT, LONG, SHARE, WARM = 200, 2000, 10, 20


def trainer_of(**options):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.LSTM(UNITS, return_sequences=True), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((None, FEATURES)), *layers])
    return Trainer(model, keras.optimizers.Adam(1e-3), {"error": "mse"}, **options)


def data(time):
    """Endless batches of sequences of so many time steps, whose length the trace does not know."""
    x = tf.random.stateless_normal([BATCH, time, FEATURES], [0, 0])
    lengths = tf.data.Dataset.from_tensors(time).repeat()
    return lengths.map(lambda length: (x[:, :length], x[:, :length, :1]))


def runner(trainer, dataset):
    """run(updates) -> seconds."""

    def run(updates):
        clock = Clock()
        steps = int(trainer.step.numpy()) + updates
        trainer.fit(dataset, steps=steps, progress=False, callbacks=[clock], log_every=10**6)
        return clock.seconds

    return run


def windowed():
    return {"bptt_window": LONG // SHARE, "bptt_updates": True}


def peak(kind):
    """Mebibytes that a pass over long sequences adds to this process."""
    trainer = trainer_of(**(windowed() if kind == "windows" else {}))
    updates = SHARE if kind == "windows" else 1
    runner(trainer, data(WARM))(2)
    dataset = data(LONG)
    before = peak_memory()
    runner(trainer, dataset)(2 * updates)
    return peak_memory() - before


def peak_elsewhere(kind, repeats=3):
    """The median over several processes."""
    command = [sys.executable, "-m", "benchmarks.steering", kind]
    printed = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(repeats)]
    return float(np.median([float(text.split()[-1]) for text in printed]))


def main(rounds=9):
    plain, clip = "no action", "ClipNorm(1.0)"
    short = data(SHORT)
    contestants = {plain: trainer_of(), clip: trainer_of(timestep_actions=[timesteps.ClipNorm(1.0)])}
    runs = {name: runner(trainer, short) for name, trainer in contestants.items()}
    for run in runs.values():
        run(2)
    times = interleave({name: (lambda run=run: run(10)) for name, run in runs.items()}, rounds)
    rows = [row(times, clip, plain, 1.03)]
    long = data(LONG)
    whole, windows = "one whole update", f"{SHARE} windows"
    runs = {whole: runner(trainer_of(), long), windows: runner(trainer_of(**windowed()), long)}
    for run in runs.values():
        run(SHARE)
    each = {whole: lambda: runs[whole](1), windows: lambda: runs[windows](SHARE)}
    rows.append(row(interleave(each, rounds), windows, whole, 1.0))
    peaks = {kind: peak_elsewhere(kind) for kind in ("windows", "whole")}
    share = peaks["windows"] / peaks["whole"]
    spread = f"{peaks['windows']:.0f} / {peaks['whole']:.0f} MiB"
    rows.append(
        [f"peak memory, {windows} / whole", f"{share:.3f}", spread, "≤ 0.2", "yes" if share <= 0.2 else "**no**"]
    )
    print(machine())
    print(table(["compared", "ratio", "spread", "limit", "reached"], rows))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(peak(sys.argv[1]))
    else:
        main()
