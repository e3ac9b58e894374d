"""How much memory long sequences take, each in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import keras, numpy as np
from looptape import Trainer

def peak():  # `ru_maxrss` would begin at the peak of the process that started this one
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))


which, batch, length, features, units = sys.argv[1], *map(int, sys.argv[2:])
layers = keras.Input((length, features), batch_size=batch), keras.layers.LSTM(units), keras.layers.Dense(1)
model = keras.Sequential(list(layers))
x = np.ones((batch, length, features), "float32")
start = peak()
if which == "keras":
    model.compile("adam", "mse")
    model.fit(x, x[:, 0, :1], batch_size=batch, epochs=2, verbose=0)
else:
    memory = None if which == "plain" else which
    trainer = Trainer(model, "adam", {"error": "mse"}, recurrent_memory=memory, steps_per_call=1)
    trainer.fit((x, x[:, 0, :1]), steps=2, batch_size=batch, progress=False)
print(json.dumps(peak() - start))
"""


def growth(which, *sizes):
    """MiB that two updates add to a process."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, which, *map(str, sizes)]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=900).stdout
    return json.loads(printed.splitlines()[-1])


@pytest.mark.long
def test_memory_per_time_step_is_that_of_keras():
    """Compiling takes memory once; what counts is what more time steps add."""
    ours, theirs = ([growth(which, 32, length, 32, 128) for length in (2000, 5000)] for which in ("plain", "keras"))
    assert ours[1] - ours[0] < 1.25 * (theirs[1] - theirs[0])


@pytest.mark.long
def test_a_hundred_thousand_time_steps():
    assert growth("sqrt", 8, 100_000, 16, 64) < 1500


@pytest.mark.long
def test_few_states_take_little_memory():
    """In one loop over stretches, so that the program does not grow with their number. Includes copies of the data."""
    assert growth("sqrt", 32, 10_000, 32, 128) < 0.3 * growth("keras", 32, 10_000, 32, 128)
