"""The values that a trace yields do not change, and know how their parts add up."""

import pytest
import tensorflow as tf

from looptape.trainer.step.plan import ADDITIVE, Backward, LossPlan, MicroResult, Mode


def test_a_sum_over_the_update_has_the_divisor_1_however_many_parts_there_are():
    plan = LossPlan(["error", "penalty"], [], [[0], [1]], [1.0, 1.0], [], [False, True])
    assert [float(d) for d in plan.whole([tf.constant(12.0), tf.constant(3.0)])] == [12.0, 1.0]


@pytest.mark.parametrize("value", [Mode(), LossPlan([], [], [], [], [], [])])
def test_they_are_immutable(value):
    with pytest.raises(AttributeError):
        setattr(value, value._fields[0], 3)


def test_a_plain_update_observes_nothing_and_ends_its_call_if_a_check_fails():
    assert Mode() == (False, False, True)
    assert [form for form in Backward if form.per_loss] == [Backward.PER_LOSS, Backward.CUT]
    assert set(ADDITIVE) < set(MicroResult._fields)
