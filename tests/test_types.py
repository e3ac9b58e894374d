"""Types that hold in a user's project: mypy flags wrong arguments and knows what `fit` returns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import keras

from looptape._types import History

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import looptape
from looptape import Trainer

Trainer(1, "adam", nonsense=3)
trainer = Trainer(1, "adam")
reveal_type(trainer.fit(None, steps=1))
reveal_type(trainer.fit(None, steps=1).history)
reveal_type(trainer.evaluate(None))
trainer.fit(None, stepz=1)
trainer.fit(None, steps="many")
looptape.Trainr
"""
EXPECTED = {
    5: 'error: Unexpected keyword argument "nonsense" for "Trainer"',
    7: 'note: Revealed type is "looptape._types.History"',
    8: 'note: Revealed type is "dict[str, list[float]]"',
    9: 'note: Revealed type is "dict[str, float]"',
    10: 'error: Unexpected keyword argument "stepz" for "fit" of "Trainer"',
    11: 'error: Argument "steps" to "fit" of "Trainer" has incompatible type "str"',
    12: 'error: Module has no attribute "Trainr"',
}


def found(directory, *options, **environment):
    """{line: message} of mypy on the program, in a user's directory."""
    (directory / "user.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", f"--cache-dir={directory / 'cache'}", "--ignore-missing-imports"]
    command += ["--follow-imports=silent", *options, "user.py"]
    done = subprocess.run(
        command, cwd=directory, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    lines = re.findall(r"^user\.py:(\d+): (.*)$", done.stdout, re.M)
    return {int(number): text for number, text in lines if '" defined in "' not in text}


def check(messages):
    assert messages.keys() == EXPECTED.keys(), messages
    for line, expected in EXPECTED.items():
        assert messages[line].startswith(expected), messages[line]


def test_a_checker_sees_the_arguments_and_the_results(tmp_path):
    check(found(tmp_path, MYPYPATH=str(ROOT)))


def test_the_history_is_that_of_keras():
    assert History is keras.callbacks.History
