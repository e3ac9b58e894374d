"""Memory over 20,000 updates with rows in TensorBoard, evaluations and checkpoints; and how often the update is traced.

python -m benchmarks.faults.growth [updates=20000]
"""

import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

from benchmarks import measure
from looptape import Trainer

FIRST, EVERY, LIMIT_MB = 1500, 1000, 5.0  # halfway between two checkpoints, whose buffers come and go


def resident():
    """Megabytes of this process that are in memory."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


class Counted(Trainer):
    """Counts how often the losses are traced in training."""

    traces = 0

    def compute_losses(self, batch, training):
        self.traces += training
        x, y = batch
        return {"error": tf.square(self.model(x, training=training) - y)[:, 0]}


def main(updates=20_000):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((20, 4)), keras.layers.GRU(8), keras.layers.Dense(1)])
    trainer = Counted(model, keras.optimizers.Adam(1e-3), probe_every=100)
    x = np.random.default_rng(0).normal(size=(256, 20, 4)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, 0, :1])).shuffle(256, seed=1).repeat().batch(8)
    marks = {}

    class Marks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            step = trainer._engine.counters.step
            if step >= FIRST and (step - FIRST) % EVERY < 10:
                marks.setdefault((step - FIRST) // EVERY, (resident(), trainer.traces))

    with tempfile.TemporaryDirectory() as workdir:
        trainer.fit(
            data,
            steps=int(updates),
            log_every=10,
            eval_dataset=data.take(4),
            eval_every=1000,
            checkpoint_every=1000,
            workdir=workdir,
            callbacks=[Marks()],
            progress=False,
        )
    megabytes, traces = zip(*marks.values(), strict=True)
    growth, traced = megabytes[-1] - megabytes[0], traces[-1] - traces[0]
    print(measure.machine(), "\n")
    print(f"MB after {FIRST} updates and every {EVERY} more:", *(f"{value:.0f}" for value in megabytes), "\n")
    last = FIRST + EVERY * (len(megabytes) - 1)
    rows = [
        [f"growth from {FIRST} to {last} updates", f"{growth:+.1f} MB", f"≤ {LIMIT_MB:.0f} MB"],
        ["traces of the update in that time", traced, "0"],
        ["traces in all (one with and one without probes)", traces[-1], ""],
    ]
    print(measure.table(["what", "found", "limit"], rows))
    return int(growth > LIMIT_MB or traced > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
