"""Every docstring example runs, and every public name has one."""

import doctest
import importlib
import inspect
import pkgutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import launch, losses, models, trainer
from looptape.trainer.analysis import plots
from looptape.trainer.trainer import Trainer

MODULES = [
    *(
        name
        for package in (losses, models)
        for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ),
    "looptape.trainer.trainer",
    "looptape.trainer.hooks",
    "looptape.trainer.examination",
    "looptape.trainer.probing.probe_calls",
    "looptape.trainer.analysis.plots",
    "looptape.experiments.launch.runner",
    "looptape.experiments.launch.factories",
    "looptape.experiments.launch.results_table",
    "looptape.experiments.launch.config",
    "looptape.experiments.launch.options",
    "looptape.experiments.launch.workdir",
]
PICTURES = ["credit", "gains", "norms", "over_training", "shares"]
# Without an example: base classes, and what ends the process.
EXEMPT = {"Combiner", "Schedule", "main"}


def a_trainer():
    """What the examples of methods begin with."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((6, 2)), keras.layers.LSTM(3, return_sequences=True, name="lstm"), keras.layers.Dense(1)]
    made = Trainer(keras.Sequential(layers), keras.optimizers.Adam(0.01), {"error": losses.squared_error})
    x = np.random.default_rng(0).normal(size=(8, 6, 2)).astype("float32")
    return {"trainer": made, "batch": (x, x[:, :, :1]), "data": tf.data.Dataset.from_tensors((x, x[:, :, :1]))}


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    common = {"keras": keras, "tf": tf, "np": np, "losses": losses, "Trainer": Trainer}
    with_a_trainer = name in ("looptape.trainer.trainer", "looptape.trainer.hooks", "looptape.trainer.examination")
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, name, module=module):
        if example.examples:
            example.globs.update({**common, **(a_trainer() if with_a_trainer else {})})
            runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


def public():
    """{name: object} of everything that the guides tell people to use."""
    found = {f"losses.{name}": getattr(losses, name) for name in losses.__all__}
    found |= {f"models.{name}": getattr(models, name) for name in models.__all__}
    found |= {f"trainer.{name}": getattr(trainer, name) for name in trainer.__all__}
    found |= {f"launch.{name}": getattr(launch, name) for name in launch.__all__}
    found |= {f"pictures.{name}": getattr(plots, name) for name in PICTURES}
    for owner in (Trainer, *(base for base in Trainer.__mro__ if base.__name__ in ("Hooks", "Examination"))):
        methods = {name: value for name, value in vars(owner).items() if inspect.isfunction(value)}
        found |= {f"Trainer.{name}": value for name, value in methods.items() if not name.startswith("_")}
    return found


@pytest.mark.parametrize("name", public())
def test_public_names_have_an_example(name):
    doc = public()[name].__doc__
    assert doc and (name.rpartition(".")[2] in EXEMPT or ">>>" in doc)


@pytest.mark.parametrize("package", [losses, models], ids=lambda package: package.__name__)
def test_all_is_sorted_and_complete(package):
    assert package.__all__ == sorted(package.__all__)
    names = {name for name, value in vars(package).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert names == set(package.__all__)


def test_examples_of_losses_are_found():
    """The losses are objects, not functions: doctest must still see their examples."""
    module = importlib.import_module("looptape.losses.functions.regression")
    found = {test.name for test in doctest.DocTestFinder().find(module, module=module) if test.examples}
    assert "looptape.losses.functions.regression.huber" in found
