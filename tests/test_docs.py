"""Every Python block of the guides runs, every link leads somewhere, every command that is named exists."""

import importlib.util
import os
import re
from pathlib import Path

import keras
import pytest

from looptape import _command
from looptape.experiments.tools import listing
from tests.docs.test_readme import run_as_printed

ROOT = Path(__file__).resolve().parent.parent
GUIDES = sorted((ROOT / "docs").glob("*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "experiments/README.md")
TEXTS = [*GUIDES, *sorted((ROOT / "docs" / "reference").glob("*.md")), *(ROOT / name for name in PAGES)]

# What the reader of a reference page has already.
PREPARED = """
import keras
import numpy as np
import tensorflow as tf
from looptape import losses
from looptape import Trainer
from looptape.analysis import plots

model = keras.Sequential([keras.Input((24, 2)), keras.layers.LSTM(4, return_sequences=True, name="{layer}"),
                          keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam()
x = tf.random.stateless_normal([8, 24, 2], [1, 2])
batch = long_batch = (x, x[:, :, :1])
data = tf.data.Dataset.from_tensors(batch).repeat()
cell = tf.identity
trainer = Trainer(model, optimizer, {{"error": losses.squared_error, "size": losses.absolute_error}})
steps, rows_over_training = np.arange(5), np.random.default_rng(0).uniform(1, 2, (5, 8))
"""
LAYER = {"timestep-gradients.md": "lstm", "losses.md": "lstm", "is-my-rnn-forgetting.md": "loop"}
# What must be the first that a process does with TensorFlow runs in a process of its own.
ALONE = {
    "scale-out.md": """
from looptape import Trainer
import keras
import tensorflow as tf

def make_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

def data():  # made when it is needed, after the strategy
    return tf.data.Dataset.from_tensors((tf.ones([4, 2]), tf.ones([4, 1]))).repeat()
"""
}
# Elsewhere: an experiment, run by tests/experiments/launch/test_new_experiment.py.
NOT_RUN_HERE = {"own-experiment.md"}


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.S)


@pytest.mark.parametrize("path", [path for path in GUIDES if blocks(path, "python")], ids=lambda path: path.name)
def test_the_code_runs(path, tmp_path, monkeypatch):
    """All blocks of a page, one after another."""
    if path.name in NOT_RUN_HERE:
        pytest.skip("run by another test")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    if path.name in ALONE:
        program = ALONE[path.name] + "\n".join(shortened(block) for block in blocks(path, "python"))
        program = program.replace("fit(data,", "fit(data(),").replace('"/shared/', f'"{tmp_path}/')
        run_as_printed(program, tmp_path)
        return
    keras.utils.set_random_seed(0)
    space = {"__name__": f"guide_{path.stem}"}
    if path.name in LAYER:
        exec(PREPARED.format(layer=LAYER[path.name]), space)
    for index, block in enumerate(blocks(path, "python")):
        # With a real file AutoGraph can read the source of hooks.
        file = tmp_path / f"block_{index}.py"
        file.write_text(shortened(block))
        exec(compile(file.read_text(), str(file), "exec"), space)


def shortened(block):
    return block.replace("steps=1000,", "steps=50,")


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


def anchors(path):
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_looptape_is_imported_first(path):
    """It hides the lines that TensorFlow would print while it is imported."""
    for block in blocks(path, "python"):
        imported = re.findall(r"^(?:import|from) (looptape|keras|tensorflow)\b", block, re.M)
        assert "looptape" not in imported or imported[0] == "looptape", block


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_exist(path):
    text = path.read_text()
    for module in set(re.findall(r"python -m ((?:looptape|experiments|benchmarks|trainer|docs)[\w.]*)", text)):
        module = module.rstrip(".")
        if not module.endswith("experiments.parity"):  # made by its reader
            assert importlib.util.find_spec(module), module
    for command, target in set(
        re.findall(r"(?:^|`|/|exec |-m )looptape ([a-z-]+)(?: ([a-z_]+)\b(?![./]))?", text, re.M)
    ):
        assert command in _command._COMMANDS, command
        if command == "run" and target:
            assert target in listing.experiments(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.M)):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_guide_is_found_from_the_readme():
    """By links, over any number of pages."""
    seen, queue = set(), [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        for target in re.findall(r"\]\(([^)#]+)\.md[)#]", page.read_text()):
            found = Path(os.path.normpath(page.parent / f"{target}.md"))
            if found not in seen and found.exists():
                seen.add(found)
                queue.append(found)
    assert set(GUIDES) <= seen, set(GUIDES) - seen
