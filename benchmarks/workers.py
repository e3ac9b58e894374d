"""Measurements by several processes of one benchmark that train together: `python -m benchmarks.<name> worker …`."""

import json
import os
import subprocess
import sys

from looptape.experiments.cluster import tf_config
from looptape.experiments.cluster.local import kept_ports

_RESULT = "measured: "


def publish(found):
    """Prints what a worker measured, for the process that started it."""
    print(_RESULT + json.dumps(found), flush=True)


def measured(benchmark, arguments, count, *, environment=None, addresses=None, prefixes=None):
    """What the first of so many workers published.

    Args:
        benchmark: module that runs as `worker` with these arguments.
        arguments: of the command, after `worker`.
        count: of workers; a single one gets no TF_CONFIG.
        environment: further variables of theirs.
        addresses: of the workers; ports of this machine by default.
        prefixes: [[word]] that the command of each worker begins with; nothing by default.
    """
    # Only here, so that a worker may measure the import of TensorFlow and Keras by itself.
    with kept_ports(count) as ports:  # free again when the workers start
        addresses = addresses or [f"localhost:{port}" for port in ports]
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "worker", *map(str, arguments)]
    started = []
    try:
        for rank in range(count):
            own = {"TF_CONFIG": tf_config.make(addresses, rank)} if count > 1 else {}
            streams = {"stdout": subprocess.DEVNULL if rank else subprocess.PIPE, "stderr": subprocess.DEVNULL}
            words = [*(prefixes[rank] if prefixes else ()), *command]
            started.append(
                subprocess.Popen(words, env={**os.environ, **(environment or {}), **own}, text=True, **streams)
            )
        printed = started[0].communicate(timeout=600)[0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    line = next((line for line in printed.splitlines() if line.startswith(_RESULT)), None)
    if line is None:
        raise RuntimeError(f"A worker has measured nothing. Run `{' '.join(command)}` to see why.")
    return json.loads(line.removeprefix(_RESULT))
