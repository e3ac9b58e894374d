"""Every experiment that is listed: four steps at once, and two, a crash and a restart, end with the same bits."""

import dataclasses
import importlib

import keras
import numpy as np
import pytest

from looptape import launch
from looptape.experiments.launch.runner import experiment_name
from looptape.experiments.tools import listing
from looptape.trainer.summaries import event_writer

# What makes an experiment small; one that is not named here runs with its defaults and a small batch.
TINY = {
    "adding_problem": {"length": 6, "units": 3, "eval_examples": 4},
    "char_lm": {"characters": 600, "held_out": 60, "bptt_window": 5, "units": 4},
    "copy_memory": {"delay": 3, "units": 6, "eval_examples": 4},
    "echo": {"length": 5, "near": 1, "far": 2, "units": 3, "eval_examples": 4},
    "gan": {"units": 6, "latent_size": 2, "eval_examples": 8},
    "helmholtz": {"units": 5, "grid": 3},
    "multi_task": {"units": 4, "eval_examples": 4},
    "policy_gradient": {"units": 4, "length": 5, "eval_episodes": 2},
    "sequential_mnist": {"pool": 14, "pixels": 1, "units": 3},
    "sorting": {"length": 4, "digits": 5, "units": 8, "heads": 2, "layers": 1, "eval_examples": 4},
    "temporal_order": {"length": 10, "units": 3, "eval_examples": 4},
    "vae": {"units": 6, "latent": 2, "eval_examples": 16},
}


class Crash(Exception):
    pass


class CrashAt(keras.callbacks.Callback):
    """Ends training by an error after a step."""

    remembers = False

    def __init__(self, trainer, step):
        super().__init__()
        self._trainer, self._step = trainer, step

    def on_train_batch_end(self, batch, logs=None):
        if self._trainer._engine.counters.step == self._step:
            raise Crash


def images(path):
    """A file like Keras's mnist.npz, with forty noisy images."""
    generator = np.random.default_rng(0)
    parts = {}
    for part, count in (("train", 30), ("test", 10)):
        parts[f"x_{part}"] = generator.integers(0, 256, (count, 28, 28)).astype("uint8")
        parts[f"y_{part}"] = (np.arange(count) % 10).astype("uint8")
    np.savez(path, **parts)
    return str(path)


def train(module, config, crash_at=None):
    """[(name, array)] of everything that a run moves: the model, the optimizers, averages, the combiner's state."""
    made = []

    def build(config):
        made.append(module.build(config))
        crash = (CrashAt(made[0].trainer, crash_at),) if crash_at else ()
        return dataclasses.replace(made[0], callbacks=(*made[0].callbacks, *crash))

    launch.run(config, build, name=experiment_name(module), show=False)
    trainer = made[0].trainer
    assert trainer._engine.counters.step == 4
    state = list(trainer.model.variables)
    for minimizer in trainer._engine.minimizers.values():
        state += [*minimizer.optimizer.variables, *(minimizer.pipeline.averages or ()), *minimizer.combiner.variables]
    return [(variable.name, np.array(variable)) for variable in state]


def beginning(module, config):
    """[array] of the model's variables before the first step."""
    keras.utils.set_random_seed(config.seed)
    return [np.array(variable) for variable in module.build(config).trainer.model.variables]


def shown(workdir):
    """[(step, run, tag), …] of what TensorBoard shows, none of them twice."""
    found = [
        (step, run, value.tag)
        for run in ("train", "eval", "shown")
        for step, value in event_writer.read(workdir / run)
        if step  # what describes the run has none
    ]
    assert len(found) == len(set(found))
    return sorted(found)


# One for each kind of update; the others are long tests.
QUICK = {"adding_problem", "char_lm", "gan", "helmholtz", "policy_gradient"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in listing.experiments()],
)
def test_two_steps_a_crash_and_a_restart_equal_four_steps(name, tmp_path):
    module = importlib.import_module(f"looptape.experiments.{name}")
    options = {"steps": 4, "batch_size": 4, "checkpoint_every": 2, "eval_every": 2, "log_every": 1, "probe_every": 0}
    options |= {"jit_compile": False, "limit_eval_batches": 1, **TINY.get(name, {})}
    if name == "sequential_mnist":
        options["data_path"] = images(tmp_path / "images.npz")
    if name == "char_lm":
        options["corpus"] = __file__

    def config(run):
        return module.Config(workdir=str(tmp_path / run), **options)

    whole = train(module, config("whole"))
    with pytest.raises(Crash):
        train(module, config("crashed"), crash_at=3)
    again = train(module, config("crashed"))

    for (path, expected), (_, found) in zip(whole, again, strict=True):
        np.testing.assert_array_equal(found, expected, err_msg=path)
    before = beginning(module, config("none"))
    moved = [not np.array_equal(value, after) for value, (_, after) in zip(before, whole, strict=False)]
    assert sum(moved) > len(before) / 2
    assert shown(tmp_path / "whole") == shown(tmp_path / "crashed") != []
