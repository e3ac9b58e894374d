"""One name to import, `looptape`; the checkout's short names are the same objects; nothing is loaded without need."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from looptape import _versions

ROOT = Path(__file__).resolve().parent.parent


def printed(code, directory=ROOT):
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.strip()


def test_short_names_are_aliases_and_no_module_exists_twice():
    code = """
import trainer, losses, models, experiments, dashboard
import trainer.recurrent.core, losses.schedules, experiments.launch.config, dashboard.metadata
import looptape, looptape.trainer.recurrent.core, looptape.losses.schedules, looptape.experiments.launch.config, sys
from trainer import Trainer, probe
assert Trainer is looptape.Trainer and probe is looptape.probe and losses is looptape.losses
files = {}
for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None)
    if file and name.split(".")[0] in ("trainer", "losses", "models", "experiments", "dashboard", "looptape"):
        files.setdefault(file, set()).add(id(module))
        assert module.__name__.startswith("looptape") and module.__spec__.name == module.__name__, name
assert len(files) > 50 and all(len(copies) == 1 for copies in files.values())
print("once")
"""
    assert printed(code) == "once"


def test_importing_looptape_and_the_plugin_loads_no_tensorflow():
    code = (
        "import sys, looptape, looptape.dashboard.plugin, looptape.experiments.tools.sweep, looptape._command;"
        "print(sorted({'tensorflow', 'keras'} & set(sys.modules)))"
    )
    assert printed(code) == "[]"


def test_importing_looptape_imports_nothing_else():
    """Not even `typing`, which takes twenty times as long as the rest; -S leaves out what site-packages import."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); old = set(sys.modules); import looptape; "
    code += "print(sorted(set(sys.modules) - old))"
    run = subprocess.run([sys.executable, "-S", "-c", code], cwd="/", capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "['looptape']", run.stderr[-2000:]


def test_every_public_name_is_there():
    code = (
        "import looptape; print([n for n in looptape.__all__ if getattr(looptape, n, None) is None], "
        "set(looptape.__all__) <= set(dir(looptape)))"
    )
    assert printed(code) == "[] True"


def test_an_unknown_name_is_answered_with_those_there_are():
    code = "import looptape\ntry: looptape.Trainr\nexcept AttributeError as error: print(error)"
    assert "has no attribute 'Trainr'; it has IndexedData" in printed(code)


def test_a_project_with_modules_of_the_same_names_is_left_alone(tmp_path):
    trap = "raise ImportError('a file of the project was imported')"
    for name in ("trainer.py", "losses.py", "models/__init__.py", "experiments/__init__.py", "dashboard/__init__.py"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(trap)
    code = f"import sys; sys.path.append({str(ROOT)!r}); import looptape; print(looptape.Trainer.__name__)"
    assert printed(code, tmp_path) == "Trainer"


def test_the_plugin_loads_where_tensorflow_is_absent():
    code = (
        "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = None\n"
        "from looptape.dashboard import plugin; print(plugin.GradientFlowLoader.__name__)"
    )
    assert printed(code) == "GradientFlowLoader"


def test_a_half_installed_package_is_answered(tmp_path):
    shutil.copytree(ROOT / "looptape", tmp_path / "looptape", ignore=shutil.ignore_patterns("trainer", "__pycache__"))
    code = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]  # they find the checkout
import looptape
try: looptape.Trainer
except ImportError as error: print(error)"""
    said = printed(code, tmp_path)
    assert "is not fully installed in" in said and "there is no module 'looptape.trainer'" in said
    assert "Reinstall it with `pip install --force-reinstall looptape`." in said


def test_versions_that_nobody_tried_are_named():
    with pytest.warns(UserWarning, match=r"TensorFlow 2\.20\.0 with Keras 3\.15\.1 was never tried.*2\.20 with 3\.11"):
        _versions.warn_of_untried("2.20.0", "3.15.1")


def test_the_guide_lists_the_versions_that_were_tried():
    rows = re.findall(r"^\| 3\.\d+\.\d+ \| (\d+\.\d+)\S* \| (\d+\.\d+)", (ROOT / "docs/versions.md").read_text(), re.M)
    assert set(rows) == _versions.TRIED


def test_tensorflow_starts_quietly_where_nobody_asked_for_its_lines():
    code = "from looptape import Trainer; import os, tensorflow as tf; tf.ones(1); print(os.environ[LEVEL])"
    code = code.replace("LEVEL", "'TF_CPP_MIN_LOG_LEVEL'")
    kept = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    for told, level in (({}, "2"), ({"TF_CPP_MIN_LOG_LEVEL": "1"}, "1")):
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**kept, **told}, timeout=120
        )
        assert (run.returncode, run.stdout.strip()) == (0, level), run.stderr[-2000:]
        assert told or not run.stderr
