"""Cells of a notebook, run by a real kernel."""

import os
import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.reliability.tools import REPOSITORY

CELLS = [
    """
from looptape import Trainer
import keras, numpy as np, os, signal
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
data = (x, x[:, :1])
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
trainer = Trainer(model, "sgd", {"error": "mse", "size": "mae"})
""",
    "history = trainer.fit(data, steps=20, eval_dataset=data, eval_every=10)",
    "history = trainer.fit(data, steps=20, eval_dataset=data, eval_every=10)",
    """
class Interrupts(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if int(trainer.step.numpy()) == 25:
            os.kill(os.getpid(), signal.SIGINT)
trainer.fit(data, steps=1000, callbacks=[Interrupts()])
""",
    "trainer.fit(data, steps=40); print(int(trainer.step.numpy()), np.isfinite(model.get_weights()[0]).all())",
]


def run(cells):
    """Returns [the outputs of each cell], run by a kernel of a user."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    environment = {**os.environ, "PYTHONPATH": REPOSITORY}
    # With the second one, the kernel would not show what C++ code writes to the terminal.
    for name in ("TF_CPP_MIN_LOG_LEVEL", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", allow_errors=True)
    client.execute(cwd=REPOSITORY, env=environment)
    return [cell.outputs for cell in notebook.cells]


@pytest.fixture(scope="module")
def outputs():
    return run(CELLS)


def test_the_import_shows_no_line_of_tensorflow(outputs):
    assert outputs[0] == []


@pytest.mark.long
def test_a_cell_that_imports_keras_first_shows_lines_of_tensorflow():
    """Otherwise the test above could not fail."""
    [shown] = run(["import keras, tensorflow as tf; devices = tf.config.list_physical_devices()"])
    assert "oneDNN" in str(shown) or "cpu_feature_guard" in str(shown)


def test_progress_changes_in_place_and_ends_with_a_table(outputs):
    [shown] = outputs[1]
    assert shown.output_type == "display_data"
    page, text = shown.data["text/html"], shown.data["text/plain"]
    assert "step 20/20" in text and "20 updates in" in text
    assert text.count("evaluation at step") == 2, "lines of evaluations stay"
    assert "<th>training</th><th>evaluation</th>" in page and "<progress" not in page
    for name in ("loss", "error", "size"):
        assert re.search(rf"<tr><th>{name}</th><td>[\d.e-]+</td><td>[\d.e-]+</td></tr>", page)


def test_a_cell_that_runs_twice_says_that_nothing_is_left(outputs):
    said = "".join(output.get("text", "") for output in outputs[2])
    assert "Nothing to do: 20 steps are already done" in said and "Traceback" not in said


def test_an_interrupted_cell_leaves_the_trainer_usable(outputs):
    [error] = [output for output in outputs[3] if output.output_type == "error"]
    assert error.ename == "KeyboardInterrupt"
    printed = [output.text for output in outputs[4] if output.output_type == "stream" and output.name == "stdout"]
    assert printed == ["40 True\n"]
    assert "15 updates in" in str(outputs[4]), "from step 25 on"
