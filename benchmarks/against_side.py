"""One checkout for `benchmarks.against`: reads numbers of updates, a line each, and answers each with seconds.

Run in the root of the checkout that it measures, whose own names it imports; it uses nothing else of a checkout.
"""

import os
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

if os.path.isdir("looptape"):
    from looptape import Trainer, losses
else:  # before the one name
    import losses
    from trainer import Trainer


class Clock(keras.callbacks.Callback):
    """The time between the first and the last update."""

    def on_train_begin(self, logs=None):
        self.start = time.perf_counter()

    def on_train_end(self, logs=None):
        self.seconds = time.perf_counter() - self.start


def main(kind):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(64, 32)).astype("float32")
    layers = [keras.Input((32,)), *(keras.layers.Dense(64, "relu") for _ in range(2)), keras.layers.Dense(1)]
    options = {"accumulation": {"accumulation_steps": 4}, "two losses, MGDA": {"combiner": losses.MGDA()}}.get(kind, {})
    if kind.startswith("LSTM"):
        x = np.random.default_rng(0).normal(size=(32, 100, 32)).astype("float32")
        layers = [keras.Input((100, 32)), keras.layers.LSTM(64), keras.layers.Dense(1)]
        options = {"probe_every": 1} if kind.endswith("probed") else {}
    named = {"error": keras.losses.MeanSquaredError()}
    if kind.startswith("two"):
        named["size"] = keras.losses.MeanAbsoluteError()
    trainer = Trainer(keras.Sequential(layers), keras.optimizers.Adam(1e-3), named, **options)
    dataset = tf.data.Dataset.from_tensors((x, x.reshape(len(x), -1)[:, :1])).repeat()
    print("ready ", flush=True)
    with tempfile.TemporaryDirectory() as workdir:
        for line in sys.stdin:
            clock, steps = Clock(), int(trainer.step.numpy()) + int(line)
            trainer.fit(dataset, steps=steps, log_every=100, workdir=workdir, callbacks=[clock], progress=False)
            print(f"seconds {clock.seconds}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
