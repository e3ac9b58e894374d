"""How many states a loop keeps: the fewest by trying every stride, and amounts of memory."""

import math

import pytest
import tensorflow as tf

from looptape.trainer.recurrent.loops.memory import check_memory, stride_of

STATES = [tf.zeros([8, 4]), tf.zeros([8, 4], tf.float16)]  # 192 bytes for each time step


@pytest.mark.parametrize("length", [1, 2, 17, 100, 1000])
def test_the_root_keeps_the_fewest_states(length):
    kept = [math.ceil(length / stride) + stride for stride in range(1, length + 1)]
    stride = stride_of("sqrt", length, STATES)
    assert math.ceil(length / stride) + stride == min(kept)
    assert int(stride_of("sqrt", tf.constant(length), STATES)) == stride


@pytest.mark.parametrize(
    "memory, expected", [(None, None), ("every 16", 16), (19_200, None), (19_199, 10), ("19.2 KB", None), ("18KB", 10)]
)
def test_an_amount_is_compared_with_what_all_states_need(memory, expected):
    assert stride_of(check_memory(memory), 100, STATES) == expected
    if isinstance(memory, int):  # a length that is not known before the run
        assert int(stride_of(memory, tf.constant(100), STATES)) == (expected or 100)


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "every 0", "500", "5TB", "all", []])
def test_other_values_are_refused(wrong):
    with pytest.raises(ValueError, match='`recurrent_memory` is .*"every 16" to keep every 16th'):
        check_memory(wrong, "recurrent_memory")
