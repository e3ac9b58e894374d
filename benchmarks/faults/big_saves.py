"""Kills in the middle of large saves: whether the run can resume from what is left, and which files remain.

python -m benchmarks.faults.big_saves [kills=14] [megabytes=160]

A process saves after every update. Each time a new save has begun, it is killed by SIGKILL at a random moment of it and
started again. Then the newest checkpoint is damaged, and the start that finds it is timed.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
import warnings

import keras
import tensorflow as tf

from benchmarks import measure
from looptape import Trainer
from looptape.trainer.checkpoints.store import TEMPORARY, Store

_BYTES_PER_WEIGHT = 12  # the weight and Adam's two moments


def train(workdir, megabytes):
    """Goes on with a run that saves after every update, until it is killed."""
    rows = int(float(megabytes) * 1e6 / _BYTES_PER_WEIGHT / 1000)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((rows,)), keras.layers.Dense(1000, use_bias=False), keras.layers.Dense(1)])
    trainer = Trainer(model, keras.optimizers.Adam(1e-3), {"error": keras.losses.MeanSquaredError()})
    data = tf.data.Dataset.from_tensors((tf.ones([2, rows]), tf.ones([2, 1]))).repeat()
    trainer.fit(data, steps=10**6, checkpoint_every=1, workdir=workdir, progress=False)


def begun(directory):
    """The temporary directory of a save that is under way, or None."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return next((name for name in names if name.startswith(TEMPORARY)), None)


def await_save(directory, process, known):
    """Waits until a save begins that is not in `known`."""
    while (name := begun(directory)) is None or name in known:
        if process.poll() is not None:
            raise AssertionError(f"The process ended by itself with {process.returncode}.")
        time.sleep(0.005)
    return name


def kill_while_saving(workdir, megabytes, rng, longest_seconds):
    """One life of the process. Returns the step of the newest whole checkpoint that it left."""
    directory = os.path.join(workdir, "checkpoints")
    stale = set(os.listdir(directory)) if os.path.isdir(directory) else set()
    command = [sys.executable, "-m", "benchmarks.faults.big_saves", "train", workdir, str(megabytes)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        first = await_save(directory, process, stale)
        await_save(directory, process, stale | {first})  # so that every life gets one step further
        time.sleep(rng.uniform(0, longest_seconds))
    finally:
        process.kill()
        process.wait()
    return Store(directory).names()[-1]


def main(kills=14, megabytes=160.0):
    rng = random.Random(0)
    print(measure.machine(), "\n")
    with tempfile.TemporaryDirectory() as workdir:
        directory = os.path.join(workdir, "checkpoints")
        newest, in_a_save = "", 0
        for _ in range(int(kills)):
            reached = kill_while_saving(workdir, float(megabytes), rng, longest_seconds=0.5)
            assert reached > newest, f"The run went back from {newest} to {reached}."
            newest, in_a_save = reached, in_a_save + (begun(directory) is not None)
        store = Store(directory)
        path, _ = store.newest()
        left = [name for name in os.listdir(directory) if name.startswith(".")]
        size = sum(os.path.getsize(os.path.join(path, name)) for name in os.listdir(path)) / 1e6
        data = os.path.join(path, "state.data-00000-of-00001")
        os.truncate(data, os.path.getsize(data) // 2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            seconds = measure.timed(store.newest)
    rows = [
        [f"{kills} × SIGKILL around a save of {size:.0f} MB, {in_a_save} in the middle of it", "restorable each time"],
        ["left in the directory after the next start", f"{len(left)} files"],
        ["newest one cut: the one before found in", f"{seconds:.2f} s, {len(told)} warning"],
    ]
    print(measure.table(["what", "found"], rows))
    return int(bool(left) or seconds >= 1.0 or len(told) != 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
    else:
        sys.exit(main(*sys.argv[1:]))
