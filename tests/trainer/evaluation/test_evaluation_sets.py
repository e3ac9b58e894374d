"""Several evaluation sets by name: which dicts are sets, and how their results are named."""

import numpy as np
import pytest

from looptape.trainer.evaluation.evaluation_sets import evaluate_sets, named_sets

X = np.zeros([2, 1])


@pytest.mark.parametrize("data", [X, (X, X), {"a": X, "b": X}, {"inputs": {"a": X}, "targets": X}, {"x": [X], "y": X}])
def test_one_set_is_not_taken_for_several(data):
    assert named_sets(data) is None


def test_several_sets_are_those_of_their_names():
    sets = {"clean": (X, X), "noisy": (X, X)}
    assert named_sets(sets) is sets


@pytest.mark.parametrize(("data", "message"), [({}, "is empty"), ({3: (X, X)}, "is named 3"), ({"": (X,)}, "named ''")])
def test_names_that_cannot_be(data, message):
    with pytest.raises((TypeError, ValueError), match=message):
        named_sets(data)


def test_results_are_named_after_their_set_and_the_first_loss_is_the_loss():
    first = {"loss": 1.0, "mae": 2.0}, {"loss": "loss/sum", "mae": "metrics/mae"}
    second = {"loss": 3.0}, {"loss": "loss/sum"}
    results, tags = evaluate_sets({"first": first, "second": second}, lambda data: data)
    assert results == {"loss": 1.0, "first_loss": 1.0, "first_mae": 2.0, "second_loss": 3.0}
    assert tags["first_mae"] == "first/metrics/mae"


def test_two_results_of_one_name_are_refused():
    results = iter(
        [({"loss": 1.0, "b_mae": 1.0}, {"loss": "", "b_mae": ""}), ({"loss": 1.0, "mae": 1.0}, {"loss": "", "mae": ""})]
    )
    with pytest.raises(ValueError, match="Two evaluation sets have a result named 'a_b_mae'"):
        evaluate_sets({"a": None, "a_b": None}, lambda data: next(results))
