"""Where sequences begin, against a walk through the rows of batches that follow each other."""

import numpy as np
import pytest
import tensorflow as tf

from looptape.timesteps import Flags, Lengths, Mask
from looptape.trainer.recurrent.row_begins import RowBegins, check_begins

ROWS, TIME = 4, 6
ALL = tf.fill([ROWS], True)


def test_flags_begin_where_they_are_set_and_at_the_start_of_the_run():
    set_at = np.random.default_rng(0).random((ROWS, TIME)) < 0.3
    begins, ended = Flags("flag").find({"flag": tf.constant(set_at)}, ROWS, TIME, ALL)
    expected = set_at.copy()
    expected[:, 0] = True
    np.testing.assert_array_equal(begins, expected)
    again, _ = Flags("flag").find({"flag": tf.constant(set_at)}, ROWS, TIME, ended)
    np.testing.assert_array_equal(again, set_at)
    by_row, _ = Flags(lambda batch: batch[0]).find((tf.constant([0, 1, 0, 1]),), ROWS, TIME, ended)
    np.testing.assert_array_equal(by_row, [False, True, False, True])


def test_a_row_shorter_than_the_batch_ends_there():
    begins, ended = Lengths("length").find({"length": tf.constant([6, 3, 0, 6])}, ROWS, TIME, ALL)
    np.testing.assert_array_equal(begins, ALL)
    np.testing.assert_array_equal(ended, [False, True, True, False])


def test_a_mask_begins_at_each_valid_step_after_one_that_is_not():
    rng, ended = np.random.default_rng(1), ALL
    inside = np.zeros(ROWS, bool)  # whether the time step before, of this batch or the last, was valid
    for _ in range(3):
        valid = rng.random((ROWS, TIME)) < 0.6
        expected = np.zeros_like(valid)
        for t in range(TIME):
            expected[:, t] = valid[:, t] & ~inside
            inside = valid[:, t]
        begins, ended = Mask("mask").find({"mask": tf.constant(valid)}, ROWS, TIME, ended)
        np.testing.assert_array_equal(begins, expected)


def test_what_does_not_say_where_sequences_begin_is_refused():
    for wrong in (3, None, "sometimes", Flags):
        with pytest.raises(ValueError, match="it must be 'batch' .* 'never'"):
            check_begins(wrong)
    with pytest.raises(TypeError, match=r"`where` of Mask is 3; .* Use e.g. Mask\('mask'\)"):
        Mask(3)
    with pytest.raises(ValueError, match=r"a batch has \['x'\]. Name an entry of the batch"):
        Flags("flag").read({"x": tf.zeros([2])})
    with pytest.raises(ValueError, match="a batch has no names: it is a tuple"):
        Flags("flag").read((tf.zeros([2]),))
    with pytest.raises(ValueError, match=r"which has the shape \(4, 6, 1\)"):
        Mask("mask").find({"mask": tf.ones([ROWS, TIME, 1])}, ROWS, TIME, ALL)
    with pytest.raises(TypeError, match="RowBegins has no `find`"):
        RowBegins("flag").find({}, ROWS, TIME, ALL)
