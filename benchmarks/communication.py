"""What the sum over workers costs an update, by the processor's time and by the clock.

python -m benchmarks.communication

Each worker is pinned to one core. "half" is one process, pinned too, that trains on half the batch: the work of one of
two workers without the sum. Workers of one machine connect by Unix sockets; "by TCP" is what they do between machines,
here on loopback. Takes about three minutes. `benchmarks.network` measures what a slow network adds.
"""

import contextlib
import os
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from benchmarks import workers
from benchmarks.measure import machine, table

UNITS, BATCH = 1536, 256  # 2.4 million parameters
PARAMETERS = UNITS * UNITS + 35 * UNITS + 1
LIMIT = 1.35
KINDS = {
    "half": (1, {}),
    "TensorFlow's collectives": (2, {"BENCHMARK_COMMUNICATION": "tensorflow"}),
    "connections of our own": (2, {}),
    "… by TCP": (2, {"BENCHMARK_TCP": "1"}),
    "… in bfloat16": (2, {"BENCHMARK_DTYPE": "bfloat16"}),
}


def worker(batch, updates, rounds):
    """Measures in a process of its own: [[seconds on the clock, of the processor] of an update, of each round]."""
    import keras

    from benchmarks.distribution import contestant, data, dense
    from looptape import Trainer
    from looptape.experiments.cluster.joining import join
    from looptape.trainer.distribution import exchange

    if os.environ.get("BENCHMARK_TCP"):
        exchange._machine = lambda: exchange._UNKNOWN
    strategy = join() if "TF_CONFIG" in os.environ else None
    keras.utils.set_random_seed(1)
    Trainer.communication = os.environ.get("BENCHMARK_COMMUNICATION", "auto")
    Trainer.communication_dtype = os.environ.get("BENCHMARK_DTYPE")
    layers = int(os.environ.get("BENCHMARK_LAYERS", 0))
    run = contestant(strategy, lambda: deep(layers) if layers else dense(UNITS), data(batch), min(updates, 20))
    run(updates)
    workers.publish([list(map(float, run(updates))) for _ in range(rounds)])
    if strategy is not None:
        time.sleep(3)  # the others fetch their part of the last collective operation from this process
    os._exit(0)


def deep(layers):
    """As many parameters in so many equal layers, so that their gradients are ready one after another."""
    import keras

    units = round((PARAMETERS / layers) ** 0.5)
    hidden = [keras.layers.Dense(units, activation="relu") for _ in range(layers + 1)]
    return keras.Sequential([keras.Input((32,)), *hidden, keras.layers.Dense(1)])


def processes(count, batch, environment, addresses=None, inside=None, updates=40, rounds=3):
    """[wall, processor] seconds of an update of worker 0, the median of the rounds.

    Args:
        count: of workers.
        batch: the global one.
        environment: variables of theirs.
        addresses: of the workers; ports of this machine by default.
        inside: what each command begins with, by rank; nothing by default.
        updates: of a round.
        rounds: how many.
    """
    cores = sorted(os.sched_getaffinity(0))
    pinned = [["taskset", "-c", str(cores[rank % len(cores)])] for rank in range(count)]
    prefixes = [[*first, *pin] for first, pin in zip(inside or [()] * count, pinned, strict=True)]
    asked = {"environment": environment, "addresses": addresses, "prefixes": prefixes}
    found = workers.measured("communication", [batch, updates, rounds], count, **asked)
    return [statistics.median(column) for column in zip(*found, strict=True)]


def overhead(rounds=3):
    """Rows: an update of two workers against half of the batch in one process, by both clocks."""
    times = {name: [] for name in KINDS}
    for _ in range(rounds):
        for name, (count, environment) in KINDS.items():
            times[name].append(processes(count, BATCH if count > 1 else BATCH // 2, environment))
    rows = []
    for name in list(KINDS)[1:]:
        cells = [f"{PARAMETERS:,}", name]
        for column in (1, 0):
            pairs = list(zip(times[name], times["half"], strict=True))
            ratios = [own[column] / half[column] for own, half in pairs]
            cells += [f"{1e3 * statistics.median(own[column] for own, _ in pairs):.1f}"]
            cells += [f"{1e3 * statistics.median(half[column] for _, half in pairs):.1f}"]
            cells += [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}–{max(ratios):.2f}"]
            if column == 1:
                cells += [f"≤ {LIMIT}", "yes" if statistics.median(ratios) <= LIMIT else "**no**"]
        rows.append(cells)
    return rows


def main():
    print(machine())
    print(f"load: {os.getloadavg()[0]:.1f}")
    head = ["parameters", "two workers by", "processor, ms", "half, ms", "ratio", "spread", "limit", "reached"]
    print(table([*head, "clock, ms", "half, ms", "ratio", "spread"], overhead()), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        if sys.argv[1:2] == ["worker"]:
            worker(*map(int, sys.argv[2:5]))
        else:
            main()
