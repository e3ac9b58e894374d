"""`Trainer.fit` against Orbit and PyTorch Lightning on the same small models: time per update, interleaved.

    pip install lightning tf-keras && pip install --no-deps tf-models-official    # what is missing is left out
    python -m benchmarks.peers

Orbit's packages ask for other versions of TensorFlow, hence `--no-deps`; it runs a Keras 3 model, as we do here, with
the same number of updates per call, Keras's Adam, and its own summaries. Lightning is PyTorch, with kernels of its own:
that ratio says what a user waits, not which loop is leaner. Ours and Orbit's write event files, Lightning writes none.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.measure import interleave, machine, row, table
from benchmarks.overhead import looptape, lstm, lstm_data, mlp, mlp_data

ROUNDS = 6


def installed(name):
    return importlib.util.find_spec(name) is not None


def orbit_loop(model, dataset, per_call, workdir):
    """run(updates) -> seconds: an `orbit.Controller` around a `StandardTrainer`, the loop in the graph."""
    import orbit

    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    step = orbit.utils.create_global_step()
    error = keras.metrics.Mean()

    class Loop(orbit.StandardTrainer):
        def train_loop_begin(self):
            error.reset_state()

        def train_step(self, iterator):
            x, y = next(iterator)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            error.update_state(loss)
            step.assign_add(1)

        def train_loop_end(self):
            return {"error": error.result()}

    controller = orbit.Controller(
        trainer=Loop(dataset),
        global_step=step,
        steps_per_loop=per_call,
        summary_interval=per_call,
        summary_dir=workdir,
    )

    def run(updates):
        start = time.perf_counter()
        with contextlib.redirect_stdout(None):  # a line per call
            controller.train(steps=int(step.numpy()) + updates, checkpoint_at_completion=False)
        return time.perf_counter() - start

    return run


@contextlib.contextmanager
def lightning_process(name):
    """run(updates) -> seconds in a process that trains by Lightning."""
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

        print(answer("ready"))
        yield run


def compare(title, name, make_model, dataset, per_call, updates):
    """Rows of the table, one for each peer that is installed."""
    dataset = dataset.repeat()
    with tempfile.TemporaryDirectory() as workdir, contextlib.ExitStack() as stack:
        contestants = {"Trainer.fit": looptape(make_model(), dataset, per_call, os.path.join(workdir, "ours"))}
        if installed("orbit"):
            contestants["Orbit"] = orbit_loop(make_model(), dataset, per_call, os.path.join(workdir, "orbit"))
        if installed("lightning"):
            contestants["Lightning"] = stack.enter_context(lightning_process(name))
        for run in contestants.values():
            run(2 * per_call)
        times = interleave({key: (lambda run=run: run(updates) / updates) for key, run in contestants.items()}, ROUNDS)
    for key, values in times.items():
        print(f"{title}: {key} {1e6 * np.median(values):.0f} µs per update")
    return [[title, *row(times, "Trainer.fit", peer, 1.0)] for peer in list(contestants)[1:]]


def main():
    if not installed("orbit") and not installed("lightning"):
        print("Skipped: neither Orbit nor Lightning is installed; see the docstring for how to get them.")
        return
    rows = compare("MLP 32-64-64-1, batch 64", "mlp", mlp, mlp_data(), 100, 300)
    rows += compare("LSTM 64, batch 32, T 100", "lstm", lstm, lstm_data(), 25, 50)
    print(machine())
    print(table(["model", "compared", "ratio", "spread", "limit", "reached"], rows))


if __name__ == "__main__":
    main()
