"""The guide's experiment is one new file: it is listed, shows its flags, runs, resumes and says what was reached."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.line import own_project

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "own-experiment.md"
SMALL = ["--steps=6", "--eval_every=3", "--length=4", "--nojit_compile", "--probe_every=0"]
[PARITY] = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)


@pytest.fixture
def launch(tmp_path):
    environment = own_project(tmp_path, parity=PARITY)

    def run(*arguments, command=("run", "parity.py")):
        command = [sys.executable, "-m", "looptape", *command, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def test_one_new_file_is_an_experiment(tmp_path, launch):
    listed = launch(command=["list"]).stdout
    assert re.search(r"looptape run parity\.py +Running parity: after each bit of a sequence, was the number", listed)

    first = launch("--workdir=runs/it", *SMALL, "--units=5", "--strategy=mirrored:2")
    assert first.returncode == 0, first.stderr
    assert "parity after 6 steps" in first.stdout
    assert "Expect an `error` below 0.01 in half a minute" in first.stdout
    assert "tensorboard --logdir runs/it" in first.stdout
    assert "cuda" not in first.stderr.lower()

    second = launch("--flagfile=runs/it/flags.txt", "--workdir=runs/it", "--steps=8")
    assert second.returncode == 0, second.stderr
    assert "parity after 8 steps" in second.stdout and "--steps=6 → --steps=8" in second.stderr
    with open(tmp_path / "runs" / "it" / "config.json") as file:
        stored = json.load(file)
    assert stored["experiment"] == "parity" and stored["config"]["units"] == 5

    third = launch("--workdir=runs/it", *SMALL, "--units=6", "--steps=9")
    assert third.returncode == 2
    assert "  --units=5 → --units=6\n" in third.stderr and "Traceback" not in third.stderr


def test_it_answers_from_the_terminal(tmp_path, launch):
    printed = launch("--print_config", "--units=3", "--workdir=runs/none")
    assert printed.returncode == 0 and "--units=3\n" in printed.stdout and "--print_config" not in printed.stdout
    assert not os.path.exists(tmp_path / "runs")
    wrong = launch("--unit=3")
    assert wrong.returncode == 2
    assert wrong.stderr.endswith("parity: --unit is not a flag; did you mean --units? --help lists them all.\n")
