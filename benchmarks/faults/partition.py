"""A cut between two of three workers, which both still reach the chief: who notices it, and when.

python -m benchmarks.faults.partition

Each worker has a network namespace of its own, with an address; needs root and `ip`.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time

from benchmarks.hosts import available, hosts, ip
from benchmarks.measure import table
from looptape.experiments.cluster import tf_config
from tests.distribution import processes

COUNT, CUT_AT_STEP, LIMIT = 3, 12, 30.0


def cut(first, second):
    """Drops everything between two hosts, in both directions, without an answer."""
    for (name, _), (_, address) in ((first, second), (second, first)):
        ip("-n", name, "route", "add", "blackhole", f"{address}/32")


def measured(directory):
    """Seconds from the cut to the end of each worker, and the exit codes."""
    with hosts(COUNT) as made, contextlib.ExitStack() as stack:
        addresses = [f"{address}:2222" for _, address in made]
        started = []
        for rank, (name, _) in enumerate(made):
            log = stack.enter_context(open(os.path.join(directory, f"log-{rank}"), "wb"))
            own = {**processes.variables(), "TF_CONFIG": tf_config.make(addresses, rank), "TEST_PAUSE": "0.2"}
            command = ["ip", "netns", "exec", name, *processes.worker("indexed", directory, 2000)]
            started.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
            stack.callback(started[-1].kill)
        processes.until_step(directory, CUT_AT_STEP, started, range(COUNT))
        cut(made[1], made[2])
        begun, ended = time.monotonic(), {}
        while len(ended) < COUNT and time.monotonic() < begun + 120:
            for rank, process in enumerate(started):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.monotonic() - begun, process.returncode
            time.sleep(0.1)
        return ended


def main():
    if not available():
        sys.exit("This needs root and the command `ip`, for network namespaces.")
    with tempfile.TemporaryDirectory() as directory:
        ended = measured(directory)
        lines = [processes.log(directory, rank).strip().splitlines()[-1][:160] for rank in range(COUNT)]
    rows = []
    for rank in range(COUNT):
        seconds, code = ended.get(rank, (float("inf"), None))
        reached = "yes" if seconds <= LIMIT and code == 75 else "**no**"
        rows.append([rank, f"{seconds:.1f} s", code, f"{LIMIT:.0f} s", reached])
    print(table(["worker", "ended after", "exit code", "limit", "reached"], rows))
    print("\n".join(lines), file=sys.stderr)


if __name__ == "__main__":
    main()
