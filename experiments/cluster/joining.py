"""`--strategy=multi_worker`: joins the workers that TF_CONFIG names, and leaves them."""

import contextlib
import faulthandler
import functools
import inspect
import os
import sys
import time
import traceback

import tensorflow as tf

from looptape.experiments.cluster import environment, heartbeat, tf_config
from looptape.experiments.launch.flags import flag_lines
from looptape.experiments.launch.options import Refused
from looptape.trainer.distribution import exchange
from looptape.trainer.distribution import workers as processes
from looptape.trainer.distribution.workers import WorkerLost

# Seconds that workers wait for each other; LOOPTAPE_START_SECONDS in the environment says otherwise.
_START_SECONDS = 300
_PULL_SECONDS = 1.0  # in which others fetch their part of the last collective operation from this process
# After which a silent worker counts as lost. TensorFlow's 10 s made survivors end after 7 to 11 s.
_HEARTBEAT_SECONDS = 6.0
_RAISE_SECONDS = 3.0  # in which `fit`, if it waits for a lost worker, can say at which step, before the process ends
LOST = 75  # the exit code of a worker that lost another: "try again", as sendmail has it


def join():
    """Waits for the other workers, up to a limit, and returns the strategy. Call it before any TensorFlow operation."""
    try:
        count, rank = tf_config.check(os.environ.get("TF_CONFIG"))
    except ValueError as error:
        raise Refused(f"`strategy` is multi_worker: {error}") from None
    seconds = environment.seconds("LOOPTAPE_START_SECONDS", _START_SECONDS, zero=False)
    print(f"worker {rank} of {count} waits up to {seconds:.0f} s for the others", file=sys.stderr, flush=True)
    # A watchdog in C, because TensorFlow waits in C++: neither signals nor other threads of Python come through.
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        _leave_a_thread_to_send()
        with _losses_noticed_within(_HEARTBEAT_SECONDS):
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
        _begin_heartbeat(strategy)
        return strategy
    except RuntimeError as error:
        raise RuntimeError(
            f"`strategy` is multi_worker, but TensorFlow has already run operations in this process ({error}). Workers "
            "must join before the first one: start a new process, and make no tensor before `launch.run` or `joined`."
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()


def _leave_a_thread_to_send():
    """Lets the backward pass run while gradients are sent, also where there is one core: an exchange holds a thread."""
    alone = len(os.sched_getaffinity(0)) == 1 if hasattr(os, "sched_getaffinity") else os.cpu_count() == 1
    if alone and not tf.config.threading.get_inter_op_parallelism_threads():
        tf.config.threading.set_inter_op_parallelism_threads(2)


def _begin_heartbeat(strategy):
    """Starts the heartbeat among the workers. A collective call."""
    together = processes.of(strategy)
    started = heartbeat.begin(together, together.hosts, _end)
    processes.heartbeats[:] = [] if started is None else [started]


def _end(sentence):
    """Ends a worker that has lost another one, from the heartbeat's thread."""
    if exchange.abort_all(sentence.partition(". Start all")[0]):
        time.sleep(_RAISE_SECONDS)
    leave(WorkerLost(sentence), os.path.basename(sys.argv[0]))


@contextlib.contextmanager
def joined():
    """Context manager for your own program: yields the strategy of all workers, and ends the process on exit.

    Without TF_CONFIG the strategy covers only this process, so that you can try the program.
    """
    name = os.path.basename(sys.argv[0])
    try:
        yield join() if os.environ.get("TF_CONFIG") else tf.distribute.MultiWorkerMirroredStrategy()
    except BaseException as error:
        leave(error, name)
    leave()


@contextlib.contextmanager
def _losses_noticed_within(seconds):
    """Context in which new strategies detect lost workers sooner.

    TensorFlow has no public setting for it. If the private one is missing, TensorFlow's own timeout applies.
    """
    from tensorflow.python.eager import context

    present = context.context()
    configure = getattr(present, "configure_coordination_service", None)
    if configure is None or "heartbeat_timeout_in_ms" not in inspect.signature(configure).parameters:
        yield
        return
    present.configure_coordination_service = functools.partial(configure, heartbeat_timeout_in_ms=int(1e3 * seconds))
    try:
        yield
    finally:
        del present.configure_coordination_service


def check_flags(workers, config):
    """Raises `Refused` if workers were started with different flags. A collective call."""
    texts = [text.split("\n") for text in workers.share_texts("\n".join(flag_lines(config)))]
    for rank, lines in enumerate(texts):
        different = set(lines) ^ set(texts[0])
        if different:
            own, first = (" ".join(line for line in each if line in different) for each in (lines, texts[0]))
            raise Refused(
                f"The workers were started with different flags: worker 0 has {first}, worker {rank} has {own}. Start "
                "all workers with the same command."
            )


def leave(error=None, name=""):
    """Exits a worker immediately. A normal exit would wait inside TensorFlow for workers that are already gone."""
    if isinstance(error, Refused | WorkerLost):
        print(f"{name}: {error}", file=sys.stderr)
    elif isinstance(error, Exception):
        traceback.print_exception(error)
    elif isinstance(error, SystemExit) and isinstance(error.code, str):
        print(error.code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if _code(error) == 0:
        for beat in processes.heartbeats:
            beat.close()
    if not isinstance(error, WorkerLost):
        time.sleep(_PULL_SECONDS)
    os._exit(_code(error))


def _code(error):
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return {Refused: 2, WorkerLost: LOST, KeyboardInterrupt: 130}.get(type(error), 1)
