"""Workers as real processes on loopback, with time limits and without leftovers."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np

from looptape.experiments.cluster import tf_config
from looptape.experiments.cluster.local import kept_ports

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIMIT = 240  # seconds for any of them, on a busy machine


@contextlib.contextmanager
def started(commands, directory, **environment):
    """Starts one process per command with TF_CONFIG; kills what is left of them at the end."""
    with kept_ports(len(commands)) as ports:
        yield from _started(commands, directory, [f"localhost:{port}" for port in ports], environment)


def _started(commands, directory, addresses, environment):
    processes = []
    try:
        for rank, command in enumerate(commands):
            with open(os.path.join(directory, f"log-{rank}"), "ab") as log:
                own = {"TF_CONFIG": tf_config.make(addresses, rank), "TF_GRPC_REUSE_PORT": "true"}
                own |= {**variables(), **environment}
                processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log, start_new_session=True))
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def variables():
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOOPTAPE")}
    return {**kept, "PYTHONPATH": REPOSITORY, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def worker(case, directory, steps=40):
    return [sys.executable, "-m", "tests.distribution.worker", case, str(directory), str(steps)]


def run_workers(case, directory, steps=40, count=2):
    """Runs workers to their end. Returns [what each reached]."""
    os.makedirs(directory, exist_ok=True)
    with started([worker(case, directory, steps)] * count, directory) as processes:
        codes = wait(processes)
    assert codes == [0] * count, "\n".join(log(directory, rank)[-3000:] for rank in range(count))
    return [reached(directory, rank) for rank in range(count)]


def wait(processes, limit=LIMIT):
    """Exit codes; None of those that have not ended in time."""
    end = time.monotonic() + limit
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0.01))
    return [process.poll() for process in processes]


def reached(directory, rank=0):
    with np.load(os.path.join(directory, f"reached-{rank}.npz")) as file:
        return dict(file)


def log(directory, rank):
    with open(os.path.join(directory, f"log-{rank}"), errors="replace") as file:
        return file.read()


def until_step(directory, step, processes, ranks=(0, 1)):
    """Waits until workers have made so many updates."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if all(_step(directory, rank) >= step for rank in ranks):
            return
        assert all(p.poll() is None for p in processes), [log(directory, rank)[-2000:] for rank in ranks]
        time.sleep(0.05)
    raise TimeoutError(f"the workers did not come to step {step}")


def _step(directory, rank):
    try:
        with open(os.path.join(directory, f"step-{rank}")) as file:
            return int(file.read() or 0)
    except OSError:
        return 0


def assert_equal(left, right, tolerance=0.0):
    for name, value in left.items():
        if not name.startswith("history/"):
            np.testing.assert_allclose(right[name], value, rtol=0, atol=tolerance, err_msg=name)
