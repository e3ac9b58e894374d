"""Makes the pictures of the README and of the guides to time steps and to the dashboard, from real runs.

    make demo && .venv/bin/python docs/make_pictures.py runs/demo

`heatmap.png` is the newest heat map as TensorBoard's image tab shows it; `gradient-flow.png` is the Gradient Flow tab
in headless Chromium (left out with a word where Chromium is not installed). `flow-*.png` show three small recurrent
networks that are trained here for it, in about two minutes: one whose gradients vanish, a healthy one, and one whose
gradients explode. `flow-shares.png` and `flow-credit.png` show two runs of the experiment `echo`.
"""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

from tensorboard.compat.proto import event_pb2

PICTURES = Path(__file__).resolve().parent / "pictures"
BROWSER_OPTIONS = ("headless=new", "no-sandbox", "disable-gpu", "no-first-run", "force-device-scale-factor=1")


def newest_heatmap(workdir):
    """The PNG of the last heat map in a run's event files."""
    import tensorflow as tf

    found = None
    for path in sorted(Path(workdir, "train").glob("events*")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            for value in event_pb2.Event.FromString(record).summary.value:
                if value.tag.endswith("/heatmap"):
                    found = tf.make_ndarray(value.tensor)[2]
    if found is None:
        raise SystemExit(f"There is no heat map in {workdir}. Train with --probe_every=20 first.")
    return found


def train_three(logdir, length=60, steps=400):
    """Three networks on the adding problem that differ in their recurrent cell only."""
    import keras

    from looptape import Trainer
    from looptape.experiments.adding_problem import Config, data

    layers = {
        "vanishing": keras.layers.SimpleRNN(32, recurrent_initializer=keras.initializers.Orthogonal(0.7), name="rnn"),
        "healthy": keras.layers.GRU(32, name="rnn"),
        "exploding": keras.layers.SimpleRNN(
            32, None, recurrent_initializer=keras.initializers.Identity(1.1), name="rnn"
        ),
    }
    for name, layer in layers.items():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((length, 2)), layer, keras.layers.Dense(1)])
        loss = keras.losses.MeanSquaredError()
        options = {"clip_norm": 1.0, "probe_every": 5, "health_every": 10}
        trainer = Trainer(model, keras.optimizers.Adam(0.01), {"error": loss}, **options)
        dataset, held_out = data(Config(length=length, batch_size=32, eval_examples=500))
        trainer.fit(dataset, steps=steps, eval_dataset=held_out, eval_every=steps, workdir=logdir / name, log_every=5)


def train_echo(logdir):
    """A GRU and a plain RNN on `echo`, with the experiment's own flags."""
    from looptape import launch
    from looptape.experiments import echo

    for cell in ("gru", "rnn"):
        launch.run(echo.Config(cell=cell, workdir=str(logdir / cell)), echo.build, name="echo", show=False)


# The views that the guide shows: file → what a deep link says.
THREE = ["exploding/train", "healthy/train", "vanishing/train"]
VIEWS = {
    "flow-health.png": {"page": "health", "runs": THREE},
    "flow-states.png": {"page": "flow", "runs": THREE, "quantity": "state", "mode": "relative"},
    "flow-gain.png": {"page": "flow", "runs": THREE, "quantity": "gain", "mode": "absolute", "pinned": 5},
    "flow-difference.png": {"page": "flow", "runs": THREE, "mode": "difference", "baseline": "healthy/train"},
}
ECHO = {
    "flow-shares.png": {"page": "flow", "mode": "relative", "panel": "shares", "step": 20},
    "flow-credit.png": {"page": "flow", "mode": "relative", "panel": "credit"},
}


def screenshots(logdir, views, size=(1280, 940)):
    """Pictures of the Gradient Flow tab; {file: view, as a deep link names it, or None}. `size` is of the window."""
    try:
        from selenium import webdriver
    except ImportError:
        webdriver = None
    driver = shutil.which("chromedriver")
    if webdriver is None or driver is None:
        print(f"{', '.join(views)} are left out: selenium, Chromium or its driver is not installed.")
        return
    options = webdriver.ChromeOptions()
    for option in (*BROWSER_OPTIONS, f"window-size={size[0]},{size[1]}"):
        options.add_argument(f"--{option}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).with_name("tensorboard"), "--logdir", str(logdir), "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            address = f"http://127.0.0.1:{port}/"
            wait_for(address)
            for name, view in views.items():
                link = "" if view is None else "&p.gradient_flow.view=" + urllib.parse.quote(json.dumps(view), safe="")
                browser.get("about:blank")
                browser.get(f"{address}#gradient_flow{link}")
                time.sleep(6)  # reads, draws, settles
                browser.save_screenshot(str(PICTURES / name))
        finally:
            browser.quit()
            server.terminate()


def wait_for(address, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address, timeout=2):
                time.sleep(3)  # the loader reads the run
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"TensorBoard did not answer within {seconds} s.")


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "heatmap.png").write_bytes(newest_heatmap(sys.argv[1]))
    screenshots(sys.argv[1], {"gradient-flow.png": {"page": "flow", "mode": "relative"}})
    with tempfile.TemporaryDirectory() as logdir:
        train_three(Path(logdir))
        screenshots(logdir, VIEWS)
    with tempfile.TemporaryDirectory() as logdir:
        train_echo(Path(logdir))
        screenshots(logdir, ECHO)
