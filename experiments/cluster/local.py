"""Starts workers of one command on this machine; restarts all if one is lost.

    looptape cluster --workers=2 -- adding_problem --workdir=runs/two

After `--` comes an experiment (name, path or module), or any command. Each
worker gets a TF_CONFIG with free ports. An experiment also gets
--strategy=multi_worker, unless it has a --strategy. The output of worker 0
is shown; --logs has the output of every worker. SIGTERM and Ctrl-C go to
all workers, which stop together at the same step. If a worker dies or
hangs, all workers are stopped and restarted; with a --workdir they resume
from the last checkpoint. Exit codes: 0 all done; 2 wrong flags; 130, 143
stopped by a signal; 75 given up; otherwise that of the workers.
"""

import argparse
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from looptape.experiments.cluster import tf_config
from looptape.experiments.tools import listing

GIVEN_UP = 75
_POLL_SECONDS = 0.1
# Codes after which a new start would end in the same way: wrong flags, a command that is not there or cannot be run.
HOPELESS = (2, 126, 127)


def parse(arguments):
    """Parses a command line into (options, command). A mistake exits with code 2 and a message."""
    parser = argparse.ArgumentParser(
        "looptape cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=at_least(int, 1), required=True, help="number of processes to start")
    add("--start_seconds", type=at_least(float, 1), default=120.0, help="time limit for all workers to connect")
    add(
        "--grace_seconds",
        type=at_least(float, 0),
        default=20.0,
        help="time from the exit of one to kill -9 of the others",
    )
    add("--hang_seconds", type=at_least(float, 0), default=900.0, help="time without a sign of life; 0 for no limit")
    add("--restarts", type=at_least(int, 0), default=3, help="restarts of all workers after a loss")
    add("--logs", default=None, help="directory of worker-0.log, …; a temporary one by default")
    if "--" not in arguments:
        if not {"-h", "--help"} & set(arguments):
            parser.error("there is no command; write it after --, e.g. -- adding_problem")
        arguments = [*arguments, "--"]
    split = arguments.index("--")
    options, command = parser.parse_args(arguments[:split]), list(arguments[split + 1 :])
    if not command:
        parser.error("the command after -- is empty; write e.g. -- adding_problem")
    try:
        command, is_experiment = resolved(command)
    except listing.NotAnExperiment as error:
        parser.error(str(error))
    if is_experiment and not any(part.startswith("--strategy") for part in command):
        command.append("--strategy=multi_worker")
    return options, command


def resolved(command):
    """Returns (command, whether it is an experiment's) for the words after `--`. Resolves an experiment's name.

    >>> resolved(["adding_problem", "--steps=5"])[0][1:], resolved(["sleep", "1"])
    ((['-m', 'looptape.experiments.adding_problem', '--steps=5'], (['sleep', '1'], False))
    """
    first, rest = command[0], command[1:]
    if os.path.basename(first).startswith("python"):
        target = (
            rest[1] if rest[:1] == ["-m"] and len(rest) > 1 else rest[0] if rest and rest[0].endswith(".py") else ""
        )
        try:
            listing.find(target)
        except listing.NotAnExperiment:
            return command, False
        return command, True
    if shutil.which(first):
        return command, False
    try:
        return [*listing.find(first).command, *rest], True
    except listing.NotAnExperiment as error:
        if first.endswith(".py") or "Did you mean" in str(error):
            raise
        return command, False  # what is neither is answered where it cannot be started


def at_least(kind, least):
    def number(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= least:
            raise argparse.ArgumentTypeError(f"{text!r} was given; it must be a number of at least {least}")
        return value

    return number


class Worker:
    """One process in its own process group, with a log and a file for its signs of life."""

    def __init__(self, rank, command, addresses, directory, options):
        self.rank = rank
        self.log = os.path.join(directory, f"worker-{rank}.log")
        self._heartbeat = os.path.join(directory, f".heartbeat-{rank}")
        if os.path.exists(self._heartbeat):
            os.remove(self._heartbeat)
        environment = {
            **os.environ,
            "TF_CONFIG": tf_config.make(addresses, rank),
            "TF_GRPC_REUSE_PORT": "true",  # the ports are kept for it, see `kept_ports`
            "LOOPTAPE_HEARTBEAT": self._heartbeat,
            "LOOPTAPE_START_SECONDS": str(options.start_seconds),
            "PYTHONUNBUFFERED": "1",
        }
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=environment, start_new_session=True, **pipe)
        self._copier = threading.Thread(target=self._copy, daemon=True)
        self._copier.start()

    def _copy(self):
        with open(self.log, "ab") as file:
            for line in self._process.stdout:
                file.write(line)
                file.flush()
                if self.rank == 0:
                    sys.stdout.buffer.write(line)
                    sys.stdout.flush()

    @property
    def code(self):
        """The exit code as a shell reports it, or None."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def started(self):
        """Whether it has connected to the others."""
        return os.path.exists(self._heartbeat)

    def silent_seconds(self):
        """Seconds since its last sign of life."""
        return time.time() - os.path.getmtime(self._heartbeat)

    def step(self):
        """The last step that it reported, or None."""
        try:
            with open(self._heartbeat) as file:
                return int(file.read())
        except (OSError, ValueError):
            return None

    def send(self, number):
        """Sends a signal to the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self):
        self._process.wait()
        self._copier.join(timeout=5)

    def describe(self):
        """Returns its state in words, with its rank and its last step."""
        step = self.step()
        after = "before the first step" if step is None else f"after step {step:,}"
        code = self.code
        if code is None:
            return f"worker {self.rank} runs, {after}"
        names = {128 + number.value: f" ({number.name})" for number in signal.Signals}
        return f"worker {self.rank} ended {after} with code {code}{names.get(code, '')}"


class Cluster:
    """All workers of one start.

    Args:
        options: options of the command line.
        command: command of each worker.
        directory: directory of the logs.
        ports: one port for each worker.
    """

    def __init__(self, options, command, directory, ports):
        self._options = options
        addresses = [f"localhost:{port}" for port in ports]
        self.workers = [Worker(rank, command, addresses, directory, options) for rank in range(options.workers)]
        self._begun = time.monotonic()

    def watch(self, received):
        """Waits until all workers have ended, or one is lost. Returns (code, what happened).

        Args:
            received: list of received signals to pass on; a signal handler appends to it.
        """
        passed, deadline, why, killed = 0, None, None, set()
        while any(worker.code is None for worker in self.workers):
            if len(received) > passed:
                passed = len(received)
                for worker in self.workers:
                    worker.send(received[-1])
                deadline = deadline or time.monotonic() + self._options.grace_seconds
            ended = [worker for worker in self.workers if worker.code is not None]
            lost = [worker for worker in ended if worker.code]
            why = why or self._problem(lost)
            if why or ended:
                deadline = deadline or time.monotonic() + (0 if why and not lost else self._options.grace_seconds)
            if deadline is not None and time.monotonic() >= deadline:
                why = why or self._overdue(received)
                killed |= {worker.rank for worker in self.workers if worker.code is None}
                self.kill()
            time.sleep(_POLL_SECONDS)
        self.close()
        # What the launcher itself ended has no reason of its own: its 137 would look like one.
        codes = [GIVEN_UP if worker.rank in killed else worker.code for worker in self.workers]
        lost = [worker for worker in self.workers if worker.code]
        return _joint_code(codes, why), why or (lost[0].describe() if lost else "")

    def _problem(self, lost):
        """Returns the problem of the workers in words, or None."""
        if lost:
            return lost[0].describe()
        missing = [worker.rank for worker in self.workers if not worker.started]
        waited = time.monotonic() - self._begun
        if missing and waited > self._options.start_seconds:
            return f"workers {missing} had not connected to the others after {waited:.0f} s"
        limit = self._options.hang_seconds
        hung = [w for w in self.workers if limit and not missing and w.code is None and w.silent_seconds() > limit]
        return f"{hung[0].describe()}, but gave no sign of life for {limit:.0f} s" if hung else None

    def _overdue(self, received):
        running = [worker.describe() for worker in self.workers if worker.code is None]
        after = f"{signal.Signals(received[-1]).name} to all" if received else "the others had ended"
        return f"{'; '.join(running)}: {self._options.grace_seconds:.0f} s after {after}"

    def kill(self):
        """Kills the remaining workers: one that waits inside TensorFlow does not react to anything else."""
        for worker in self.workers:
            worker.send(signal.SIGKILL)

    def close(self):
        for worker in self.workers:
            worker.close()


def _joint_code(codes, why):
    """Returns one exit code for all: one that a restart cannot fix first, then their own, then a loss.

    >>> _joint_code([3, 3], "both ended"), _joint_code([3, GIVEN_UP], "one ended, one was killed")
    (3, 75)
    """
    for hopeless in HOPELESS:
        if hopeless in codes:
            return hopeless
    bad = [code for code in codes if code]
    return bad[0] if bad and len(set(bad)) == 1 else GIVEN_UP if bad or why else 0


@contextlib.contextmanager
def kept_ports(count):
    """Context manager that reserves distinct free ports, so that no other program gets them.

    With TF_GRPC_REUSE_PORT set to "true", TensorFlow shares the reserved ports; otherwise it could not listen on them.
    Another program could take ports that are free but not reserved.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind(("localhost", 0))
        yield [each.getsockname()[1] for each in sockets]


def run(options, command):
    """Runs the command in all workers, with restarts. Returns the exit code."""
    directory = options.logs or tempfile.mkdtemp(prefix="cluster-")
    try:
        os.makedirs(directory, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        _say(f"--logs is {directory!r}, which is not writable ({error}). Choose another directory.")
        return 2
    received = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
    _say(f"{options.workers} workers of: {' '.join(command)}; logs in {directory}")
    for start in range(options.restarts + 1):
        with kept_ports(options.workers) as ports:
            try:
                cluster = Cluster(options, command, directory, ports)
            except OSError as error:
                _say(f"{command[0]!r} cannot be started: {error}. Check the command after --.")
                return 127
            try:
                code, why = cluster.watch(received)
            finally:
                cluster.kill()
        if why:
            _say(why)
        if received:
            return 128 + received[-1]
        if code == 0:
            return 0
        if code in HOPELESS:
            _say(f"a restart would fail the same way; the last lines of {cluster.workers[0].log} say why")
            return code
        if start < options.restarts:
            _say(f"restarting all workers ({start + 1} of at most {options.restarts})")
    _say(f"gave up after {options.restarts} restarts; see {directory}")
    return code or GIVEN_UP


def _say(text):
    print(f"cluster: {text}", file=sys.stderr, flush=True)


def main(arguments):
    """Runs the command line `arguments`, without the program's name. Returns the exit code."""
    return run(*parse(arguments))
