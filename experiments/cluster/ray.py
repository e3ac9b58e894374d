"""Starts the workers of an experiment on a Ray cluster.

Needs `pip install looptape[ray]`.

    looptape ray --workers=2 -- adding_problem --workdir=/shared/runs/two

Ray places the workers and sets TF_CONFIG; each runs the same command as
under any other scheduler. If a worker is lost, Ray restarts all, and they
resume from the last checkpoint in --workdir, which all machines must see.
An experiment that is not installed must be in the same directory on all
machines.
"""

import argparse
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys

from looptape.experiments.cluster import local
from looptape.experiments.tools import listing

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def command(arguments):
    """Returns the command of each worker, from an experiment's name, path or module and its flags.

    >>> command(["adding_problem", "--steps=5"])[1:]
    ['-m', 'looptape.experiments.adding_problem', '--steps=5', '--strategy=multi_worker']
    """
    return [*listing.find(arguments[0]).command, *arguments[1:], "--strategy=multi_worker"]


def work(config):
    """Runs the command as a new process in each Ray worker, where TF_CONFIG is set, so that workers join first.

    Returns an exit code that a restart would not change; raises an error for any other one, so that Ray restarts all.
    """
    # Ray's workers begin in a directory of Ray's; the experiment is found, and writes, where it was launched.
    directory = config["directory"] if os.path.isdir(config["directory"]) else None
    done = subprocess.run(config["command"], cwd=directory, check=False, preexec_fn=_dying_with_parent())
    if config["returns"] and done.returncode in local.HOPELESS:
        return done.returncode
    if done.returncode:
        raise RuntimeError(f"`{' '.join(config['command'])}` ended with code {done.returncode}; its log says why.")


def _dying_with_parent():
    """Returns what a new process must call to be killed with Ray's, which otherwise leaves it running, or None.

    An old worker that still runs would hold the work directory and the port that the new one needs.
    """
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None).prctl
    return lambda: call(_DEATH_SIGNAL, signal.SIGKILL)


def run(workers, arguments, restarts=3):
    """Runs an experiment on several workers. Returns 0, or the exit code that a restart would not change.

    Args:
        workers: number of workers.
        arguments: the experiment's name, path or module, and its flags.
        restarts: how often Ray restarts all workers at most; -1 for always.
    """
    each = command(arguments)
    try:
        from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
        from ray.train.tensorflow import TensorflowTrainer
    except ImportError as error:
        raise ImportError(
            f"Ray cannot be imported ({error}); it is an optional dependency. Install it with `pip install "
            "looptape[ray]`, or use `looptape cluster` on one machine."
        ) from error
    # Older versions of Ray drop what a worker returns; there, wrong flags are tried again like any other failure.
    returns = "return_value" in {field.name for field in dataclasses.fields(Result)}
    done = TensorflowTrainer(
        work,
        train_loop_config={"command": each, "directory": os.getcwd(), "returns": returns},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=restarts)),
    ).fit()
    return getattr(done, "return_value", None) or 0


def main(arguments):
    parser = argparse.ArgumentParser(
        "looptape ray", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    at_least = local.at_least
    parser.add_argument("--workers", type=at_least(int, 1), required=True, help="number of workers that Ray places")
    parser.add_argument(
        "--restarts", type=at_least(int, -1), default=3, help="restarts of all after a loss; -1 for always (default: 3)"
    )
    if "--" not in arguments[:-1]:
        if not {"-h", "--help"} & set(arguments):
            parser.error("there is no experiment; write it after --, e.g. -- adding_problem --steps=100")
        arguments = [*arguments, "--"]
    split = arguments.index("--")
    options = parser.parse_args(arguments[:split])
    try:
        return run(options.workers, arguments[split + 1 :], options.restarts)
    except listing.NotAnExperiment as error:
        parser.error(str(error))
