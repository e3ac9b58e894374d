"""Which evaluation is the best, also among some that are not finite."""

import math

import pytest
import tensorflow as tf

from looptape.trainer.checkpoints.store import Store
from looptape.trainer.evaluation.best import Best

NAN = math.nan


@pytest.mark.parametrize("name", ["loss", "-loss"])
@pytest.mark.parametrize(
    "values, new", [([NAN, 3.0, NAN, 2.0], [False, True, False, True]), ([1.0, NAN, 2.0], [True, False, False])]
)
@pytest.mark.parametrize("resumed", [False, True])
def test_nan_never_is_the_best_and_a_later_number_is(name, values, new, resumed):
    best, sign = Best(name, True), -1.0 if name == "-loss" else 1.0
    found = []
    for step, value in enumerate(values):
        best.see(step, {"loss": sign * value})
        found.append(best.score(step, new=True) is not None)
        assert best.score(step) == (None if math.isnan(value) else value)
        if resumed:
            state, best = best.state(), Best(name, True)
            best.restore(state)
    assert found == new


def test_the_state_of_a_run_whose_best_was_nan_is_taken_up():
    best = Best("loss", True)
    best.restore([4, NAN, NAN])
    best.see(5, {"loss": 1.0})
    assert best.score(5, new=True) == 1.0


def test_the_store_keeps_the_best_number_beside_nan(tmp_path):
    store = Store(str(tmp_path), keep=1)
    for step, score in enumerate([2.0, NAN, 3.0, NAN]):
        store.save(step, {"value": tf.Variable(0.0)}, {}, score=score)
    assert store.names() == ["step-0000000000", "step-0000000003"]
    assert store.best() == "step-0000000000"
