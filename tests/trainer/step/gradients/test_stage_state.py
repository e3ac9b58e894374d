"""What becomes of a stage's state where other variables are trained: by hand, with NumPy arrays as variables."""

import collections

import numpy as np
import tensorflow as tf

from looptape.trainer.step.gradients.stage_state import StageState

A, B, C = (tf.Variable(np.full(shape, value, "float32")) for shape, value in (((2,), 1), ((2,), 2), ((3,), 3)))
Both = collections.namedtuple("Both", "count mean")


def made(init):
    return StageState("mine", init, lambda value, name: tf.Variable(value, trainable=False))


def add(state, value):
    """One update: every number of the state grows by `value`."""
    for variable, new in state.writes(tf.nest.map_structure(lambda x: x + value, state.values())):
        variable.assign(new)


def numbers(state):
    return tf.nest.map_structure(lambda x: x.numpy().tolist(), state.values())


def test_entries_follow_their_variables_and_scalars_stay():
    state = made(lambda variables: Both(tf.zeros([]), [tf.zeros_like(v) for v in variables]))
    state.build([B], [B])
    add(state, 1.0)
    state.build([A, B], [A, B])  # joins, in front of the one that is known
    assert numbers(state) == Both(1.0, [[0.0, 0.0], [1.0, 1.0]])
    add(state, 1.0)
    state.build([A], [A])
    assert numbers(state) == Both(2.0, [[1.0, 1.0]])
    add(state, 1.0)
    state.build([A, B], [A, B])
    assert numbers(state) == Both(3.0, [[2.0, 2.0], [2.0, 2.0]])  # B waited


def test_a_pair_beside_two_variables_is_no_entry_for_each():
    """The same length by chance, and scalars, which fit everywhere."""
    state = made(lambda variables: (tf.zeros([]), tf.constant(10.0)))
    state.build([A, B], [A, B])
    add(state, 1.0)
    state.build([B, C], [B, C])
    assert numbers(state) == (1.0, 11.0)
    state.build([C, B], [C, B])
    assert numbers(state) == (1.0, 11.0)


def test_rows_and_keys_follow_their_variables():
    def init(variables):
        return {"rows": tf.zeros([len(variables), 2]), "shapes": {str(v.shape): tf.zeros_like(v) for v in variables}}

    state = made(init)
    state.build([C], [C])
    add(state, 5.0)
    state.build([A, C], [A, C])
    add(state, 1.0)
    assert numbers(state)["rows"] == [[1.0, 1.0], [6.0, 6.0]]
    assert numbers(state)["shapes"] == {"(2,)": [1.0, 1.0], "(3,)": [6.0, 6.0, 6.0]}
    state.build([A], [A])
    add(state, 1.0)
    assert numbers(state) == {"rows": [[2.0, 2.0]], "shapes": {"(2,)": [2.0, 2.0]}}


def test_what_depends_on_all_shapes_together_begins_anew_with_a_warning(caplog):
    state = made(lambda variables: tf.zeros([sum(int(tf.size(v)) for v in variables)]))
    state.build([A], [A])
    add(state, 1.0)
    state.build([A, C], [A, C])
    assert numbers(state) == [0.0] * 5
    assert "The state () of stage 'mine' begins anew" in caplog.text


def test_variables_that_join_later_have_their_place_from_the_beginning():
    """So that a resumed run, which begins in a later phase, has the same names."""
    state = made(lambda variables: [tf.zeros_like(v) for v in variables])
    state.build([C], [C, A])
    assert [name for name, _ in state.named_variables()] == ["mine/0", "mine/1"]
    add(state, 1.0)
    assert [v.numpy().tolist() for _, v in state.named_variables()] == [[1.0] * 3, [0.0] * 2]


def test_no_state():
    state = made(lambda variables: ())
    state.build([A], [A, B])
    assert numbers(state) == () and state.named_variables() == [] and state.writes(()) == []
