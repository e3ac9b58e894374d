"""Starting a real TensorBoard for tests, as its own process, and asking it over HTTP."""

import contextlib
import gzip
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).parents[2]
START_SECS = 60

# The command `tensorboard`, with tensorflow as good as not installed: a case to serve, and quick.
COMMAND = "import sys; sys.modules['tensorflow'] = None; from tensorboard.main import run_main; run_main()"


class Board:
    """A running TensorBoard. `url` ends with a slash and includes the path prefix."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log

    def get(self, route, **query):
        """Returns (status, headers, body), gunzipped. `route` is relative to the plugin's routes."""
        url = f"{self.url}data/plugin/gradient_flow/{route}"
        if query:
            url += "?" + urllib.parse.urlencode(query)
        request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                status, headers, body = answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, headers, body = error.code, error.headers, error.read()
        if headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        return status, headers, body

    def tags(self):
        return json.loads(self.get("tags")[2])

    def wait_for_tag(self, run, tag, step, secs=30):
        """Waits until the loader has read `tag` up to `step`."""
        self.wait(
            lambda: any(
                series["tag"] == tag and series["version"].startswith(f"{step}/")
                for series in self.tags()["runs"].get(run, ())
            ),
            f"{run}: {tag} at step {step}",
            secs,
        )

    def wait(self, condition, what, secs=30):
        end = time.monotonic() + secs
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"{what} did not come within {secs} s. TensorBoard said:\n{self.log()}")
            time.sleep(0.1)


@contextlib.contextmanager
def tensorboard(logdir, scratch, *flags, path_prefix=""):
    """Runs TensorBoard on `logdir`; everything it needs to be stopped and cleaned up lives in this block."""
    log_path = pathlib.Path(scratch) / f"tensorboard-{time.monotonic_ns()}.log"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *entry_point(scratch)]), PYTHONUNBUFFERED="1")
    prefix = ["--path_prefix", path_prefix] if path_prefix else []
    arguments = ["--logdir", str(logdir), "--port", "0", "--reload_interval", "1", *prefix, *flags]
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=scratch,
        )
    try:
        yield Board(process, wait_for_url(process, log_path), lambda: log_path.read_text(errors="replace"))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def wait_for_url(process, log_path):
    end = time.monotonic() + START_SECS
    while time.monotonic() < end:
        text = log_path.read_text(errors="replace")
        found = re.search(r"TensorBoard \S+ at (http://\S+)", text)
        if found:
            return found.group(1).rstrip("/") + "/"
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"TensorBoard did not start (return code {process.poll()}):\n{text}")


def entry_point(scratch):
    """Returns folders for PYTHONPATH that make the plugin known where the project is not installed."""
    known = importlib.metadata.entry_points(group="tensorboard_plugins")
    if any(point.name == "gradient_flow" for point in known):
        return []
    folder = pathlib.Path(scratch) / "installed" / "looptape-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: looptape\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(
        "[tensorboard_plugins]\ngradient_flow = looptape.dashboard.plugin:GradientFlowLoader\n"
    )
    return [str(folder.parent)]
