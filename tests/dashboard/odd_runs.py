"""A log directory with everything that can be odd about one, for the tests of the server."""

import numpy as np
from tensorboard.compat.proto import summary_pb2
from tensorboard.util import tensor_util

from looptape.dashboard import metadata
from tests.dashboard.event_files import RunWriter

LONG_ROWS, LONG_TIME = 1_500, 6
MARKUP_RUN = "<img src=x onerror=alert(1)>\"'&/日本 ü"
MARKUP_LAYER = "<script>window.hacked=1</script>/'\"&/ü"


def long_value(row):
    """Row `row` of the run `long`: rises with the row, falls with t; one NaN, one Inf."""
    values = np.float32((row + 1) * 10.0 ** -np.arange(LONG_TIME))
    if row == LONG_ROWS - 1:
        values[2], values[3] = np.nan, np.inf
    return values


def write_odd_runs(logdir):
    with RunWriter(logdir / "long") as writer:
        for row in range(LONG_ROWS):
            writer.row(10 * row, "lstm", {"state": long_value(row)})
    with RunWriter(logdir / MARKUP_RUN) as writer:
        writer.row(1, MARKUP_LAYER, {"state": [1, 2, 3]}, shares={"<b>mse</b>": [1, 1, 1]})
    with RunWriter(logdir / "shapes") as writer:
        for step, row in enumerate(([1, 2, 3], [1, 2], [1, 2, 3, 4, 5], [], [[1, 2]])):
            writer.row(step, "ragged", {"state": row})
        writer.row(0, "padded", {"state": [1, 2, np.nan, 4]}, valid=[True, True, True, False])
        writer.row(1, "padded", {"state": [5, 6, np.inf, 8]}, valid=[True, False, True, False])
        writer.row(0, "bad", {"state": [np.nan] * 3})
        writer.row(1, "bad", {"state": [0, 0, 0]})
        writer.row(0, "nested", {"state": np.arange(1, 7)}, time_shape=(2, 3), direction="backward")
    with RunWriter(logdir / "several") as writer:
        credit = np.tril(10.0 ** -np.arange(9).reshape(3, 3))
        shares = {"mse": [0.5, 1.5, -0.25], "l1": [0.5, -0.5, 1.25]}
        for step in (10, 20, 30):
            quantities = {
                "state": np.array([4, 2, 1]) * step,
                "gain": [1, 0.5, 2],
                "weight/kernel": [1, 1, 1],
            }
            writer.row(step, "lstm", quantities, shares=shares)
        writer.write(10, [metadata.credit_summary("lstm", credit)])
        writer.write(30, [metadata.credit_summary("lstm", 2 * credit)])
    with RunWriter(logdir / "resumed") as writer:
        for step in (10, 20, 30):
            writer.row(step, "lstm", {"state": [step, 1]})
    with RunWriter(logdir / "resumed", index=1) as writer:
        # Killed after 30, restored at 20: 30 is written again and counts once.
        writer._counts["lstm"] = 2
        for step in (30, 40):
            writer.row(step, "lstm", {"state": [step + 0.5, 1]})
    _write_uncounted(logdir / "uncounted")
    _write_cut_off(logdir / "cut-off")
    _write_foreign(logdir / "foreign")


def _write_uncounted(directory):
    with RunWriter(directory) as writer:
        writer.write(5, [metadata.vector_summary("lstm", "state", [1, 2])])


def _write_cut_off(directory):
    with RunWriter(directory) as writer:
        for step in (1, 2, 3):
            writer.row(step, "lstm", {"state": [step, step]})
    # As after a crash: the last record is not whole.
    writer.path.write_bytes(writer.path.read_bytes()[:-40])


def _write_foreign(directory):
    """Tags under our plugin's name that are not ours to read, and what the native tabs show."""
    with RunWriter(directory) as writer:
        writer.row(1, "lstm", {"state": [1, 2]})
        later = metadata.summary_metadata("vector", "lstm", "state")
        later.plugin_data.content = b'{"version": 99}'
        writer.write(1, [_value("timestep/lstm/from_the_future", np.float32([1]), later)])
        garbage = metadata.summary_metadata("vector", "lstm", "state")
        garbage.plugin_data.content = b"\xff\x00"
        writer.write(1, [_value("timestep/lstm/garbage", np.float32([1]), garbage)])
        nested = metadata.summary_metadata("vector", "lstm", "state")
        nested.plugin_data.content = b"[" * 100_000
        writer.write(1, [_value("timestep/lstm/nested", np.float32([1]), nested)])
        texts = metadata.summary_metadata("vector", "lstm", "texts")
        writer.write(1, [_value("timestep/lstm/texts", np.array([b"a"], dtype=object), texts)])
        writer.write(1, [summary_pb2.Summary.Value(tag="loss/total", simple_value=0.5)])


def _value(tag, array, summary_metadata):
    return summary_pb2.Summary.Value(tag=tag, tensor=tensor_util.make_tensor_proto(array), metadata=summary_metadata)
