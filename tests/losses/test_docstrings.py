"""Every docstring example runs, and every public name has one (or is a base class)."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import losses

MODULES = ["losses"] + [module.name for module in pkgutil.walk_packages(losses.__path__, "losses.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(verbose=False)
    for example in finder.find(module, name, module=module, extraglobs=None):
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("name", losses.__all__)
def test_public_names_have_an_example(name):
    value = getattr(losses, name)
    base = inspect.isclass(value) and name in ("Combiner", "Schedule")
    assert value.__doc__ and (base or ">>>" in value.__doc__)


def test_all_is_sorted_and_complete():
    assert losses.__all__ == sorted(losses.__all__)
    public = {name for name, value in vars(losses).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(losses.__all__)


def test_examples_of_losses_are_found():
    """The losses are objects, not functions: doctest must still see their examples."""
    module = importlib.import_module("losses.regression")
    found = {test.name for test in doctest.DocTestFinder().find(module, module=module) if test.examples}
    assert "losses.regression.huber" in found
