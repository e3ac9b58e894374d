"""Imports point one way: losses ← trainer ← models ← experiments; the dashboard stands alone."""

import ast
import collections
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from docs import make_map
from trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
OURS = ("losses", "trainer", "models", "experiments", "dashboard", "benchmarks", "tests")
ALLOWED = {
    "losses": set(),
    "dashboard": set(),
    "trainer": {"losses", "dashboard"},
    "models": {"trainer", "losses"},
    "experiments": {"losses", "trainer", "models", "dashboard"},
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files, f"{package} has no modules"
    for path in files:
        for module in imports(path):
            top = module.split(".")[0]
            if top in OURS and top != package:
                assert top in ALLOWED[package], f"{path.relative_to(ROOT)} imports {module}"
                if top == "dashboard":
                    assert module.startswith("dashboard.metadata"), f"{path} imports {module}"


def test_the_dashboard_imports_neither_tensorflow_nor_keras():
    """An import error in a plugin stops TensorBoard from starting, and TensorBoard runs without TensorFlow."""
    for path in (ROOT / "dashboard").rglob("*.py"):
        assert not {"tensorflow", "keras"} & {module.split(".")[0] for module in imports(path)}, path


def test_the_map_in_the_guide_is_that_of_the_imports():
    """Within the trainer, too, imports point one way: `layers` finds an order."""
    text = make_map.GUIDE.read_text()
    assert make_map.updated(text) == text, "run `python -m docs.make_map`"
    assert text.count("| `trainer.") == len(make_map.modules("trainer")) - 1  # the package itself is not listed


def test_the_map_knows_every_package():
    assert {name: edges <= ALLOWED[name] for name, edges in make_map.package_edges().items()} == dict.fromkeys(
        ALLOWED, True
    )


def test_one_batch_crosses_ten_files_and_less_than_a_thousand_lines(tmp_path):
    """The road from `fit` to the event file that the guide names: all of it is used, and it is short."""
    road = make_map.GUIDE.read_text().split("follow one batch:")[1].split("On this road")[0]
    files = [ROOT / "trainer" / name for name in re.findall(r"`(?:trainer/)?(\w+\.py)`", road)]
    seen = collections.defaultdict(set)

    def trace(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if path not in files:
            return None
        seen[path].add(frame.f_lineno)
        return trace

    x = np.ones([8, 3], "float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    trainer = Trainer(model, "sgd", {"error": "mse"})
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        trainer.fit((x, x[:, :1]), steps=1, workdir=tmp_path, progress=False)
    finally:
        sys.settrace(before)
    assert len(files) == 10 and set(seen) == set(files)
    assert 300 < sum(map(len, seen.values())) < 1000
