"""`Trainer.fit` against PyTorch Lightning on the same small models: time per update, interleaved.

python -m benchmarks.peers        (needs `pip install lightning`; says so and ends where it is not installed)

Lightning is PyTorch, with kernels of its own: the ratio says what a user waits, not which loop is leaner. Both log
losses; only Looptape writes files.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

from benchmarks.measure import interleave, machine, row, table
from benchmarks.overhead import looptape, lstm, lstm_data, mlp, mlp_data

ROUNDS = 9


@contextlib.contextmanager
def lightning_process(name):
    """(run(updates) -> seconds, versions) of a process that trains by Lightning."""
    command = [sys.executable, "-m", "benchmarks.lightning_peer", name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, bufsize=1, **pipes) as process:

        def answer(word):
            for line in process.stdout:
                if line.startswith(f"{word} "):
                    return line.removeprefix(f"{word} ").strip()
            raise SystemExit(f"benchmarks.lightning_peer ended with {process.wait()}.")

        def run(updates):
            process.stdin.write(f"{updates}\n")
            return float(answer("seconds"))

        yield run, answer("ready")


def compare(title, name, make_model, dataset, per_call, updates):
    with tempfile.TemporaryDirectory() as workdir, lightning_process(name) as (lightning, versions):
        contestants = {
            "Trainer.fit": looptape(make_model(), dataset.repeat(), per_call, workdir),
            "Lightning": lightning,
        }
        for run in contestants.values():
            run(2 * per_call)
        times = interleave({key: (lambda run=run: run(updates) / updates) for key, run in contestants.items()}, ROUNDS)
    for key, values in times.items():
        print(f"{title}: {key} {1e6 * np.median(values):.0f} µs per update")
    return [title, *row(times, "Trainer.fit", "Lightning", 1.0)], versions


def main():
    if importlib.util.find_spec("lightning") is None:
        print("Skipped: Lightning is not installed. `pip install lightning` to compare with it.")
        return
    first, versions = compare("MLP 32-64-64-1, batch 64", "mlp", mlp, mlp_data(), 100, 300)
    second, _ = compare("LSTM 64, batch 32, T 100", "lstm", lstm, lstm_data(), 25, 50)
    print(machine(), versions)
    print(table(["model", "compared", "ratio", "spread", "limit", "reached"], [first, second]))


if __name__ == "__main__":
    main()
