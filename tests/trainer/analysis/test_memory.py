"""A long run with summaries keeps its memory: no tape, no event, no trace is left behind."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import gc
import sys
import keras
from tests.trainer.tools import dataset, dense_model, mse, regression
from looptape import Trainer

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

x, y = regression(64)
data = dataset(x, y, batch=8).cache().repeat()
metrics = [keras.metrics.MeanAbsoluteError()]
trainer = Trainer(dense_model(), keras.optimizers.Adam(1e-3), {"error": mse()}, metrics=metrics)
sizes = []
for steps in (2000, 8000, 14000, 20000):
    trainer.fit(data, steps=steps, log_every=10, workdir=sys.argv[1], progress=False)
    sizes.append(resident())
print(trainer._engine.calls.traces, *sizes)
"""


def test_twenty_thousand_updates_stay_flat(tmp_path):
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    traces, *sizes = map(float, run.stdout.split())
    assert traces == 1
    # What is left behind grows in each third; an allocator or a thread that asks for memory late does so once.
    growth = [after - before for before, after in zip(sizes[:-1], sizes[1:], strict=True)]
    assert min(growth) <= 1.5, f"MiB after 2,000, 8,000, 14,000 and 20,000 updates: {sizes}"
