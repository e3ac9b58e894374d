"""The list of experiments."""

import subprocess
import sys

from looptape import _quiet
from looptape.experiments.tools import listing
from tests.experiments.line import REPOSITORY


def test_experiments_are_found_with_their_first_line():
    found = listing.experiments()
    assert found["adding_problem"] == "The adding problem: add the two marked numbers of a long sequence."
    assert "launch" not in found and "config" not in found and "sweep" not in found


def test_a_new_file_is_listed_without_being_imported(tmp_path):
    (tmp_path / "mine.py").write_text('"""Mine: a line."""\nraise RuntimeError\nclass Config: ...\ndef build(c): ...\n')
    (tmp_path / "helper.py").write_text('"""No experiment."""\ndef build(c): ...\n')
    assert listing.experiments(tmp_path) == {"mine": "Mine: a line."}
    assert "looptape run mine.py           Mine: a line." in listing.text(tmp_path)


def test_the_list_needs_no_tensorflow():
    program = (
        "import runpy, sys; runpy.run_module('experiments', run_name='__main__'); print('tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == listing.text() + "\nFalse\n"


def test_only_a_launch_is_quiet():
    assert _quiet.launched(["python", "-X", "dev", "-m", "experiments.vae", "--steps=3"])
    assert _quiet.launched(["python", "-m", "looptape.experiments.vae"])
    for others in (["python"], ["python", "-m", "pytest", "experiments.vae"], ["python", "-m", "experiments.cluster"]):
        assert not _quiet.launched(others)
