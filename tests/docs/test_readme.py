"""The README's examples run as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_as_printed(block, directory):
    """What a code block prints, run in a process of its own."""
    assert len(block.splitlines()) <= 32, "an example that fits on a screen"
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", block]
    run = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=directory, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    noise = re.findall(r"^[IWEF]\d{4} .*|.*(?:cuInit|oneDNN|absl::|rebuild TensorFlow).*", run.stderr, re.M)
    assert not noise, noise
    return run.stdout


def test_the_examples_run_as_printed(tmp_path):
    simple, own = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert "(256, 1)" in run_as_printed(simple, tmp_path)
    shown = run_as_printed(own, tmp_path)
    assert "'error':" in shown and "'roughness':" in shown
    assert (tmp_path / "runs" / "first" / "model.keras").exists()


def test_it_fits_on_a_hundred_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_the_files_it_names_exist():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (ROOT / target).exists(), target


def test_the_commands_it_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target
