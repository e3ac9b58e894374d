"""Imports point one way: losses ← trainer ← models ← experiments; the dashboard stands alone."""

import ast
import collections
import functools
import re
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest

from docs import make_map
from looptape import Trainer

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
            module = module.removeprefix("looptape.")
            top = module.split(".")[0]
            if top in OURS and top != package:
                assert top in ALLOWED[package], f"{path.relative_to(ROOT)} imports {module}"
                if top == "dashboard":
                    agreed = ("metadata", "health_rows", "event_records", "rules", "report")
                    assert module.removeprefix("dashboard.").startswith(agreed), f"{path} imports {module}"


def test_the_dashboard_imports_neither_tensorflow_nor_keras():
    """An import error in a plugin stops TensorBoard from starting, and TensorBoard runs without TensorFlow."""
    for path in (ROOT / "dashboard").rglob("*.py"):
        assert not {"tensorflow", "keras"} & {module.split(".")[0] for module in imports(path)}, path


# The rooms of the trainer, from the bottom: each imports only from those before it.
ROOMS = [
    *("variables", "settings", "counters", "optim", "arguments", "distribution", "recurrent", "probing", "health"),
    *("data", "step", "evaluation", "summaries", "loggers", "checkpoints", "analysis", "debug", "loop"),
    *("overriding", "engine", "hooks", "examination", "trainer"),
]


def room(module):
    """The sub-package, or the module at the top of the trainer, that a dotted name lies in."""
    return module.removeprefix("looptape.trainer.").split(".")[0]


def test_rooms_of_the_trainer_import_in_the_declared_order():
    known = make_map.modules("trainer")
    for name, path in known.items():
        if name == "looptape.trainer":
            continue
        for other in make_map.imports(path, known):
            if other == "looptape.trainer":
                continue
            assert ROOMS.index(room(other)) <= ROOMS.index(room(name)), f"{name} imports {other}"


def test_no_modules_import_each_other_in_a_circle():
    for package in make_map.PACKAGES:
        make_map.layers(package)


def test_the_guide_names_every_room():
    table = make_map.GUIDE.read_text().split("| part | holds |")[1].split("To read the trainer")[0]
    assert all(f"`{name}/`" in table or f"`{name}.py`" in table for name in ROOMS)


@pytest.mark.parametrize("package", ALLOWED)
def test_modules_have_at_most_400_lines(package):
    for path in (ROOT / package).rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path


@pytest.mark.parametrize("package", ALLOWED)
def test_functions_have_at_most_60_lines(package):
    """Their bodies, without docstrings."""
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[ast.get_docstring(node) is not None :]
                length = node.end_lineno - body[0].lineno + 1 if body else 0
                assert length <= 60, f"{path}: {node.name} has {length} lines"


# Folders of files that stand side by side, each read alone.
ONE_FILE_EACH = ("experiments", "tests/experiments")


@pytest.mark.parametrize("package", [*ALLOWED, "tests"])
def test_folders_have_at_most_9_modules(package):
    """Of tests, those that do not stand at the place of a module's own."""
    own = {mirrored(path.relative_to(ROOT)) for known in ALLOWED for path in (ROOT / known).rglob("*.py")}
    counts = collections.Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in (ROOT / package).rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py", "conftest.py") and path not in own
    )
    assert {folder: n for folder, n in counts.items() if n > 9 and folder not in ONE_FILE_EACH} == {}


# Modules without a test module of their own, by the tests that hold them.
TESTED_ELSEWHERE = {
    "dashboard/server/test_server.py": "dashboard/plugin.py dashboard/server/series.py",
    "dashboard/test_report.py": "dashboard/events.py dashboard/rules/explanations.py dashboard/rules/findings.py",
    "trainer/health/test_diagnose.py": (
        "dashboard/overview.py dashboard/rules/logged_run.py dashboard/server/health_reader.py"
    ),
    "distribution/test_cluster.py": "experiments/cluster/local.py experiments/cluster/tf_config.py",
    "distribution/test_ray.py": "experiments/cluster/ray.py",
    "distribution/test_workers.py": ("experiments/cluster/joining.py trainer/distribution/workers.py"),
    "distribution/test_two_devices.py": "trainer/distribution/replica_sums.py trainer/step/forward/forward_state.py",
    "experiments/launch/test_runner.py": (
        "experiments/launch/config.py experiments/launch/factories.py experiments/launch/results_table.py "
        "experiments/launch/warm_start.py experiments/records/profile.py experiments/tools/commands.py"
    ),
    "experiments/tools/test_sweep.py": "experiments/tools/live_lines.py",
    "test_command.py": "experiments/tools/new_file.py",
    # Every combiner through one table: the interface, published examples, second implementations.
    "losses/combiners/test_conformance.py": (
        "losses/combiners/base.py losses/combiners/by_gradient/direction.py losses/combiners/by_gradient/rewriting.py "
        "losses/combiners/by_value/tchebycheff.py losses/combiners/by_value/value.py"
    ),
    "losses/combiners/test_references.py": (
        "losses/combiners/by_gradient/bargaining.py losses/combiners/by_gradient/cone.py "
        "losses/combiners/by_gradient/hull.py losses/combiners/by_gradient/inverse.py "
        "losses/combiners/by_gradient/surgery.py"
    ),
    "losses/combiners/test_fixtures.py": (
        "losses/combiners/by_gradient/norms.py losses/combiners/by_value/history.py "
        "losses/combiners/by_value/learned.py"
    ),
    "trainer/analysis/test_loss_jacobian.py": (
        "trainer/analysis/adjoints.py trainer/analysis/recorder.py trainer/analysis/time_losses.py"
    ),
    "trainer/analysis/test_credit_matrix.py": "trainer/examination.py trainer/analysis/timestep_gradients.py",
    # Processes and files that are killed, filled up and damaged.
    "reliability/test_damage.py": "trainer/checkpoints/store.py trainer/checkpoints/run_files.py",
    "reliability/test_resume.py": "trainer/checkpoints/trainer_state.py",
    "reliability/test_nonfinite.py": "trainer/debug/nonfinite_report.py trainer/loop/recovery.py",
    "reliability/test_signals.py": "trainer/loop/signals.py",
    "trainer/health/test_spikes.py": "trainer/debug/spike_report.py trainer/health/undo.py",
    "trainer/data/test_source.py": "trainer/data/resumability.py",
    "trainer/evaluation/test_evaluation.py": "trainer/evaluation/forward_only.py",
    "trainer/loggers/test_loggers.py": "trainer/loggers/interface.py trainer/loggers/row_files.py",
    "trainer/loop/test_progress_bar.py": "trainer/loop/closing.py",
    # One loop with probes, against finite differences and other loops.
    "trainer/probing/test_layers.py": (
        "trainer/probing/quantities.py trainer/probing/reading.py trainer/probing/records.py "
        "trainer/probing/session.py trainer/probing/taps.py trainer/recurrent/layers.py"
    ),
    "trainer/probing/test_loop.py": "trainer/probing/stepped_record.py trainer/recurrent/loops/python_steps.py",
    "trainer/recurrent/hoisted/test_both_ways.py": (
        "trainer/recurrent/hoisted/adjoint_pass.py trainer/recurrent/hoisted/scan.py "
        "trainer/recurrent/hoisted/cells/gru.py trainer/recurrent/hoisted/cells/lstm.py "
        "trainer/recurrent/hoisted/cells/recurrence.py trainer/recurrent/hoisted/cells/simple_rnn.py"
    ),
    "trainer/recurrent/loops/test_adjoint_loop.py": (
        "trainer/recurrent/loops/cells.py trainer/recurrent/loops/recurrent_loop.py "
        "trainer/recurrent/loops/state_loop.py trainer/recurrent/loops/taped_loop.py"
    ),
    "trainer/recurrent/test_omega.py": "trainer/step/forward/omega_losses.py",
    "trainer/step/test_accumulation.py": "trainer/step/micro_batch.py",
    "trainer/health/test_update_norms.py": (
        "trainer/step/reports/health_report.py trainer/step/reports/update_report.py "
        "trainer/summaries/health_summaries.py"
    ),
    "trainer/summaries/test_timestep_summaries.py": "trainer/step/reports/probe_report.py",
    "trainer/summaries/test_event_writer.py": "trainer/summaries/scalars.py",
    "trainer/test_against_keras.py": "trainer/trainer.py",
}


def mirrored(path):
    """The place of a module's own tests."""
    return ROOT / "tests" / path.parent / f"test_{path.name}"


def test_every_module_with_logic_has_tests_at_a_known_place():
    """At its own place in the tree of tests, or in one that this table names; nothing is in both."""
    listed = [module for modules in TESTED_ELSEWHERE.values() for module in modules.split()]
    without = set()
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            path = path.relative_to(ROOT)
            logic = any(isinstance(node, ast.FunctionDef) for node in ast.walk(ast.parse((ROOT / path).read_text())))
            if logic and not path.name.startswith("__") and not mirrored(path).exists():
                without.add(path.as_posix())
    assert sorted(listed) == sorted(without)
    assert [test for test in TESTED_ELSEWHERE if not (ROOT / "tests" / test).exists()] == []


def test_the_map_knows_every_package():
    assert {name: edges <= ALLOWED[name] for name, edges in make_map.package_edges().items()} == dict.fromkeys(
        ALLOWED, True
    )


@pytest.mark.parametrize("guide", ["CONTRIBUTING.md", "docs/how-it-works.md"])
def test_the_paths_that_a_guide_names_exist(guide):
    text = (ROOT / guide).read_text()
    named = set(re.findall(rf"`((?:{'|'.join(OURS)}|docs|looptape)/[\w./]*)`", text))
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """{(file, function): place among the first calls} of a run with probes that saves, and of one that resumes it."""
    real = functools.cache(lambda name: Path(name).resolve())  # the packages are found through links in looptape/
    x = np.ones([8, 4, 3], "float32")
    workdir = tmp_path_factory.mktemp("walk")

    def run():
        calls = {}

        def note(frame, event, _):
            if event == "call" and "looptape" in frame.f_code.co_filename:
                calls.setdefault((real(frame.f_code.co_filename), frame.f_code.co_qualname), len(calls))

        model = keras.Sequential([keras.Input((4, 3)), keras.layers.LSTM(2, name="lstm"), keras.layers.Dense(1)])
        trainer = Trainer(model, "sgd", {"error": "mse"}, probe_every=1)
        before = sys.getprofile()
        sys.setprofile(note)
        threading.setprofile(note)  # a checkpoint is written in a thread
        try:
            trainer.fit((x, x[:, 0, :1]), steps=1, workdir=workdir, progress=False)
        finally:
            sys.setprofile(before)
            threading.setprofile(before)
        return calls

    return {"first": run(), "resumed": run()}


@pytest.mark.parametrize(
    "title, when",
    [("A plain batch", "first"), ("A probed update", "first"), ("A save", "first"), ("A resume", "resumed")],
)
def test_the_walks_of_the_guide_are_true(title, when, walked):
    """The functions that the guide names are called for the first time in the order in which it names them."""
    text = make_map.GUIDE.read_text().split(f"### {title}\n")[1].split("\n### ")[0]
    named = re.findall(r"^\d+\. `([\w.]+)` in `(trainer/[\w/]+\.py)`", text, re.M)
    road = [(ROOT / file, name) for name, file in named]
    assert len(road) == len(re.findall(r"^\d+\. ", text, re.M)) >= 5
    calls = walked[when]
    assert [step for step in road if step not in calls] == []
    assert road == sorted(road, key=calls.get)
    if title == "A plain batch":
        assert len({file for file, _ in road}) == len(road)
