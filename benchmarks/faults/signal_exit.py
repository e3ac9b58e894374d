"""How long a process takes to end after SIGTERM: the call that runs, a checkpoint, the end of Python.

python -m benchmarks.faults.signal_exit [times=10]

The adding problem, with nothing due but calls of half a second. Each time a process of its own gets the signal at a
random moment of a call; the clock stops when the process is gone.
"""

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import measure
from looptape import launch
from looptape.experiments import adding_problem
from looptape.trainer.checkpoints import Store, verify
from looptape.trainer.loop.schedule import Agenda

LIMIT_SECONDS, CALL_SECONDS = 1.0, 0.5
_UNTIL_CALLS_ARE_LONG_SECONDS = 3.0


def train(workdir):
    """Trains until a signal ends it. Prints `call <seconds>` after every call."""
    noted = Agenda.measure

    def measured(agenda, done, seconds):
        noted(agenda, done, seconds)
        print(f"call {seconds:.3f}", flush=True)

    Agenda.measure = measured
    config = adding_problem.Config(
        workdir=workdir,
        steps=10**9,
        log_every=10**9,
        eval_every=None,
        checkpoint_every=None,
        probe_every=0,
        jit_compile=False,
    )
    launch.run(config, adding_problem.build, show=False)


def once(workdir, rng):
    """(seconds from the signal to the end, to the checkpoint, seconds of the last call) of one process."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-m", "benchmarks.faults.signal_exit", "train", workdir]
    with open(f"{workdir}.log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    with process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        first = process.stdout.readline()
        assert first.startswith("call"), f"The process ended by itself; see {workdir}.log."
        time.sleep(_UNTIL_CALLS_ARE_LONG_SECONDS + rng.uniform(0, CALL_SECONDS))
        start = time.time()  # the clock of the file system
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=120)
        seconds = time.time() - start
        calls = [float(line.split()[1]) for line in process.stdout if line.startswith("call")]
    assert code == 143, f"SIGTERM ended the process with {code} instead of 143."
    store = Store(os.path.join(workdir, "checkpoints"))
    [path] = [os.path.join(store.directory, name) for name in store.names()]
    assert verify(path) is None
    return seconds, os.stat(path).st_ctime - start, calls[-1]  # renamed then, as the last thing


def main(times=10):
    rng = random.Random(0)
    print(measure.machine(), "\n")
    with tempfile.TemporaryDirectory() as root:
        found = [once(os.path.join(root, f"run-{index}"), rng) for index in range(int(times))]
    gone, saved, calls = zip(*found, strict=True)
    limit = LIMIT_SECONDS + CALL_SECONDS
    rows = [
        [
            f"seconds from SIGTERM to {what}",
            f"{statistics.median(seconds):.2f}",
            f"{min(seconds):.2f}–{max(seconds):.2f}",
            f"< {LIMIT_SECONDS:g} s + one call ({CALL_SECONDS:g} s)",
            "yes" if max(seconds) < limit else "**no**",
        ]
        for what, seconds in (("the end of the process, exit code 143", gone), ("the checkpoint", saved))
    ]
    print(measure.table(["what", "median", "range", "limit", "reached"], rows))
    print(f"\n{times} times, calls of {statistics.median(calls):.2f} s; load {os.getloadavg()[0]:.1f} at the end")
    return int(max(gone) >= limit)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
    else:
        sys.exit(main(*sys.argv[1:]))
