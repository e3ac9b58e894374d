"""`Trainer.fit` beside Keras, Orbit, bare PyTorch and Lightning on the same small models: time per update, interleaved.

    python -m venv torchenv && torchenv/bin/pip install torch lightning          # what is missing is left out
    pip install tf-keras && pip install --no-deps tf-models-official             # Orbit
    LOOPTAPE_TORCH=torchenv/bin/python python -m benchmarks.peers

Every contestant has two threads. Keras runs with its default settings and with as many updates per call as Looptape.
Orbit's packages ask for other versions of TensorFlow, hence `--no-deps`; it runs the same Keras 3 model. PyTorch and
Lightning run in processes of their own, without logging. Looptape and Orbit write event files. PyTorch has other
kernels: that ratio says what a user waits, not which loop is leaner.
"""

import contextlib
import importlib.util
import os
import statistics
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

from benchmarks.measure import another_process, interleave, machine, table
from benchmarks.overhead import keras_fit, looptape, lstm, lstm_data, mlp, mlp_data

ROUNDS = 9
THREADS = 2
PEER = os.path.join(os.path.dirname(__file__), "torch_models.py")


def cnn():
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


def cnn_data():
    x = np.random.default_rng(0).normal(size=(640, 28, 28, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, 0, 0])).batch(32, drop_remainder=True).cache()


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


def compare(title, name, make_model, dataset, per_call, updates):
    """Rows of the table, one for each peer that is installed."""
    dataset = dataset.repeat()
    interpreter = os.environ.get("LOOPTAPE_TORCH")
    with tempfile.TemporaryDirectory() as workdir, contextlib.ExitStack() as stack:
        contestants = {
            "Trainer.fit": looptape(make_model(), dataset, per_call, os.path.join(workdir, "ours")),
            "Keras fit": keras_fit(make_model(), dataset),
            f"Keras fit(steps_per_execution={per_call})": keras_fit(make_model(), dataset, per_call),
        }
        if importlib.util.find_spec("orbit"):
            contestants["Orbit"] = orbit_loop(make_model(), dataset, per_call, os.path.join(workdir, "orbit"))
        for peer in ("PyTorch", "Lightning") if interpreter else ():
            command = [interpreter, PEER, peer, name, str(THREADS)]
            contestants[peer] = stack.enter_context(another_process(command))
        for run in contestants.values():
            run(2 * per_call)
        times = interleave({key: (lambda run=run: run(updates) / updates) for key, run in contestants.items()}, ROUNDS)
    return [compared(title, times, peer) for peer in list(contestants)[1:]]


def compared(title, times, peer):
    """A row: both times, the median of the paired ratios and its quartiles. Whoever is faster."""
    ratios = [a / b for a, b in zip(times["Trainer.fit"], times[peer], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    ours, theirs = (1e6 * statistics.median(times[key]) for key in ("Trainer.fit", peer))
    return [title, peer, f"{ours:,.0f}", f"{theirs:,.0f}", f"{median:.2f}", f"{low:.2f}–{high:.2f}"]


def main():
    tf.config.threading.set_inter_op_parallelism_threads(THREADS)
    tf.config.threading.set_intra_op_parallelism_threads(THREADS)
    if not os.environ.get("LOOPTAPE_TORCH"):
        print("Without PyTorch and Lightning: name an interpreter that has them, see the docstring.")
    rows = compare("MLP 32-64-64-1, batch 64", "mlp", mlp, mlp_data(), 100, 400)
    rows += compare("CNN, 2 layers, batch 32 of 28 × 28", "cnn", cnn, cnn_data(), 20, 100)
    rows += compare("LSTM 64, batch 32, T 100", "lstm", lstm, lstm_data(), 25, 100)
    print(machine())
    print(table(["model", "peer", "Trainer.fit, µs", "peer, µs", "ours / peer", "quartiles"], rows))


if __name__ == "__main__":
    main()
