"""What is installed: one top-level name, every package of the tree, and a wheel that works in a foreign project."""

import configparser
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest

from tests import test_types

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ROOT / "docs" / "versions.md"
PARTS = ("trainer", "losses", "models", "experiments", "dashboard")
TRAP = "raise ImportError('a file of the project was imported by mistake')\n"
PROGRAM = """
import keras, numpy as np, looptape
x = np.ones((64, 5, 3), "float32")
model = keras.Sequential([keras.Input((5, 3)), looptape.models.LoopRNN(keras.layers.GRUCell(4)), keras.layers.Dense(1)])
trainer = looptape.Trainer(model, "adam", {"error": looptape.losses.squared_error}, probe_every=2)
trainer.fit((x, x[:, 0, :1]), steps=4, workdir="trained", progress=False)
print("trained", int(trainer.step), looptape.__file__)
"""


def settings():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_the_list_of_packages_is_that_of_the_tree():
    listed = settings()["options"]["packages"].split()
    listed = [name for name in listed if not name.startswith("looptape.dashboard.static.")]  # folders without modules
    folders = {path.parent for part in PARTS for path in (ROOT / part).rglob("*.py") if "__pycache__" not in path.parts}
    packages = {"looptape." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    packages |= {"looptape", "looptape.dashboard.static"}
    assert sorted(listed) == sorted(packages) and len(listed) == len(set(listed))
    for folder in folders:
        assert (folder / "__init__.py").exists(), f"{folder} has modules and no __init__.py"


def test_every_part_is_installed_below_the_one_name():
    mapped = dict(line.split(" = ") for line in settings()["options"]["package_dir"].strip().splitlines())
    assert mapped == {"looptape": "looptape", **{f"looptape.{part}": part for part in PARTS}}
    for part in PARTS:
        assert (ROOT / "looptape" / part).resolve() == ROOT / part


def test_the_declared_versions_are_those_that_were_tried():
    """Lower bounds are the oldest versions in docs/versions.md, upper bounds the minor release after the newest."""
    table = re.findall(r"^\| (\d[\d.]*) \| (\d[\d.]*) \| (\d[\d.]*) \| (\d[\d.]*) \|", VERSIONS.read_text(), re.M)
    tried = [[tuple(map(int, cell.split("."))) for cell in row] for row in table]
    declared = settings()["options"]["install_requires"].split()
    for column, package in ((1, "tensorflow"), (2, "keras"), (3, "tensorboard")):
        [bounds] = [line.removeprefix(package) for line in declared if re.match(package + r"\W", line)]
        assert bounds == between([row[column] for row in tried]), package
    pythons = [row[0][:2] for row in tried]
    assert settings()["options"]["python_requires"] == between(pythons)
    for python in set(pythons):
        assert f"Programming Language :: Python :: {python[0]}.{python[1]}\n" in settings()["metadata"]["classifiers"]


def between(versions):
    """ ">=2.18.1,<2.22" for versions from 2.18.1 to 2.21.0."""
    oldest, newest = min(versions), max(versions)
    last = oldest[:2] if oldest[2:] == (0,) else oldest
    return f">={'.'.join(map(str, last))},<{newest[0]}.{newest[1] + 1}"


def built(directory, hooks=("build_wheel", "build_sdist")):
    """[wheel, sdist] of a copy of what git holds, without network access."""
    source = directory / "source"
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", str(source)], input=archive, check=True)
    for hook in hooks:
        code = f"from setuptools import build_meta; build_meta.{hook}({str(directory / 'built')!r})"
        (directory / "built").mkdir(exist_ok=True)
        done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    endings = {"build_wheel": "*.whl", "build_sdist": "*.tar.gz"}
    return [next((directory / "built").glob(endings[hook])) for hook in hooks]


def test_a_wheel_holds_what_its_modules_import(tmp_path):
    """In its smallest form: what needs no TensorFlow is imported from the unpacked wheel beside foreign modules."""
    [wheel] = built(tmp_path, ["build_wheel"])
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    modules = "looptape.dashboard.plugin, looptape.experiments.tools.sweep, looptape._command"
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'unpacked')!r}); import looptape, {modules}; "
    code += "print(looptape.__file__, *sorted({'tensorflow', 'keras'} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=foreign_project(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [str(tmp_path / "unpacked" / "looptape" / "__init__.py")]


@pytest.mark.long
def test_the_dependencies_of_a_wheel_can_be_resolved(tmp_path):
    """In an empty environment, to versions that docs/versions.md names; reads metadata and installs nothing."""
    [wheel] = built(tmp_path, ["build_wheel"])
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--only-binary=:all:"]

    def resolved(*what):
        report = tmp_path / "report.json"
        command = [*pip, "--retries=0", "--timeout=15", f"--report={report}", *map(str, what)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        found = json.loads(report.read_text())["install"] if done.returncode == 0 else []
        return {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in found}, done.stderr

    if not resolved("--no-deps", "packaging")[0]:
        pytest.skip("the package index cannot be reached")
    found, errors = resolved(wheel)
    assert {"looptape", "tensorflow", "keras", "numpy"} <= set(found), errors[-2000:]
    table = re.findall(r"^\| (\d[\d.]*) \| (\d[\d.]*) \| (\d[\d.]*) \| (\d[\d.]*) \|", VERSIONS.read_text(), re.M)
    for column, package in ((1, "tensorflow"), (2, "keras")):
        tried = {row[column].rsplit(".", 1)[0] for row in table}
        assert found[package].rsplit(".", 1)[0] in tried, (package, found[package], tried)


def environment_with(distribution, directory):
    """The interpreter of a new environment that sees this one's other packages. Installs a wheel or an sdist there."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory / "env")], check=True)
    python = directory / "env" / "bin" / "python"
    paths = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    own, others = Path(paths.stdout.strip()), directory / "others"
    others.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "looptape" not in path.name and "editable" not in path.name:
            (others / path.name).symlink_to(path)
    (own / "others.pth").write_text(str(others))
    flags = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    done = subprocess.run(
        [python, "-m", "pip", "install", *flags, str(distribution)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return python


def foreign_project(directory):
    """A project that has modules of its own with the names of our parts."""
    for name in ("trainer.py", "losses.py", "models/__init__.py", "experiments/__init__.py", "dashboard/__init__.py"):
        file = directory / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(TRAP)
    return directory / "project"


def answers(address):
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, OSError):
        return None


def tab_is_served(python, project, logdir):
    """Whether TensorBoard serves the tab of an installed plugin, started in a project with a `dashboard` of its own."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "tensorboard.main", "--logdir", logdir, "--port", str(port)]
    served = subprocess.Popen(command, cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and served.poll() is None:
            listed = answers(f"http://localhost:{port}/data/plugins_listing")
            if listed is not None:
                entry = json.loads(listed)["gradient_flow"]["loading_mechanism"]["module_path"]
                return bool(answers(f"http://localhost:{port}{entry}"))
            time.sleep(0.2)
    finally:
        served.terminate()
        served.wait()
    return False


@pytest.mark.long
def test_the_wheel_works_in_a_foreign_project(tmp_path):
    wheel, sdist = built(tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    tracked = subprocess.run(["git", "ls-files", *PARTS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = {f"looptape/{path}" for path in tracked.split() if path.endswith((".py", ".js", ".css", "py.typed"))}
    assert len(wanted) > 100 and wanted <= set(names), wanted - set(names)
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"looptape"}
    python, project = environment_with(wheel, tmp_path), foreign_project(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*command):
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stdout[-1000:], done.stderr[-2000:])
        return done.stdout

    (project / "run.py").write_text(PROGRAM)
    trained = run(python, "run.py")
    assert "trained 4" in trained and str(tmp_path / "env") in trained
    looptape = python.with_name("looptape")
    run(looptape, "new", "mine.py")
    assert "mine after 6 steps" in run(looptape, "run", "mine.py", "--steps=6", "--workdir=first")
    assert "mine after 6 steps" in run(python, "mine.py", "--steps=6")
    assert "adding_problem: it runs." in run(looptape, "run", "adding_problem", "--fast_dev_run", "--nojit_compile")
    sweep = ["--experiment=mine.py", "--grid=units=3,4", "--workdir=swept", "--metric=error", "--", "--steps=4"]
    swept = run(looptape, "sweep", *sweep)
    assert "[1/2] units=3  finished\n" in swept and "[2/2] units=4  finished\n" in swept
    assert "good" in run(looptape, "checkpoints", "first")
    assert tab_is_served(python, project, "first")
    test_types.check(test_types.found(project, f"--python-executable={python}"))

    shutil.rmtree(tmp_path / "env")
    shutil.rmtree(tmp_path / "others")
    python = environment_with(sdist, tmp_path)
    assert "trained 4" in run(python, "run.py")
