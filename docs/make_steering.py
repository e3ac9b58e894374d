"""Makes the table and the pictures of `steering.md` (some minutes on two CPU cores).

    .venv/bin/python -m docs.make_steering

Trains a plain tanh RNN on the temporal order problem as it is and with three cures, and shows the gradient of every
time step over training. The table goes between the markers of the guide.
"""

import dataclasses
import re
import tempfile
import time
from pathlib import Path

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

from looptape import timesteps
from looptape.experiments.temporal_order import Config, build
from looptape.trainer.analysis import plots
from looptape.trainer.summaries import event_writer

DOCS = Path(__file__).resolve().parent
GUIDE = DOCS / "steering.md"
PICTURES = DOCS / "pictures"
CONFIG = Config(probe_every=500, log_every=15_000, eval_every=None, checkpoint_every=None, omega=0)
# name: (what the guide calls it, what changes in the config, actions)
CASES = {
    "plain": ("as it is", {}, []),
    "omega": ("Ω as a loss", {"omega": 4.0}, []),
    "normalize": ("`Normalize()`", {}, [timesteps.Normalize()]),
    "scale": ("`Scale(1.1)`, `ClipNorm(1.0)`", {}, [timesteps.Scale(1.1), timesteps.ClipNorm(1.0)]),
}


def study(name, seed=0):
    """Trains one case: {quantity: (steps, [row, time])}, accuracy, seconds."""
    _, changes, actions = CASES[name]
    config = dataclasses.replace(CONFIG, seed=seed, **changes)
    keras.utils.set_random_seed(seed)
    experiment = build(config, actions)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as workdir:
        fitted = {"steps": config.steps, "log_every": config.log_every, "progress": False}
        experiment.trainer.fit(experiment.dataset, workdir=workdir, **fitted)
        rows = {"state": [], "steered": []}
        for step, value in event_writer.read(Path(workdir) / "train"):
            quantity = value.tag.removeprefix("timestep/rnn/")
            if value.tag.startswith("timestep/rnn/") and quantity in rows:
                rows[quantity].append((step, tf.make_ndarray(value.tensor)))
    accuracy = experiment.trainer.evaluate(experiment.eval_dataset)["accuracy"]
    found = {quantity: tuple(map(np.array, zip(*own, strict=True))) for quantity, own in rows.items() if own}
    return {"rows": found, "accuracy": accuracy, "seconds": time.perf_counter() - started}


def reach(row):
    """The gradient at the first time step over that at the last."""
    return row[0] / row[-1]


def draw(name, found):
    """The gradient that travels back, by time step and over training: after the actions, where there are any."""
    steps, rows = found["rows"].get("steered", found["rows"]["state"])
    figure, axes = plt.subplots(figsize=(4.4, 3.2), layout="constrained")
    plots.over_training(steps, rows, axes)
    axes.set_title(f"{CASES[name][0].replace('`', '')}: accuracy {found['accuracy']:.2f}", fontsize=10)
    figure.savefig(PICTURES / f"steering-{name}.png", dpi=80)
    plt.close(figure)


def table(found):
    lines = ["| network | gradient at the first / at the last time step, start → end | accuracy |", "|---|---|---|"]
    for name, own in found.items():
        _, rows = own["rows"].get("steered", own["rows"]["state"])
        lines.append(f"| {CASES[name][0]} | {reach(rows[0]):.1e} → {reach(rows[-1]):.1e} | {own['accuracy']:.3f} |")
    return "\n".join(lines)


def main():
    found = {}
    for name in CASES:
        found[name] = study(name)
        draw(name, found[name])
        print(f"{name}: accuracy {found[name]['accuracy']:.3f}, {found[name]['seconds']:.0f} s", flush=True)
    text = GUIDE.read_text()
    marked = re.compile(r"(<!-- cures -->\n).*?(<!-- end of cures -->)", re.S)
    GUIDE.write_text(marked.sub(lambda match: f"{match[1]}{table(found)}\n{match[2]}", text))


if __name__ == "__main__":
    main()
