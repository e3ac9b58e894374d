"""The options of health rows: a list or a text with commas, in one order, and nothing that is not known."""

import pytest

from looptape.trainer.health.options import PARTS, check_parts


def test_lists_and_texts_are_the_same():
    assert check_parts(()) == check_parts("") == ()
    assert check_parts(["positions", "activations"]) == check_parts(" positions, activations,") == PARTS[::2]
    assert check_parts(PARTS[::-1]) == PARTS


@pytest.mark.parametrize("given", ["norms", ["histograms", "norms"]])
def test_what_is_not_known_is_named(given):
    with pytest.raises(ValueError, match=r"it may hold 'activations', .*Leave out \['norms'\]"):
        check_parts(given)
