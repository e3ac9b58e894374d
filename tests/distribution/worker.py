"""One process of a cluster, for the tests: trains a small model and leaves what it reached in a file.

python -m tests.distribution.worker <case> <directory> [<steps>], with TF_CONFIG set
"""

import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras
import numpy as np

from experiments import joining
from tests.distribution import cases


class Slow(keras.callbacks.Callback):
    """Gives a test the time to kill somebody; tells which step is done."""

    remembers = False

    def __init__(self, trainer, seconds, path):
        super().__init__()
        self._trainer, self._seconds, self._path = trainer, seconds, path

    def on_train_batch_end(self, batch, logs=None):
        with open(self._path, "w") as file:
            file.write(str(self._trainer.host_step))
        time.sleep(self._seconds)


def main(strategy, case, directory, steps=cases.UPDATES):
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    options = dict(cases.CASES[case])
    trainer = cases.made(strategy, **options)
    data = cases.broken() if case == "nan" else cases.shuffled(seed=4 + rank if case == "other data" else 4)
    pause = float(os.environ.get("TEST_PAUSE", 0))
    callbacks = [Slow(trainer, pause, os.path.join(directory, f"step-{rank}"))] if pause else []
    history = trainer.fit(
        data,
        steps=int(steps),
        eval_dataset=cases.held_out(),
        eval_every=20,
        log_every=10,
        checkpoint_every=7,
        workdir=os.path.join(directory, "run"),
        callbacks=callbacks,
        progress=False,
    ).history
    reached = {f"weight{i}": v.numpy() for i, v in enumerate(trainer.model.variables)}
    reached |= {f"optimizer{i}": v.numpy() for i, v in enumerate(trainer.optimizer.variables)}
    reached |= {f"history/{name}": np.array(values) for name, values in history.items()}
    np.savez(
        os.path.join(directory, f"reached-{rank}.npz"), step=trainer.host_step, skipped=trainer.calls.skipped, **reached
    )


if __name__ == "__main__":
    with joining.joined() as everybody:
        main(everybody, *sys.argv[1:])
