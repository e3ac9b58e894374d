"""The options of health rows: a list or a text with commas, in one order, and nothing that is not known."""

import numpy as np
import pytest

from looptape import Trainer
from looptape.trainer.health.options import PARTS, check_parts
from tests.trainer.tools import dense_model


def test_lists_and_texts_are_the_same():
    assert check_parts(()) == check_parts("") == ()
    assert check_parts(["positions", "activations"]) == check_parts(" positions, activations,") == PARTS[::2]
    assert check_parts(PARTS[::-1]) == PARTS


@pytest.mark.parametrize("given", ["norms", ["histograms", "norms"]])
def test_what_is_not_known_is_named(given):
    with pytest.raises(ValueError, match=r"it may hold 'activations', .*Leave out \['norms'\]"):
        check_parts(given)


@pytest.mark.parametrize("given", [None, 5, True, [1]])
def test_what_is_no_text_and_no_list_of_texts_gets_a_sentence(given):
    with pytest.raises(TypeError, match=r"`health` is .*; it must be a text such as .* Leave it out"):
        check_parts(given)


def test_parts_without_rows_are_refused():
    x = np.ones((8, 3), "float32")
    trainer = Trainer(dense_model(), "sgd", {"error": "mse"}, health="positions", probe_every=1)
    with pytest.raises(ValueError, match="`health` is 'positions', but `health_every` is 0, so nothing is measured"):
        trainer.fit((x, x[:, :1]), steps=1, progress=False)
