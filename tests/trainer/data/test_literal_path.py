"""Paths with characters of patterns: TensorFlow reads the files under another name."""

import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.data.literal_path import literal


def test_an_ordinary_path_is_given_back():
    with literal("runs/a/state") as found:
        assert found == "runs/a/state"


@pytest.mark.parametrize("name", ["[lr=0.1]", "a*", "what?"])
def test_a_checkpoint_in_a_directory_of_that_name_is_read(name, tmp_path):
    prefix = str(tmp_path / name / "state")
    tf.train.Checkpoint(value=tf.Variable([1.0, 2.0])).write(prefix)
    read = tf.Variable([0.0, 0.0])
    with literal(prefix) as found:
        tf.train.Checkpoint(value=read).read(found).assert_consumed()
    np.testing.assert_array_equal(read, [1.0, 2.0])
