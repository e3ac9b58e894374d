"""What every benchmark uses: interleaved rounds, medians of ratios, a table, and what machine it was."""

import os
import platform
import statistics
import time
from importlib import metadata

import keras


class Clock(keras.callbacks.Callback):
    """The time between the first and the last update: what happens once per `fit` is not part of an update."""

    def on_train_begin(self, logs=None):
        self.start = time.perf_counter()

    def on_train_end(self, logs=None):
        self.seconds = time.perf_counter() - self.start


def interleave(contestants, rounds):
    """Runs each contestant once per round, in turn. Returns {name: [seconds, …]}.

    Args:
        contestants: {name: function that returns the seconds it measured}.
        rounds: how often.
    """
    times = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            times[name].append(run())
    return times


def ratio(times, name, base):
    """(median, lowest, highest) of the ratio of two contestants, paired by round."""
    ratios = [a / b for a, b in zip(times[name], times[base], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def timed(run):
    """Seconds that a function takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def machine():
    """One line about the machine and the versions, for the head of a table."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        model = names[0] if names else model
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("tensorflow", "keras", "numpy"))
    return f"{os.cpu_count()} × {model}; Python {platform.python_version()}; {versions}"


def table(header, rows):
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def row(times, name, base, limit):
    """A row: what is compared, median ratio, spread, limit, whether it is reached."""
    median, low, high = ratio(times, name, base)
    reached = "yes" if median <= limit else "**no**"
    return [f"{name} / {base}", f"{median:.3f}", f"{low:.2f}–{high:.2f}", f"≤ {limit}", reached]
