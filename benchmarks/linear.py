"""What a probed update costs by the number of time steps: a table, and a picture of it (benchmarks/linear.png).

python -m benchmarks.linear
"""

import os
import pathlib
import statistics

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks.measure import machine, table
from benchmarks.probing import PER_CALL, training
from benchmarks.recurrent import measured as times_of

LENGTHS = (100, 400, 1600, 6400)
PICTURE = pathlib.Path(__file__).with_name("linear.png")


def measured(rounds=5):
    """{(probed, length): seconds of an update of a GRU, batch 8, 16 units}, the median of some rounds."""
    contestants = {
        (probed, length): training("GRU", 8, length, 16, probed) for probed in (True, False) for length in LENGTHS
    }
    return {key: statistics.median(values) for key, values in times_of(contestants, rounds, PER_CALL).items()}


def draw(seconds):
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for probed, label, colour in ((False, "plain update", "#0072B2"), (True, "probed update", "#D55E00")):
        axes.loglog(LENGTHS, [1e3 * seconds[probed, n] for n in LENGTHS], "o-", color=colour, label=label)
    first = 1e3 * seconds[False, LENGTHS[0]]
    line = [first * n / LENGTHS[0] for n in LENGTHS]
    axes.loglog(LENGTHS, line, color="0.6", linestyle="--", linewidth=1, label="linear in T")
    axes.set_xlabel("time steps T")
    axes.set_ylabel("ms per update")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(PICTURE, dpi=120)


def main():
    seconds = measured()
    draw(seconds)
    rows = [
        [
            f"{n:,}",
            f"{1e3 * seconds[False, n]:.1f}",
            f"{1e3 * seconds[True, n]:.1f}",
            f"{1e6 * seconds[True, n] / n:.0f}",
            f"{seconds[True, n] / seconds[False, n]:.2f}",
        ]
        for n in LENGTHS
    ]
    print(machine())
    print(table(["T", "plain, ms", "probed, ms", "probed, µs per time step", "probed / plain"], rows))


if __name__ == "__main__":
    main()
