"""Every exception class that users meet can be imported from `looptape.errors` and is in the reference."""

import ast
import builtins
from pathlib import Path

import looptape
from looptape import errors

ROOT = Path(__file__).resolve().parent.parent


def _raised_to_users():
    """Names of the exception classes in the library whose docstring does not call them internal."""
    for path in sorted(ROOT.glob("trainer/**/*.py")) + sorted(ROOT.glob("experiments/launch/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = [getattr(builtins, base.id, object) for base in node.bases if isinstance(base, ast.Name)]
                exceptional = any(issubclass(base, BaseException) for base in bases if isinstance(base, type))
                if exceptional and "Internal" not in (ast.get_docstring(node) or ""):
                    yield node.name


def test_errors_that_users_meet_are_exported_and_documented():
    assert sorted(_raised_to_users()) == errors.__all__
    reference = (ROOT / "docs/reference/trainer.md").read_text()
    for name in errors.__all__:
        found = getattr(errors, name)
        assert issubclass(found, BaseException) and found.__doc__
        prefix = "looptape" if hasattr(looptape, name) else "looptape.errors"
        assert f".. autoclass:: {prefix}.{name}\n" in reference


def test_an_error_of_a_run_is_caught_by_its_public_name():
    import keras
    import numpy as np
    import pytest

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    trainer = looptape.Trainer(model, "sgd", {"error": "mse"})
    trainer.on_nonfinite = "raise"
    bad = np.full([4, 1], np.nan, np.float32)
    with pytest.raises(errors.NonFiniteUpdates, match="The update of step 0 is not finite"):
        trainer.fit((bad, bad), steps=1, progress=False)
