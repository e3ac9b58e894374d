"""What a slow network adds to an update, against the model of docs/scale-out.md.

python -m benchmarks.network

Hosts are network namespaces whose network is limited to a rate; needs root, `ip` and `tc`. Takes about four minutes.
The last rows have six equal layers and a batch for which the gradients take about as long as the backward pass: there
the buckets that are sent meanwhile show.
"""

import os
import sys

from benchmarks.communication import BATCH, PARAMETERS, processes
from benchmarks.hosts import available, hosts
from benchmarks.measure import machine, table

RATES = {"100mbit": 0.1e9 / 8, "1gbit": 1e9 / 8}  # bytes per second
LINE = 0.94  # of the rate, that TCP leaves for its contents
BACKWARD = 2 / 3  # of the compute
LAYERS, LARGE_BATCH = 6, 1024


def predicted(count, compute, rate, width, loopback, buckets=1):
    """Seconds of an update by the model: compute, and the longer of the wire and the processor's part of the sum.

    Args:
        count: of workers.
        compute: seconds of a worker's share of the batch alone.
        rate: bytes per second.
        width: bytes of a gradient on the wire.
        loopback: seconds that the sum takes without a limit, for two workers.
        buckets: in which gradients are sent beside the backward pass; 1: after it.
    """
    share = 2 * (count - 1) / count
    cores = max(count / len(os.sched_getaffinity(0)), 1.0)  # more workers than cores take turns
    sending = share * max(width * PARAMETERS / rate, loopback * cores * width / 4)
    if buckets > 1:
        sending = max(sending - BACKWARD * compute, sending / buckets)
    return compute * cores + sending


def measured(count, per_worker, rate, environment, updates=3, rounds=2):
    """Seconds of an update of so many hosts."""
    with hosts(count, rate) as made:
        inside = [["ip", "netns", "exec", host] for host, _ in made]
        addresses = [f"{address}:2222" for _, address in made]
        return processes(count, count * per_worker, environment, addresses, inside, updates, rounds)[0]


def rows():
    """Updates of 1 to 4 workers, predicted and measured."""
    found, per_worker = [], BATCH // 2
    alone = processes(1, per_worker, {})[0]
    loopback = max(processes(2, 2 * per_worker, {"BENCHMARK_TCP": "1"})[0] - alone, 0.0)
    found.append(["–", "float32", 1, f"{1e3 * alone:.0f}", "–", "–", "–", "–"])
    cases = [(name, dtype, count) for name in RATES for dtype, count in (("float32", 2), ("bfloat16", 2))]
    cases += [("100mbit", "float32", 3), ("100mbit", "float32", 4), ("1gbit", "float32", 3)]
    for name, dtype, count in sorted(cases, key=lambda case: (case[0], case[1] != "float32", case[2])):
        width = 2 if dtype == "bfloat16" else 4
        seconds = measured(count, per_worker, name, {"BENCHMARK_DTYPE": dtype} if width == 2 else {})
        found.append(row(name, dtype, count, seconds, alone, width, loopback, 2))
    deep = {"BENCHMARK_LAYERS": str(LAYERS)}
    large = processes(1, LARGE_BATCH, deep)[0]
    seconds = measured(2, LARGE_BATCH, "1gbit", deep, updates=10)
    found.append(["–", f"float32, {LAYERS} layers", 1, f"{1e3 * large:.0f}", "–", "–", "–", "–"])
    found.append(row("1gbit", f"float32, {LAYERS} layers", 2, seconds, large, 4, loopback, LAYERS))
    return found


def row(name, dtype, count, seconds, compute, width, loopback, buckets):
    arguments = count, compute, LINE * RATES[name], width, loopback
    cells = [name, dtype, count, f"{1e3 * seconds:.0f}"]
    for expected in (predicted(*arguments), predicted(*arguments, buckets=buckets)):
        cells += [f"{1e3 * expected:.0f}", f"{seconds / expected:.2f}"]
    print(cells, file=sys.stderr, flush=True)
    return cells


def main():
    print(machine())
    if not available():
        print("This needs root and the commands `ip` and `tc`, for network namespaces.")
        return
    print(f"load: {os.getloadavg()[0]:.1f}")
    head = ["each host's network", "gradients", "workers", "measured, ms", "predicted, ms", "measured / predicted"]
    print(table([*head, "predicted with overlap, ms", "measured / predicted"], rows()), flush=True)


if __name__ == "__main__":
    main()
