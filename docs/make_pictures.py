"""Makes the pictures of the README and the guides from a real run.

    make demo && .venv/bin/python docs/make_pictures.py runs/demo

`heatmap.png` is the newest heat map as TensorBoard's image tab shows it; `gradient-flow.png` is the Gradient Flow tab
in headless Chromium (left out with a word where Chromium is not installed).
"""

import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from tensorboard.compat.proto import event_pb2

PICTURES = Path(__file__).resolve().parent / "pictures"
BROWSER_OPTIONS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,800",
    "--virtual-time-budget=15000",
]


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


def screenshot(workdir, path):
    """A picture of the Gradient Flow tab."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"{path.name} is left out: Chromium is not installed.")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).with_name("tensorboard"), "--logdir", workdir, "--port", str(port)]
    with tempfile.TemporaryDirectory() as profile, subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            address = f"http://127.0.0.1:{port}/"
            wait_for(address)
            options = [*BROWSER_OPTIONS, f"--user-data-dir={profile}", f"--screenshot={path}"]
            subprocess.run(
                [browser, *options, address + "#gradient_flow"], check=True, capture_output=True, timeout=120
            )
        finally:
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
    screenshot(sys.argv[1], PICTURES / "gradient-flow.png")
