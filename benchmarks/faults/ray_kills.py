"""Workers that Ray started, killed at random until the run ends: is the result that of a run without kills?

python -m benchmarks.faults.ray_kills [kills=20] [seed=0]

Needs `pip install looptape[ray]`. Two workers train `adding_problem`. Each time both have made a few updates, one of
them, or the process of Ray that holds it, is killed by SIGKILL; Ray restarts both, and they resume.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

from benchmarks.measure import table
from looptape.experiments.launch.verify_resume import compare
from looptape.trainer.checkpoints.store import Store

KILLS = 20
UPDATES = 30  # for each kill: more than are made between two checkpoints and the longest wait after the second
FLAGS = (
    *("--length=200", "--units=64", "--batch_size=128", "--jit_compile=false", "--probe_every=0"),
    *("--eval_examples=20", "--checkpoint_every=5", "--log_every=5", "--eval_every=100"),
)
_LONGEST_WAIT_SECONDS = 300


def command(workdir, steps, restarts):
    flags = [f"--workdir={workdir}", f"--steps={steps}", *FLAGS]
    return [
        *(sys.executable, "-m", "looptape", "ray", "--workers=2", f"--restarts={restarts}"),
        *("--", "experiments.adding_problem", *flags),
    ]


def workers(workdir):
    """{rank: (process, its parent)} of the workers that train in a directory."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().decode(errors="replace").split("\0")
            if f"--workdir={workdir}" not in words or "--strategy=multi_worker" not in words:
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                rank = re.search(rb'"index": ?(\d+)', file.read())
            with open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
            if rank:
                found.setdefault(int(rank.group(1)), []).append((int(name), parent))
    return found


def newest(workdir):
    names = Store(os.path.join(workdir, "checkpoints")).names()
    return int(names[-1].removeprefix("step-")) if names else 0


def campaign(workdir, steps, kills, draw):
    """Runs to the end with so many kills. Returns (the exit code, {what was killed: how often})."""
    hurt = {"the worker": 0, "Ray's process": 0}
    with open(os.path.join(workdir, "log"), "wb") as log:
        process = subprocess.Popen(command(workdir, steps, kills + 5), stdout=log, stderr=log)
    try:
        last = 0
        while sum(hurt.values()) < kills and process.poll() is None:
            _until(lambda last=last: newest(workdir) > last and len(workers(workdir)) == 2, process)
            last = newest(workdir)
            time.sleep(draw.uniform(0, 0.5))
            found = workers(workdir)
            if len(found) < 2:
                continue
            kind = draw.choice(list(hurt))
            worker, parent = found[draw.randrange(2)][0]
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker if kind == "the worker" else parent, signal.SIGKILL)
                hurt[kind] += 1
                print(f"after step {last}: killed {kind}, {sum(hurt.values())} of {kills}", file=sys.stderr, flush=True)
            _until(
                lambda worker=worker: all(pid != worker for each in workers(workdir).values() for pid, _ in each),
                process,
            )
        return process.wait(_LONGEST_WAIT_SECONDS), hurt
    finally:
        process.kill()
        process.wait()


def _until(done, process):
    end = time.monotonic() + _LONGEST_WAIT_SECONDS
    while not done() and process.poll() is None:
        if time.monotonic() > end:
            raise TimeoutError("The workers did not start again in time; the log in the run's directory says why.")
        time.sleep(0.05)


def main(kills=KILLS, seed=0):
    kills, steps = int(kills), UPDATES * (int(kills) + 1)
    with tempfile.TemporaryDirectory() as directory:
        whole, killed = (os.path.join(directory, name) for name in ("whole", "killed"))
        for path in (whole, killed):
            os.makedirs(path)
        begun = time.monotonic()
        code, hurt = campaign(killed, steps, kills, random.Random(int(seed)))
        seconds = time.monotonic() - begun
        if code == 0:
            campaign(whole, steps, 0, random.Random(0))
        else:
            with open(os.path.join(killed, "log"), errors="replace") as file:
                print(file.read()[-3000:], file=sys.stderr)
        stores = [os.path.join(path, "checkpoints") for path in (whole, killed)]
        different = compare(*stores) if code == 0 else ["the run did not end"]
    kinds = ", ".join(f"{count} × {kind}" for kind, count in hurt.items())
    what = f"{sum(hurt.values())} kills ({kinds}), {steps} updates, {seconds:.0f} s"
    print(
        table(
            ["what", "different from a run without kills", "reached"],
            [[what, "; ".join(different) or "nothing", "**no**" if different or sum(hurt.values()) < kills else "yes"]],
        )
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
