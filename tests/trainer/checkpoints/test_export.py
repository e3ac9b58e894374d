"""What a finished run leaves behind: also after a kill before the export, and where the disk is full."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from looptape import Trainer
from looptape.trainer.checkpoints import export
from tests.reliability.tools import REPOSITORY, Killed
from tests.trainer.tools import dataset, linear_model, mse, regression

X, Y = regression(24)
FILES = ("model.weights.h5", "model.keras", "averaged.weights.h5")


def fit(workdir, steps=4):
    trainer = Trainer(linear_model(), keras.optimizers.SGD(0.1), {"error": mse()}, ema_decay=0.5)
    trainer.fit(dataset(X, Y, batch=4).repeat(), steps=steps, workdir=workdir, progress=False)
    return trainer


def test_a_run_that_was_killed_before_the_export_is_exported_by_the_next_start(tmp_path, monkeypatch):
    def dies(*_):
        raise Killed

    for steps in (4, 6):  # at 6 there are the files of step 4
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(export, "export", dies)
            fit(tmp_path, steps)
        trainer = fit(tmp_path, steps)
        assert all(os.path.exists(tmp_path / name) for name in FILES)
        loaded = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_array_equal(loaded.get_weights()[0], trainer.model.get_weights()[0])
        times = [os.stat(tmp_path / name).st_mtime_ns for name in FILES]
        fit(tmp_path, steps)
        assert times == [os.stat(tmp_path / name).st_mtime_ns for name in FILES], "nothing was due"


FULL_DISK = """
import os, sys, warnings
import keras, numpy as np, tensorflow as tf
from looptape import Trainer

workdir = sys.argv[1]

def fit(steps):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((60,)), keras.layers.Dense(900), keras.layers.Dense(1)])
    trainer = Trainer(model, "sgd", {"error": "mse"})
    data = tf.data.Dataset.from_tensors((tf.ones([4, 60]), tf.ones([4, 1]))).repeat()
    options = {"checkpoint_every": 2, "log_every": 1, "keep_checkpoints": 1, "progress": False}
    trainer.fit(data, steps=steps, workdir=workdir, eval_dataset=data.take(1), eval_every=2, **options)
    return trainer

fit(3)
for name in ("model.keras", "model.weights.h5", "best.weights.h5"):
    os.remove(os.path.join(workdir, name))
file = os.open(os.path.join(workdir, "filler"), os.O_CREAT | os.O_WRONLY)
try:
    while True:
        os.write(file, bytes(4096))
except OSError:
    os.close(file)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer = fit(7)
print("step", int(trainer.step))
for warning in caught:
    if warning.category is UserWarning:
        print("warned:", warning.message)
print("left", sorted(name for name in os.listdir(workdir) if "writing" in name))
"""


def test_a_resume_on_a_full_disk_says_what_it_cannot_write_and_ends_in_order(tmp_path):
    """A tmpfs in a mount namespace of its own: HDF5 that meets a full disk would end the process by a signal."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    script = f'mount -t tmpfs -o size=3m tmpfs "{tmp_path}" && exec "{sys.executable}" -c "$0" "{tmp_path}"'
    environment = {**os.environ, "PYTHONPATH": REPOSITORY}
    command = ["unshare", "--mount", "sh", "-c", script, FULL_DISK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 7" in done.stdout and "left []" in done.stdout, done.stdout
    for name in ("model.weights.h5", "model.keras"):
        assert f"warned: {name} could not be written: [Errno 28] no room for its" in done.stdout, done.stdout
    assert "warned: The checkpoint of step 4 could not be written" in done.stdout
