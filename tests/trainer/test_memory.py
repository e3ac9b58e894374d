"""A long run with summaries keeps its memory: no tape, no event, no trace is left behind."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import keras
from tests.trainer.tools import dataset, dense_model, mse, regression
from trainer import Trainer

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

x, y = regression(64)
data = dataset(x, y, batch=8).cache().repeat()
metrics = [keras.metrics.MeanAbsoluteError()]
trainer = Trainer(dense_model(), keras.optimizers.Adam(1e-3), {"error": mse()}, metrics=metrics)
trainer.fit(data, steps=1000, log_every=10, workdir=sys.argv[1], progress=False)
before = resident()
trainer.fit(data, steps=20000, log_every=10, workdir=sys.argv[1], progress=False)
print(trainer.calls.traces, resident() - before)
"""


def test_twenty_thousand_updates_stay_flat(tmp_path):
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    traces, growth = run.stdout.split()
    assert int(traces) == 1
    assert float(growth) <= 5.0, "MiB after the first 1,000 updates"
