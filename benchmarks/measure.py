"""What every benchmark uses: interleaved rounds, medians of ratios, a table, and what machine it was."""

import contextlib
import ctypes
import os
import platform
import statistics
import subprocess
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


@contextlib.contextmanager
def another_process(command):
    """run(updates) -> seconds, by a process that reads numbers of updates and answers each with `seconds …`."""
    with subprocess.Popen(command, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def answer(word):
            for line in process.stdout:
                if line.startswith(f"{word} "):
                    return line.removeprefix(f"{word} ").strip()
            raise SystemExit(f"{' '.join(command[1:3])} ended with {process.wait()}.")

        def run(updates):
            process.stdin.write(f"{updates}\n")
            return float(answer("seconds"))

        answer("ready")
        try:
            yield run
        finally:
            process.stdin.close()


def ratio(times, name, base):
    """(median, lowest, highest) of the ratio of two contestants, paired by round."""
    ratios = [a / b for a, b in zip(times[name], times[base], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def timed(run):
    """Seconds that a function takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def peak_memory():
    """The largest resident size of this process so far, in mebibytes."""
    with open("/proc/self/status") as file:  # `ru_maxrss` would begin at the peak of the process that started this one
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))


RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}


def resident_memory():
    """The resident size of this process now, in mebibytes, without what it has freed. The peak starts anew from there.

    Set `RETURN_FREED` in the environment of the process, or freed blocks of less than 32 MiB may still count.
    """
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # see `man 5 proc`: resets VmHWM
    return peak_memory()


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
