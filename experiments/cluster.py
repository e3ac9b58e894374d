"""Starts several workers of one command on this machine, watches them, and starts all again after a loss.

    python -m experiments.cluster --workers=2 -- python -m experiments.adding_problem --workdir=runs/two

Each worker gets a TF_CONFIG with free ports. An experiment gets --strategy=multi_worker, if it has no --strategy. What
worker 0 prints is shown; what each prints is kept in --logs. SIGTERM and Ctrl-C go to all workers, which stop together
at one step. If a worker dies or freezes, all are ended and started again; with a --workdir they go on from the last
checkpoint. Exit codes: 0 all done; 2 wrong flags; 130, 143 stopped by a signal; 75 given up; else that of the workers.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from experiments import tf_config

GIVEN_UP = 75
_POLL_SECONDS = 0.1
# Codes after which a new start would end in the same way: wrong flags, a command that is not there or cannot be run.
_HOPELESS = (2, 126, 127)


def parse(arguments):
    """(options, command) of a command line; a mistake ends the program with code 2 and a sentence."""
    parser = argparse.ArgumentParser(
        "python -m experiments.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=_at_least(int, 1), required=True, help="processes to start")
    add("--start_seconds", type=_at_least(float, 1), default=120.0, help="in which all must have found each other")
    add("--grace_seconds", type=_at_least(float, 0), default=20.0, help="between the end of one and kill -9 for others")
    add("--hang_seconds", type=_at_least(float, 0), default=900.0, help="without a sign of life, or 0 for ever")
    add("--restarts", type=_at_least(int, 0), default=3, help="new starts of all workers after a loss")
    add("--logs", default=None, help="directory of worker-0.log, …; a temporary one by default")
    if "--" not in arguments:
        if not {"-h", "--help"} & set(arguments):
            parser.error("there is no command; write it after --, e.g. -- python -m experiments.adding_problem")
        arguments = [*arguments, "--"]
    split = arguments.index("--")
    options, command = parser.parse_args(arguments[:split]), list(arguments[split + 1 :])
    if not command:
        parser.error("the command after -- is empty; write e.g. -- python -m experiments.adding_problem")
    is_experiment = any(part.startswith("experiments.") for part in command)
    if is_experiment and not any(part.startswith("--strategy") for part in command):
        command.append("--strategy=multi_worker")
    return options, command


def _at_least(kind, least):
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
    """One process, in a group of its own, with a log and a file for its signs of life."""

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
        """The exit code, as a shell has it, or None."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def started(self):
        """Whether it has found the others."""
        return os.path.exists(self._heartbeat)

    def silent_seconds(self):
        """Seconds since its last sign of life."""
        return time.time() - os.path.getmtime(self._heartbeat)

    def step(self):
        """Updates made when it last said so, or None."""
        try:
            with open(self._heartbeat) as file:
                return int(file.read())
        except (OSError, ValueError):
            return None

    def send(self, number):
        """Sends a signal to the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self):
        self._process.wait()
        self._copier.join(timeout=5)

    def describe(self):
        """How it ended or is, with its rank and its last step."""
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
        options: of the command line.
        command: of each worker.
        directory: of the logs.
        ports: one for each worker.
    """

    def __init__(self, options, command, directory, ports):
        self._options = options
        addresses = [f"localhost:{port}" for port in ports]
        self.workers = [Worker(rank, command, addresses, directory, options) for rank in range(options.workers)]
        self._begun = time.monotonic()

    def watch(self, received):
        """Waits until all have ended, or until that is not to be expected. Returns (code, what happened).

        Args:
            received: list to which signals to pass on are appended.
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
        """What is wrong with the workers, in words, or None."""
        if lost:
            return lost[0].describe()
        missing = [worker.rank for worker in self.workers if not worker.started]
        waited = time.monotonic() - self._begun
        if missing and waited > self._options.start_seconds:
            return f"workers {missing} had not found the others after {waited:.0f} s"
        limit = self._options.hang_seconds
        hung = [w for w in self.workers if limit and not missing and w.code is None and w.silent_seconds() > limit]
        return f"{hung[0].describe()}, but gave no sign of life for {limit:.0f} s" if hung else None

    def _overdue(self, received):
        running = [worker.describe() for worker in self.workers if worker.code is None]
        after = f"{signal.Signals(received[-1]).name} to all" if received else "the others had ended"
        return f"{'; '.join(running)}: {self._options.grace_seconds:.0f} s after {after}"

    def kill(self):
        """Ends what is left: a worker that waits for another inside TensorFlow listens to nothing else."""
        for worker in self.workers:
            worker.send(signal.SIGKILL)

    def close(self):
        for worker in self.workers:
            worker.close()


def _joint_code(codes, why):
    """One exit code for all: what is hopeless first, then the reason of their own, then a loss.

    >>> _joint_code([3, 3], "both ended"), _joint_code([3, GIVEN_UP], "one ended, one was killed")
    (3, 75)
    """
    for hopeless in _HOPELESS:
        if hopeless in codes:
            return hopeless
    bad = [code for code in codes if code]
    return bad[0] if bad and len(set(bad)) == 1 else GIVEN_UP if bad or why else 0


@contextlib.contextmanager
def kept_ports(count):
    """A context with free ports, each once, that no other program gets before its end.

    TensorFlow shares them if TF_GRPC_REUSE_PORT is "true": without that it could not listen on a port that is kept, and
    with ports that are free but not kept another program might be faster.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind(("localhost", 0))
        yield [each.getsockname()[1] for each in sockets]


def free_ports(count):
    """Ports that nobody listens on now, each once. Another program may get them meanwhile; see `kept_ports`."""
    with kept_ports(count) as ports:
        return ports


def run(options, command):
    """Runs the command in all workers, with new starts. Returns the exit code."""
    directory = options.logs or tempfile.mkdtemp(prefix="cluster-")
    try:
        os.makedirs(directory, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        _say(f"--logs is {directory!r}, where nothing can be written ({error}). Choose a directory of your own.")
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
        if code in _HOPELESS:
            _say(f"all workers would end so again; the last lines of {cluster.workers[0].log} say why")
            return code
        if start < options.restarts:
            _say(f"all workers are started again ({start + 1} of at most {options.restarts})")
    _say(f"given up after {options.restarts} new starts; see {directory}")
    return code or GIVEN_UP


def _say(text):
    print(f"cluster: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run(*parse(sys.argv[1:])))
