"""A campaign of random kills: how often the result differs from that of a run that nothing happened to.

python -m benchmarks.faults.kills [kills=50] [seed=0]

Each session is a process of its own that is killed by SIGKILL at a random moment; now and then by SIGTERM, or with its
newest checkpoint truncated afterwards. Runs are started again until they end, and then a new one begins.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time

from trainer.checkpoints import Store

STEPS = 600
_LONGEST_WAIT_SECONDS = 2.0


def start(workdir, steps=STEPS):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-m", "benchmarks.faults.victim", str(workdir), str(steps)]
    with open(f"{workdir}.log", "w") as log:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)


def finish(process):
    """The hash that a run prints at its end, or None if it did not get there."""
    with process.stdout:
        lines = process.stdout.read().split("\n")
    process.wait()
    return next((line.split()[1] for line in lines if line.startswith("sha256 ")), None)


def hurt(process, workdir, rng):
    """Waits until a session trains, and ends it. Returns what was done, or None if it had ended by itself."""
    for line in process.stdout:
        if line.startswith("training"):
            break
    time.sleep(rng.uniform(0, _LONGEST_WAIT_SECONDS))
    if process.poll() is not None:
        return None
    kind = rng.choices(["SIGKILL", "SIGTERM", "SIGKILL and truncation"], [0.8, 0.1, 0.1])[0]
    process.send_signal(signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
    code = process.wait()
    process.stdout.close()
    if kind == "SIGTERM" and code not in (143, 0):
        raise AssertionError(f"SIGTERM ended the process with {code} instead of 143.")
    store = Store(os.path.join(workdir, "checkpoints"))
    if kind.endswith("truncation") and len(store.names()) > 1:
        path = os.path.join(store.directory, store.names()[-1], "state.data-00000-of-00001")
        os.truncate(path, os.path.getsize(path) // 2)
    return kind


def campaign(kills, seed=0, steps=STEPS, directory=None, say=print):
    """(sessions that were hurt, by kind; runs that ended; runs whose hash differs)."""
    rng = random.Random(seed)
    counts, runs, different = {}, 0, 0
    with tempfile.TemporaryDirectory(dir=directory) as root:
        expected = finish(start(os.path.join(root, "whole"), steps))
        assert expected is not None, "The run without interruption did not end."
        while sum(counts.values()) < kills:
            workdir, reached = os.path.join(root, f"run-{runs}"), None
            while reached is None:
                process = start(workdir, steps)
                kind = hurt(process, workdir, rng) if sum(counts.values()) < kills else None
                if kind is None:
                    reached = finish(process)
                    if reached is None:
                        with open(f"{workdir}.log") as log:
                            raise AssertionError(f"A session died by itself: {log.read()[-3000:]}")
                else:
                    counts[kind] = counts.get(kind, 0) + 1
            runs += 1
            different += reached != expected
            left = [name for name in os.listdir(os.path.join(workdir, "checkpoints")) if name.startswith(".")]
            assert not left, f"Leftovers: {left}"
            say(f"run {runs}: {sum(counts.values())} of {kills} kills, {different} results differ", flush=True)
    return counts, runs, different


def main(kills=50, seed=0):
    counts, runs, different = campaign(int(kills), int(seed))
    kinds = ", ".join(f"{count} × {kind}" for kind, count in counts.items())
    print(f"{sum(counts.values())} kills ({kinds}) in {runs} runs of {STEPS} updates: {different} results differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
