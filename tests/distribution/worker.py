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

from looptape.experiments.cluster import joining
from tests.distribution import cases


class Slow(keras.callbacks.Callback):
    """Gives a test the time to kill somebody; tells which step is done."""

    remembers = False

    def __init__(self, trainer, seconds, path):
        super().__init__()
        self._trainer, self._seconds, self._path = trainer, seconds, path

    def on_train_batch_end(self, batch, logs=None):
        with open(self._path, "w") as file:
            file.write(str(self._trainer._engine.counters.step))
        time.sleep(self._seconds)


def data_of(case, rank, directory):
    """(what to train on, what to evaluate on)."""
    if case in ("indexed", "other index"):
        seed = rank if case == "other index" else 0
        return cases.by_index(seed=seed), cases.by_index(batch_size=7, shuffle=False)
    if case == "stateful":
        return cases.by_index(batch_size=12, shuffle=False), cases.by_index(batch_size=12, shuffle=False)
    if case == "other example":
        x = cases.X.copy()
        x[20] += rank
        return cases.by_index(x=x), cases.held_out()
    if case == "waiting":
        return cases.hanging(rank, os.path.join(directory, "hangs")), cases.by_index(batch_size=7, shuffle=False)
    if case == "unseeded":
        return cases.unseeded(), cases.held_out()
    if case == "sharded":
        return cases.sharded(), cases.held_out()
    if case == "few":
        return cases.shuffled(batch=2), cases.held_out()
    if case == "ends earlier":
        return cases.ending(10 - 2 * rank), cases.held_out()
    if case == "evaluates fewer":
        return cases.shuffled(), cases.ending(3 - rank)
    if case == "evaluates other":
        return cases.shuffled(), cases.batched(13, cases.X + rank)
    if case == "evaluates other later":
        return cases.shuffled(), cases.batched(13, cases.other_last(rank))
    if case == "evaluates other by index":
        return cases.by_index(), cases.by_index(x=cases.X + rank, shuffle=False)
    data = cases.broken() if case == "nan" else cases.shuffled(seed=4 + rank if case == "other data" else 4)
    return data, cases.held_out()


def main(strategy, case, directory, steps=cases.UPDATES):
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    options = dict(cases.CASES[case])
    if case == "differing" and rank == 1:
        options["cls"] = cases.ByTensorFlow
    trainer = cases.made(strategy, **options)
    data, held_out = data_of(case, rank, directory)
    pause = float(os.environ.get("TEST_PAUSE", 0))
    callbacks = [Slow(trainer, pause, os.path.join(directory, f"step-{rank}"))] if pause else []
    history = trainer.fit(
        data,
        steps=int(steps),
        eval_dataset=held_out,
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
        os.path.join(directory, f"reached-{rank}.npz"),
        step=trainer._engine.counters.step,
        skipped=trainer._engine.counters.skips.total,
        connections=trainer._engine.replica_sums.connected,
        **reached,
    )


if __name__ == "__main__":
    with joining.joined() as everybody:
        main(everybody, *sys.argv[1:])
