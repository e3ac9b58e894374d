"""Starts the workers of an experiment by Ray, on the machines of a Ray cluster. Needs `pip install looptape[ray]`.

    python -m experiments.ray_cluster --workers=2 -- experiments.adding_problem --workdir=/shared/runs/two

Ray places the workers and sets TF_CONFIG; each runs the same command as under any other scheduler. After a loss Ray
starts all again, and they go on from the last checkpoint in --workdir, which all machines must see. An experiment that
is not installed is found if its directory is on all machines, too.
"""

import argparse
import os
import subprocess
import sys


def command(arguments):
    """What each worker runs, from what stands after `--`.

    >>> command(["experiments.adding_problem", "--steps=5"])[1:]
    ['-m', 'experiments.adding_problem', '--steps=5', '--strategy=multi_worker']
    """
    return [sys.executable, "-m", *arguments, "--strategy=multi_worker"]


def work(config):
    """Runs in each worker of Ray's, where TF_CONFIG is set: a process of its own, so that the workers join first."""
    # Ray's workers begin in a directory of Ray's; the experiment is found, and writes, where it was launched.
    directory = config["directory"] if os.path.isdir(config["directory"]) else None
    done = subprocess.run(config["command"], cwd=directory, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(config['command'])}` ended with code {done.returncode}; its log says why.")


def run(workers, arguments, restarts=3):
    """Runs an experiment on so many workers; `arguments` are its module and its flags."""
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.tensorflow import TensorflowTrainer
    except ImportError as error:
        raise ImportError(
            f"Ray cannot be imported ({error}); it is an optional dependency. Install it by `pip install "
            "looptape[ray]`, or use `python -m experiments.cluster` on one machine."
        ) from error
    return TensorflowTrainer(
        work,
        train_loop_config={"command": command(arguments), "directory": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=restarts)),
    ).fit()


def main(arguments):
    parser = argparse.ArgumentParser("python -m experiments.ray_cluster", description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--restarts", type=int, default=3)
    if "--" not in arguments[:-1]:
        parser.error("there is no experiment; write it after --, e.g. -- experiments.adding_problem --steps=100")
    split = arguments.index("--")
    options = parser.parse_args(arguments[:split])
    run(options.workers, arguments[split + 1 :], options.restarts)


if __name__ == "__main__":
    main(sys.argv[1:])
