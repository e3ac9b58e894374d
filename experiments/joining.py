"""`--strategy=multi_worker`: this process joins the others that TF_CONFIG names, and leaves them."""

import contextlib
import faulthandler
import functools
import inspect
import os
import sys
import time
import traceback

import tensorflow as tf

from experiments import tf_config
from experiments.command_line import flag_lines
from experiments.workdirs import Refused
from trainer.workers import WorkerLost

# Seconds that workers wait for each other; LOOPTAPE_START_SECONDS in the environment says otherwise.
_START_SECONDS = 300
_PULL_SECONDS = 1.0  # in which others fetch their part of the last collective operation from this process
# After which a silent worker counts as lost. TensorFlow's 10 s made survivors end after 7 to 11 s.
_HEARTBEAT_SECONDS = 6.0
LOST = 75  # the exit code of a worker that lost another: "try again", as sendmail has it


def join():
    """The strategy of all workers. Waits until they are there, but not for ever. Before any operation of TensorFlow."""
    try:
        count, rank = tf_config.check(os.environ.get("TF_CONFIG"))
    except ValueError as error:
        raise Refused(f"`strategy` is multi_worker: {error}") from None
    seconds = float(os.environ.get("LOOPTAPE_START_SECONDS", _START_SECONDS))
    print(f"worker {rank} of {count} waits for the others, {seconds:.0f} s at most", file=sys.stderr, flush=True)
    # A watchdog in C, because TensorFlow waits in C++: neither signals nor other threads of Python come through.
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        with _losses_noticed_within(_HEARTBEAT_SECONDS):
            return tf.distribute.MultiWorkerMirroredStrategy()
    except RuntimeError as error:
        raise RuntimeError(
            f"`strategy` is multi_worker, but TensorFlow has run operations in this process already ({error}). Workers "
            "join before the first one: start a new process, and make no tensor before `launch.run` or `joined`."
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def joined():
    """A context for a program of your own, with the strategy of all workers; the process ends with it, by `leave`.

    Without TF_CONFIG the strategy is that of this process alone, to try the program.
    """
    name = os.path.basename(sys.argv[0])
    try:
        yield join() if os.environ.get("TF_CONFIG") else tf.distribute.MultiWorkerMirroredStrategy()
    except BaseException as error:
        leave(error, name)
    leave()


@contextlib.contextmanager
def _losses_noticed_within(seconds):
    """A context in which strategies are made whose workers miss each other sooner.

    There is no public way to say so: where the private one is not found, TensorFlow's own patience holds.
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
    """Refuses workers that were started with different flags. A collective call."""
    texts = [text.split("\n") for text in workers.share_texts("\n".join(flag_lines(config)))]
    for rank, lines in enumerate(texts):
        different = set(lines) ^ set(texts[0])
        if different:
            own, first = (" ".join(line for line in each if line in different) for each in (lines, texts[0]))
            raise Refused(
                f"The workers were started with different flags: worker 0 has {first}, worker {rank} has {own}. Start "
                "all workers by the same command."
            )


def leave(error=None, name=""):
    """Ends a worker at once: an orderly exit waits inside TensorFlow for workers that are gone already."""
    if isinstance(error, Refused | WorkerLost):
        print(f"{name}: {error}", file=sys.stderr)
    elif isinstance(error, Exception):
        traceback.print_exception(error)
    elif isinstance(error, SystemExit) and isinstance(error.code, str):
        print(error.code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if not isinstance(error, WorkerLost):
        time.sleep(_PULL_SECONDS)
    os._exit(_code(error))


def _code(error):
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return {Refused: 2, WorkerLost: LOST, KeyboardInterrupt: 130}.get(type(error), 1)
