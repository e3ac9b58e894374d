"""Queries of the tab: what is wrong is answered with what it must be."""

import types

import pytest
from tensorboard import errors

from looptape.dashboard.server import queries


def request(**arguments):
    return types.SimpleNamespace(args=arguments)


def test_what_is_given_is_read():
    asked = request(run="train", mode="log", columns="7")
    assert queries.text(asked, "run") == "train"
    assert queries.choice(asked, "mode", ("linear", "log")) == "log"
    assert queries.choice(asked, "scale", ("linear", "log")) == "linear"
    assert queries.integer(asked, "columns", 1, 9) == 7 and queries.integer(asked, "rows", 1, 9, default=3) == 3


@pytest.mark.parametrize("columns", ["0", "10", "many", "1.5", None])
def test_what_is_wrong_is_an_error_of_the_request(columns):
    asked = request() if columns is None else request(columns=columns)
    with pytest.raises(errors.InvalidArgumentError, match="it must be a whole number from 1 to 9"):
        queries.integer(asked, "columns", 1, 9)
    with pytest.raises(errors.InvalidArgumentError, match="The query lacks `run`"):
        queries.text(request(run=""), "run")
    with pytest.raises(errors.InvalidArgumentError, match=r"it must be one of \['linear', 'log'\]"):
        queries.choice(request(mode="cubic"), "mode", ("linear", "log"))
