"""The dashboard's figures: how fast, how small. Prints a Markdown table; takes about four minutes.

    python -m benchmarks.dashboard

Four heat maps (two runs of two layers) of 10,000 rows of 200 time steps are opened in headless Chromium under
a real TensorBoard, once with every row kept and once with the default of 1,000. Times are from the click on
the tab to the last card of run health drawn, and from the click on "Time steps" to the last heat map, added
up, by the browser's own clock; "first" is the first click after TensorBoard started, "again" a second one in a
fresh browser, answered from the server's cache. Then 30 runs of 6 layers with 1,000 rows of 100 time steps: the
first view, which shows the newest four runs, and a change of the filter. Needs chromium, chromedriver and
selenium.
"""

import contextlib
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

import numpy as np

from benchmarks import measure

ROWS, TIME, LAYERS, RUNS = 10_000, 200, ("encoder", "decoder"), ("first", "second")
MANY = {"rows": 1000, "time_steps": 100, "layers": tuple(f"layer{i}" for i in range(6)), "runs": 30}
STARTS, TRIES = 7, 3
ROOT = pathlib.Path(__file__).parent.parent

CHROMIUM_FLAGS = [
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "window-size=1280,900",
]

# Without tensorflow: the seconds that its import takes would hide everything else.
SERVER = """
import sys
sys.modules["tensorflow"] = None
sys.path.insert(0, {root!r})
from tensorboard import default, program
plugins = default.get_static_plugins()
if {plugin}:
    from looptape.dashboard.plugin import GradientFlowLoader
    plugins.append(GradientFlowLoader())
board = program.TensorBoard(plugins=plugins)
board.configure(argv=["tensorboard", *sys.argv[1:]])
sys.exit(board.main())
"""


def write_runs(logdir, runs=RUNS, layers=LAYERS, rows=ROWS, time_steps=TIME):
    import tensorflow as tf
    from tensorboard.compat.proto import event_pb2, summary_pb2

    from looptape.dashboard import metadata

    noise = np.random.default_rng(0)
    back = np.arange(time_steps)[::-1]
    for run in runs:
        (logdir / run).mkdir(parents=True)
        with tf.io.TFRecordWriter(str(logdir / run / "events.out.tfevents.1.benchmark")) as writer:
            writer.write(event_pb2.Event(file_version="brain.Event:2").SerializeToString())
            for row in range(rows):
                values = [
                    summary_pb2.Summary.Value(tag=tag, simple_value=1 / (row + 1))
                    for tag in ("loss/total", "throughput/examples_per_second")
                ]
                for layer in layers:
                    state = 10 ** (-0.02 * back + 0.1 * noise.standard_normal(time_steps))
                    values.append(metadata.vector_summary(layer, "state", state))
                    values.append(metadata.rows_summary(layer, row + 1))
                event = event_pb2.Event(
                    step=10 * (row + 1), wall_time=1e9 + row, summary=summary_pb2.Summary(value=values)
                )
                writer.write(event.SerializeToString())


@contextlib.contextmanager
def tensorboard(logdir, *flags, plugin=True):
    """Starts a TensorBoard; gives (process, address, seconds until it answered)."""
    program = SERVER.format(root=str(ROOT), plugin=plugin)
    port = free_port()
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", program, "--logdir", str(logdir), "--port", str(port), *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://localhost:{port}/"
    try:
        while True:
            try:
                urllib.request.urlopen(address + "data/environment", timeout=5).read()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() - begun > 60:
                    raise RuntimeError("TensorBoard did not start.") from None
                time.sleep(0.01)
        yield process, address, time.monotonic() - begun
    finally:
        process.terminate()
        process.wait(20)


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def resident_bytes(process):
    """Memory of TensorBoard and of its data server together."""
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    total = 0
    for pid in [process.pid, *children]:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        total += int(status.split("VmRSS:")[1].split()[0]) * 1024
    return total


def wait_until_loaded(address, series=4, rows=ROWS):
    """Waits until the data server has read every event of all runs."""
    wanted = str(10 * rows)
    for _ in range(1200):
        text = urllib.request.urlopen(address + "data/plugin/gradient_flow/tags").read().decode()
        if text.count(f'"version": "{wanted}/') == series:
            time.sleep(2)
            return
        time.sleep(0.1)
    raise RuntimeError("The data server did not read the runs.")


# Sets a filter that four runs pass; answers when it is drawn.
FILTER = """
const done = arguments[arguments.length - 1];
const input = document.querySelector('.sidebar input[type=search]');
const begun = performance.now();
input.value = 'run0[0-3]';
input.dispatchEvent(new Event('input'));
requestAnimationFrame(() => setTimeout(() => done(
  [performance.now() - begun, [...document.querySelectorAll('.runs tbody tr')].filter((row) => !row.hidden).length])));
"""


def open_tab_secs(address, tiles=4, filtered=False):
    """Opens TensorBoard, waits until it is idle, clicks the tab, then its page of time steps.

    Returns seconds to the last heat map; with `filtered` (those, seconds of a change of the filter).
    """
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    for flag in CHROMIUM_FLAGS:
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={profile.name}")
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        browser.get(address + "#scalars")
        wait = WebDriverWait(browser, 30, 0.1)
        tab = wait.until(
            lambda b: [t for t in b.find_elements(By.CSS_SELECTOR, "[role=tab]") if "GRADIENT" in t.text.upper()]
        )[0]
        time.sleep(4)
        browser.execute_script(
            "document.addEventListener('mousedown', () => {"
            " window.clicked = performance.timeOrigin + performance.now() }, true)"
        )
        tab.click()
        frame = wait.until(lambda b: b.find_elements(By.CSS_SELECTOR, "iframe"))[0]
        clicked = browser.execute_script("return window.clicked")
        browser.switch_to.frame(frame)
        read = (
            "return performance.getEntriesByName(arguments[0]).map((mark) => performance.timeOrigin + mark.startTime)"
        )
        healthy = wait.until(lambda b: b.execute_script(read, "gradient_flow.health"))[0]
        again = browser.execute_script(
            "const now = performance.timeOrigin + performance.now();"
            "document.querySelector('.toolbar [data-value=flow]').click(); return now"
        )
        drawn = wait.until(lambda b: b.execute_script(read, "gradient_flow.drawn"))[0]
        assert browser.execute_script("return document.querySelector('.app').dataset.drawn") == str(tiles)
        secs = (healthy - clicked + drawn - again) / 1000
        if not filtered:
            return secs
        milliseconds, shown = browser.execute_async_script(FILTER)
        assert shown == 4, shown
        return secs, milliseconds / 1000
    finally:
        browser.quit()
        profile.cleanup()


def answer_bytes(address):
    sizes = []
    for run in RUNS:
        for layer in LAYERS:
            query = urllib.parse.urlencode({"run": run, "tag": f"timestep/{layer}/state"})
            request = urllib.request.Request(
                f"{address}data/plugin/gradient_flow/heatmap?{query}", headers={"Accept-Encoding": "gzip"}
            )
            sizes.append(len(urllib.request.urlopen(request).read()))
    return max(sizes)


def start_up_secs(logdir):
    """Returns the median start-up time without and with the plugin, measured in turn."""
    found = {False: [], True: []}
    for _ in range(STARTS):
        for plugin in (False, True):
            with tensorboard(logdir, plugin=plugin) as (_, _, secs):
                found[plugin].append(secs)
    return statistics.median(found[False]), statistics.median(found[True])


def many_runs(folder):
    """[line] of 30 runs of 6 layers: the first view, and a change of the filter."""
    logdir = folder / "many"
    runs = [f"run{index:02d}" for index in range(MANY["runs"])]
    write_runs(logdir, runs, MANY["layers"], MANY["rows"], MANY["time_steps"])
    found = []
    for _ in range(TRIES):
        with tensorboard(logdir) as (_, address, _):
            wait_until_loaded(address, len(runs) * len(MANY["layers"]), MANY["rows"])
            found.append(open_tab_secs(address, tiles=4 * len(MANY["layers"]), filtered=True))
    first, change = zip(*found, strict=True)
    return [
        ("30 runs of 6 layers, first view", spread(first), "3.0 s"),
        ("30 runs of 6 layers, change of the filter", spread(change), "0.3 s"),
    ]


def spread(secs):
    """The best try, which other work on the machine disturbed least, and the worst."""
    return f"{min(secs):.2f} s (worst of {len(secs)}: {max(secs):.2f})"


def reached(measured, limit):
    """Whether a limit is held; nothing where there is none. Both texts begin with their number."""
    if limit == "–":
        return ""
    return "yes" if float(measured.split()[0]) <= float(limit.split()[0]) else "**no**"


def main():
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        print("Skipped: chromium and chromedriver are not installed; they draw the heat maps.")
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        logdir = pathlib.Path(folder) / "runs"
        write_runs(logdir)
        empty = pathlib.Path(folder) / "empty"
        empty.mkdir()
        with tensorboard(empty) as (process, _, _):
            time.sleep(2)
            base = resident_bytes(process)
        lines = []
        for name, flags, kept, limit in (
            ("every row kept", ("--samples_per_plugin", "gradient_flow=0"), ROWS, 2.0),
            ("1,000 rows kept", (), 1000, 0.6),
        ):
            first, again = [], []
            for _ in range(TRIES):
                with tensorboard(logdir, *flags) as (process, address, _):
                    wait_until_loaded(address)
                    loaded = resident_bytes(process)
                    first.append(open_tab_secs(address))
                    again.append(open_tab_secs(address))
                    size = answer_bytes(address)
                    opened = resident_bytes(process)
            total = kept * len(RUNS) * len(LAYERS)
            lines += [
                (f"four heat maps, {name}, first", spread(first), f"{limit} s"),
                (f"four heat maps, {name}, again", spread(again), f"{limit} s"),
                (f"largest answer, {name}", f"{size / 1e6:.2f} MB", "0.5 MB"),
            ]
            if kept == ROWS:
                lines += [
                    ("memory per kept row", f"{(loaded - base) / total / 1024:.2f} KB", "2.5 KB"),
                    ("memory added by opening the tab", f"{(opened - loaded) / 2**20:.0f} MB", "–"),
                ]
        lines += many_runs(pathlib.Path(folder))
        without, with_plugin = start_up_secs(empty)
        lines.append(
            (
                "start-up, difference of medians",
                f"{with_plugin - without:+.2f} s ({without:.2f} → {with_plugin:.2f})",
                "0.2 s",
            )
        )
    print(measure.table(["figure", "measured", "limit", "reached"], [(*line, reached(*line[1:])) for line in lines]))
    print(f"\n{os.cpu_count()} cores; load average when it began {load:.1f}, when it ended {os.getloadavg()[0]:.1f}.")


if __name__ == "__main__":
    main()
