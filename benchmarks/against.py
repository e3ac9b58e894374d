"""This checkout against another one, such as that of an earlier commit: whole updates, interleaved.

    git worktree add ../before <commit>
    python -m benchmarks.against ../before

Each checkout trains in a process of its own, on the same packages. Works with commits before the name `looptape`, too.
"""

import argparse
import contextlib
import os
import statistics
import sys

from benchmarks.measure import another_process, interleave, machine, ratio, table

SIDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "against_side.py")
UPDATES = {"plain": 4000, "accumulation": 1000, "two losses, MGDA": 1000, "LSTM": 60, "LSTM, probed": 40}


@contextlib.contextmanager
def process(checkout, kind):
    """run(updates) -> seconds, in the checkout."""
    here = os.getcwd()
    os.environ["PYTHONPATH"] = os.path.abspath(checkout)
    os.chdir(checkout)
    try:
        with another_process([sys.executable, "-P", SIDE, kind]) as run:
            os.chdir(here)
            yield run
    finally:
        os.chdir(here)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="path of the other checkout")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    rows = []
    for kind, updates in UPDATES.items():
        with process(".", kind) as now, process(arguments.before, kind) as before:
            contestants = {"now": lambda run=now, n=updates: run(n), "before": lambda run=before, n=updates: run(n)}
            for run in contestants.values():
                run()
            times = interleave(contestants, arguments.rounds)
        median, low, high = ratio(times, "now", "before")
        both = " / ".join(f"{1e3 * statistics.median(times[name]) / updates:.3f}" for name in ("now", "before"))
        rows.append([kind, both, f"{median:.3f}", f"{low:.2f}–{high:.2f}"])
        print(*rows[-1], flush=True)
    print(machine())
    print(table(["update", "ms", "now / before", "spread"], rows))


if __name__ == "__main__":
    main()
