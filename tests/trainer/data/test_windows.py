"""Where sequences begin, against a plain loop over rows and time steps; and how windows carry it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, losses, timesteps
from looptape.trainer.data import windows

ROWS, TIME = 3, 5
MASK = np.array(
    [
        [[1, 1, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 0]],
        [[1, 0, 0, 0, 0], [0, 1, 1, 0, 1], [1, 1, 1, 1, 1]],
    ],
    bool,
)
LENGTHS = np.array([[5, 3, 0], [5, 5, 2], [4, 5, 5]])


def found(begins, length=2, **parts):
    """[windows] of begins as arrays, of batches that have a sequence and `parts`."""
    count = len(next(iter(parts.values())))
    data = tf.data.Dataset.from_tensor_slices({"a": np.zeros([count, ROWS, TIME], np.float32), **parts})
    return [window.begins.numpy() for window in windows.cut(data, length, begins)]


def test_a_mask_against_a_loop():
    expected, valid_before = np.zeros_like(MASK), [False] * ROWS
    for batch in range(2):
        for row in range(ROWS):
            for t in range(TIME):
                expected[batch, row, t] = MASK[batch, row, t] and not valid_before[row]
                valid_before[row] = MASK[batch, row, t]
    got = found(timesteps.Mask("mask"), mask=MASK)
    assert [part.shape[1] for part in got] == [2, 2, 1] * 2
    np.testing.assert_array_equal(np.concatenate(got, axis=1), np.concatenate(expected, axis=1))


def test_lengths_end_a_row_for_the_next_batch():
    got = found(timesteps.Lengths("valid"), length=3, valid=LENGTHS)
    begins, later = got[::2], got[1::2]  # two windows to a batch
    np.testing.assert_array_equal(begins, [[True, True, True], [False, True, True], [False, False, True]])
    assert not np.any(later)


def test_flags_of_rows_and_of_time_steps():
    rows = np.array([[False, True, False], [False, False, True]])
    got = found(timesteps.Flags(lambda batch: batch["flag"]), length=3, flag=rows)
    np.testing.assert_array_equal(got[::2], [[True, True, True], [False, False, True]])  # at first all begin
    assert not np.any(got[1::2])
    steps = np.zeros([2, ROWS, TIME], np.int32)
    steps[0, 1, 3] = steps[1, 2, 0] = 1
    got = np.concatenate(found(timesteps.Flags("flag"), flag=steps), axis=1)
    steps[0, :, 0] = 1
    np.testing.assert_array_equal(got, np.concatenate(steps.astype(bool), axis=1))


def test_never_and_each_batch():
    parts = {"b": np.zeros([2, ROWS])}
    assert [bool(np.all(x)) for x in found("never", 3, **parts)] == [True, False, False, False]
    assert [bool(x) for x in found("batch", 3, **parts)] == [True, False, True, False]


def _specs(parts):
    """Nested shapes as specifications."""
    return {key: _specs(own) if isinstance(own, dict) else tf.TensorSpec(own) for key, own in parts.items()}


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        ({"class": [4, 9], "frames": [4, 6, 2], "mask": [4, 6]}, [9, 2, 2]),
        ({"inputs": {"static": [4, 9], "text": [4, 6, 2]}, "targets": [4, 9, 1]}, [9, 2, 9]),
        ({"a": [4, 6, 1], "x": [4, 5], "y": [4, 5]}, [6, 2, 2]),
        ({"x": [4, None, 2], "y": [4, 1], "z": [4, None]}, [2, 1, 2]),
    ],
)
def test_the_sequence_of_the_inputs_says_how_long_a_batch_is(parts, sizes):
    """`sizes`: of the second axis in the first window of two time steps."""
    spec = _specs(parts)
    whole = tf.nest.map_structure(lambda one: np.zeros([size or 6 for size in one.shape], np.float32), spec)
    (first, *_) = windows.cut(tf.data.Dataset.from_generator(lambda: iter([whole]), output_signature=spec), 2)
    assert [leaf.shape[1] for leaf in tf.nest.flatten(first.batch)] == sizes


def test_bad_input():
    with pytest.raises(TypeError, match=r"`where` of Lengths is 3; .* Use e.g. Lengths\('length'\)"):
        timesteps.Lengths(3)
    with pytest.raises(ValueError, match=r"`bptt_begins` is Flags\(where='first'\), and a batch has \['a', 'flag'\]"):
        found(timesteps.Flags("first"), flag=np.zeros([2, ROWS]))
    with pytest.raises(ValueError, match=r"which has the shape \(3, 5\); it must be \[3\]"):
        found(timesteps.Lengths("mask"), mask=MASK)
    with pytest.raises(ValueError, match="`bptt_begins` is 'sometimes'; it must be 'batch'"):
        windows.check_windows(3, True, "sometimes", 0, 1)
    with pytest.raises(ValueError, match="`bptt_begins` is 'never' without `bptt_updates`"):
        windows.check_windows(3, False, "never", 0, 1)
    ragged = tf.data.Dataset.from_tensor_slices(np.zeros([5, TIME])).batch(2)
    with pytest.raises(ValueError, match="the number of rows of a batch is not known.*drop_remainder=True"):
        windows.cut(ragged, 2, "never")


@pytest.mark.parametrize("weights", ["last", 0.9])
def test_weights_of_time_steps_need_whole_sequences(weights):
    given = {"error": losses.over_time("mse", weights)}
    net = keras.Sequential([keras.Input((None, 2)), keras.layers.GRU(1, return_sequences=True)])
    Trainer(net, "sgd", given, bptt_window=2)
    with pytest.raises(ValueError, match="The loss 'error' is made by `over_time`, and `bptt_updates` is set"):
        Trainer(net, "sgd", given, bptt_window=2, bptt_updates=True)
