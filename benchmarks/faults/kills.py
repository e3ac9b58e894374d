"""A campaign of random kills: how often the result differs from that of a run that nothing happened to.

python -m benchmarks.faults.kills [kills=50] [seed=0]

Each session is a process of its own. Once it has gone on from a checkpoint (of every second one: once it has written a
checkpoint of its own, as the first has), it is killed by SIGKILL at a random moment; now and then by SIGTERM, or with
its newest checkpoint truncated afterwards. The next one must resume from the newest intact checkpoint, and name
the damaged one. Runs are started again until they end, and then a new one begins.
"""

import collections
import dataclasses
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

from looptape.trainer.checkpoints.store import DAMAGED, Store, verify
from looptape.trainer.summaries import event_writer

STEPS = 600
KINDS = {"SIGKILL": 0.8, "SIGTERM": 0.1, "SIGKILL and truncation": 0.1}
LONGEST_WAIT_SECONDS = 2.0


@dataclasses.dataclass
class Outcome:
    """What a campaign found: sessions that were hurt, by kind; how many went on; of the runs, how many were wrong."""

    hurt: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    resumes: int = 0
    set_aside: int = 0  # damaged checkpoints that the next session found, moved and named
    runs: int = 0
    different: int = 0  # runs whose hash differs
    uneven: int = 0  # runs whose rows in TensorBoard have a gap, a double or another order

    @property
    def kills(self):
        return sum(self.hurt.values())


class Session:
    """One process of a run, from its start to the moment at which it may be hurt.

    Args:
        workdir: of the run.
        steps: of the run.
    """

    def __init__(self, workdir, steps):
        self.workdir, self._steps, self._lines = str(workdir), steps, []
        self.store = Store(os.path.join(self.workdir, "checkpoints"))
        whole = [name for name in self.store.names() if verify(os.path.join(self.store.directory, name)) is None]
        self._expected = int(whole[-1].removeprefix("step-")) if whole else 0
        self._cut = [name for name in self.store.names() if name not in whole]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
        command = [sys.executable, "-m", "benchmarks.faults.victim", self.workdir, str(steps)]
        with open(f"{self.workdir}.log", "w") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)

    def _newest(self):
        return max((int(name.removeprefix("step-")) for name in self.store.names()), default=0)

    def said(self):
        with open(f"{self.workdir}.log") as log:
            return log.read()

    def ready(self, patient):
        """Waits until it trains and has something to lose. Returns whether it resumes from a checkpoint.

        Args:
            patient: wait for a checkpoint of its own in any case, when everything is traced and training is under way.
        """
        self._read("training from ", "sha256 ")
        if self._lines[-1].startswith("sha256 "):  # it was complete, and killed before it could say so
            assert self._expected == self._steps, f"It ended; the newest whole checkpoint is {self._expected}."
            return True
        step = int(self._lines[-1].split()[2])
        assert step == self._expected, f"It begins at step {step}; the newest whole checkpoint is {self._expected}."
        while (patient or not step) and self._newest() <= step and self.process.poll() is None:
            time.sleep(0.01)
        return step > 0

    def set_aside(self):
        """How many damaged checkpoints it found; each must have been moved and named."""
        for name in self._cut:
            assert os.path.isdir(os.path.join(self.store.directory, DAMAGED + name)), f"{name} was not set aside."
            assert f"Checkpoint {name} is damaged" in self.said(), f"{name} was set aside without a word."
        return len(self._cut)

    def hurt(self, kind):
        """Ends it. Returns what was done, or None if it had ended.

        Nothing is truncated where no other checkpoint would be left.
        """
        if self.process.poll() is not None:
            return None
        self.process.send_signal(signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
        code = self.process.wait()
        if code == 0:
            return None
        self.process.stdout.close()
        expected = [143] if kind == "SIGTERM" else [-signal.SIGKILL]
        if self._newest() == self._steps:
            expected.append(-signal.SIGTERM)  # `fit` was over, and Python was about to end
        assert code in expected, f"{kind} ended the process with {code} instead of {expected}: {self.said()[-3000:]}"
        if kind != "SIGKILL and truncation":
            return kind
        names = self.store.names()
        if len(names) < 2:
            return "SIGKILL"
        path = os.path.join(self.store.directory, names[-1], "state.data-00000-of-00001")
        os.truncate(path, os.path.getsize(path) // 2)
        return kind

    def finish(self):
        """The hash that the run prints at its end."""
        if not self._lines or not self._lines[-1].startswith("sha256 "):
            self._read("sha256 ")
        with self.process.stdout:
            self.process.wait()
        return self._lines[-1].split()[1]

    def _read(self, *beginnings):
        """Reads what it prints up to a line that begins like this, which becomes the last of `_lines`."""
        for line in self.process.stdout:
            if line.startswith(beginnings):
                self._lines.append(line)
                return
        raise AssertionError(f"A session died by itself: {self.said()[-3000:]}")


def rows(workdir):
    """[(step, tag)] of the event files of a run, as they were written."""
    return [
        (step, value.tag) for run in ("train", "eval") for step, value in event_writer.read(os.path.join(workdir, run))
    ]


def one_run(workdir, steps, kills, rng, outcome):
    """Starts a run again and again until it ends, and hurts it as long as that is wanted. Returns its hash."""
    for number in itertools.count():
        session = Session(workdir, steps)
        try:
            outcome.resumes += session.ready(patient=number % 2 == 1)
            outcome.set_aside += session.set_aside()
            if outcome.kills < kills:
                time.sleep(rng.uniform(0, LONGEST_WAIT_SECONDS))
                kind = session.hurt(rng.choices(list(KINDS), list(KINDS.values()))[0])
                if kind is not None:
                    outcome.hurt[kind] += 1
                    continue
            return session.finish()
        finally:
            session.process.kill()  # also if something is not as it must be


def campaign(kills, seed=0, steps=STEPS, directory=None, say=print):
    """The `Outcome` of so many kills."""
    rng, outcome = random.Random(seed), Outcome()
    with tempfile.TemporaryDirectory(dir=directory) as root:
        whole = os.path.join(root, "whole")
        expected = Session(whole, steps).finish()
        while outcome.kills < kills:
            workdir = os.path.join(root, f"run-{outcome.runs}")
            outcome.different += one_run(workdir, steps, kills, rng, outcome) != expected
            outcome.runs += 1
            outcome.uneven += rows(workdir) != rows(whole)
            left = [name for name in os.listdir(os.path.join(workdir, "checkpoints")) if name.startswith(".")]
            assert not left, f"Leftovers: {left}"
            say(f"run {outcome.runs}: {outcome.kills} of {kills} kills, {outcome.resumes} resumes", flush=True)
    return outcome


def main(kills=50, seed=0):
    start = time.perf_counter()
    found = campaign(int(kills), int(seed))
    kinds = ", ".join(f"{count} × {kind}" for kind, count in found.hurt.items())
    print(
        f"{found.kills} kills ({kinds}) in {found.runs} runs of {STEPS} updates, {found.resumes} resumes, "
        f"{found.set_aside} damaged checkpoints set aside: {found.different} results and the rows of {found.uneven} "
        f"runs differ ({time.perf_counter() - start:.0f} s)"
    )
    return int(found.different > 0 or found.uneven > 0 or not found.resumes)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
