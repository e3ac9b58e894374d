"""Draws docs/pictures/scale-out.png and prints the table of docs/scale-out.md: a simulation, not a measurement.

python docs/make_scale_out.py

An update of n workers takes

    T(n) = a · C · slowest(n) + R(n) + H                compute, all-reduce, what every worker does for itself
    R(n) = 2 (n − 1) / n · 4P / B + 2 (n − 1) · L       a ring: bytes each worker sends, and 2 (n − 1) turns

with C seconds of compute for a worker's share of a micro-batch, `a` micro-batches per update, P parameters of four
bytes, bandwidth B, latency L, and H for the host and the optimizer. With a fixed batch per worker C is constant, with
a fixed global batch it is divided by n. The slowest of n workers is waited for: their compute times vary by a normal
distribution of the relative deviation S, drawn with a fixed seed. In the picture and the first table nothing overlaps
with the all-reduce. The second table sends buckets beside the backward pass, two thirds of the last micro-batch,

    T(n) = a · C · slowest(n) + max(R(n) − 2/3 · C, R(n) / buckets) + H

and gradients of two bytes.
"""

import os

import numpy as np

WORKERS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
NETWORKS = {"1 Gbit/s": (0.118e9, 100e-6), "10 Gbit/s": (1.18e9, 30e-6), "100 Gbit/s": (11.8e9, 10e-6)}  # B, L
MODELS = {"1 M": 1e6, "25 M": 25e6, "350 M": 350e6}  # parameters
COMPUTE = {"1 M": 0.02, "25 M": 0.25, "350 M": 2.0}  # C: seconds of a micro-batch on one worker, assumed
SPREAD, HOST, UPDATES = 0.03, 0.5e-3, 400  # S, H, updates simulated
BACKWARD = 2 / 3  # of the compute of a micro-batch
BUCKETS = {"1 M": 2, "25 M": 25, "350 M": 100}  # by the sizes of such models' layers, assumed


def all_reduce(workers, parameters, bandwidth, latency, width=4):
    """Seconds of an all-reduce of gradients of so many bytes each."""
    if workers == 1:
        return 0.0
    return 2 * (workers - 1) / workers * width * parameters / bandwidth + 2 * (workers - 1) * latency


def update(workers, parameters, compute, bandwidth, latency, accumulation=1, weak=False, width=4, buckets=1):
    """Mean seconds of an update, the slowest worker waited for. One bucket is sent after the backward pass."""
    share = accumulation * compute * (1.0 if weak else 1.0 / workers)
    noise = np.random.default_rng(0).normal(1.0, SPREAD / np.sqrt(accumulation), size=(UPDATES, workers))
    slowest = np.maximum(noise, 0.5).max(axis=1).mean()
    sending = all_reduce(workers, parameters, bandwidth, latency, width)
    if buckets > 1:
        sending = max(sending - BACKWARD * share / accumulation, sending / buckets)
    return share * slowest + sending + HOST


def efficiency(workers, name, network, accumulation=1, weak=True, width=4, buckets=1):
    """Examples per second and worker, against one worker."""
    arguments = MODELS[name], COMPUTE[name], *NETWORKS[network], accumulation, weak, width, buckets
    alone, together = update(1, *arguments), update(workers, *arguments)
    return alone / together if weak else alone / (workers * together)


def hidden_by(name, network, workers, share=0.1):
    """Micro-batches per update from which on the all-reduce is at most this share of an update (weak scaling)."""
    seconds = all_reduce(workers, MODELS[name], *NETWORKS[network])
    return max(1, int(np.ceil((1 - share) / share * seconds / COMPUTE[name])))


def print_table():
    columns = [2, 8, 64, 512]
    counts = " | ".join(f"n = {n}" for n in columns)
    print(f"| parameters | network | MB per worker and update, n = 64 | {counts} | micro-batches for 90 %, n = 64 |")
    print("|" + "---|" * (4 + len(columns)))
    for name, parameters in MODELS.items():
        for network in NETWORKS:
            cells = [f"{efficiency(n, name, network):.0%}" for n in columns]
            sent = 2 * 63 / 64 * 4 * parameters / 1e6
            print(f"| {name} | {network} | {sent:,.0f} | {' | '.join(cells)} | {hidden_by(name, network, 64)} |")


def print_overlap(workers=64):
    print(f"\n| parameters | network | one message, n = {workers} | buckets | buckets of bfloat16 |\n|" + "---|" * 5)
    for name in MODELS:
        for network in NETWORKS:
            ways = {}, {"buckets": BUCKETS[name]}, {"buckets": BUCKETS[name], "width": 2}
            cells = [f"{efficiency(workers, name, network, **way):.0%}" for way in ways]
            print(f"| {name} | {network} | {' | '.join(cells)} |")


def draw(path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, weak, title in ((axes[0], True, "batch per worker fixed"), (axes[1], False, "global batch fixed")):
        for name, style in zip(MODELS, ("-", "--", ":"), strict=True):
            for color, network in enumerate(NETWORKS):
                values = [efficiency(n, name, network, weak=weak) for n in WORKERS]
                label = f"{name} parameters, {network}" if weak else None
                axis.plot(WORKERS, values, style, color=f"C{color}", label=label)
        axis.set(xscale="log", ylim=(0, 1.05), xlabel="workers", ylabel="throughput per worker, against one")
        axis.set_xticks(WORKERS, [str(n) for n in WORKERS])
        axis.set_title(f"simulated: {title}")
        axis.grid(alpha=0.3)
    figure.legend(loc="outside right", fontsize=7)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    draw(os.path.join(here, "pictures", "scale-out.png"))
    print_table()
    print_overlap()
