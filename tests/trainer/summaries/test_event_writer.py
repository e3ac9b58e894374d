"""Event files that are damaged, rows that come again after a kill, and sums that do not depend on calls."""

import os
import warnings

import keras
import pytest

from looptape import Trainer
from looptape.dashboard.event_records import read_records
from looptape.trainer.summaries import event_writer, scalars
from tests.reliability.tools import TIMING, Killed, rows
from tests.trainer.tools import dataset, dense_model, mse, read_events, regression

X, Y = regression(24)


def written(directory, steps=5):
    writer = event_writer.EventWriter(str(directory))
    for step in range(1, steps + 1):
        writer.scalars(step, {"loss": 0.5 * step})
    writer.close()
    [name] = os.listdir(directory)
    return os.path.join(directory, name)


def starts(path):
    """Where each record of an intact file begins, and the end."""
    positions = [0]
    for record in read_records(path)[0]:
        positions.append(positions[-1] + 16 + len(record))
    return positions


@pytest.mark.parametrize("place", [0, 5, 9, 20, -1], ids=["length", "high length", "its checksum", "data", "checksum"])
def test_one_flipped_byte_costs_one_record(place, tmp_path):
    path = written(tmp_path)
    begin, end = starts(path)[3:5]  # after the version: the row of step 3
    with open(path, "r+b") as file:
        at = begin + place if place >= 0 else end + place
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
    with pytest.warns(UserWarning, match=rf"is damaged: {end - begin} bytes cannot.*2 intact records after"):
        found = [step for step, _ in event_writer.read(str(tmp_path))]
    assert found == [1, 2, 4, 5]
    with pytest.warns(UserWarning, match="is damaged"):
        event_writer.drop_later_events(str(tmp_path), 4)
    assert [step for step, _ in event_writer.read(str(tmp_path))] == [1, 2, 4]  # and the file is whole again


def test_damage_in_the_last_record_is_named(tmp_path):
    path = written(tmp_path)
    with open(path, "r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"\xff\xff")
    with pytest.warns(UserWarning, match="is damaged.*0 intact records after"):
        assert [step for step, _ in event_writer.read(str(tmp_path))] == [1, 2, 3, 4]


@pytest.mark.parametrize("cut", [1, 12, 30])
def test_a_record_that_is_cut_off_is_normal(cut, tmp_path):
    path = written(tmp_path)
    os.truncate(path, os.path.getsize(path) - cut)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert [step for step, _ in event_writer.read(str(tmp_path))] == [1, 2, 3, 4]


def make(**options):
    return Trainer(dense_model(), keras.optimizers.SGD(0.03), {"error": mse()}, clip_norm=0.3, **options)


def fit(trainer, workdir, steps=8, **options):
    data = dataset(X, Y, batch=4).repeat()
    options = {"log_every": 8, "workdir": workdir, "progress": False, **options}
    return trainer.fit(data, steps=steps, **options)


def test_rows_do_not_depend_on_how_many_updates_a_call_makes(tmp_path):
    found = []
    for calls in (1, 3, 7, 64):
        fit(make(steps_per_call=calls), tmp_path / str(calls), steps=64, log_every=64)
        [(_, values)] = [row for row in read_events(tmp_path / str(calls) / "train") if scalars.ROW in row[1]]
        found.append({tag: value.tobytes() for tag, value in values.items() if tag not in TIMING})
    assert found[0] == found[1] == found[2] == found[3]


class DiesAtTheEnd(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        raise Killed


def test_rows_that_were_written_after_the_checkpoint_of_their_step_stand_once(tmp_path):
    """Saved at step 8; then the last row and the last evaluation are written; then the process dies."""
    options = {"eval_dataset": dataset(X, Y, batch=24), "checkpoint_every": 4, "log_every": 5}
    with pytest.raises(Killed):
        fit(make(), tmp_path, callbacks=[DiesAtTheEnd()], **options)
    assert [step for step, _ in rows(tmp_path)] == [5, 8] and [step for step, _ in rows(tmp_path, "eval")] == [8]
    fit(make(), tmp_path, **options)
    assert [step for step, _ in rows(tmp_path)] == [5, 8]
    assert [step for step, _ in rows(tmp_path, "eval")] == [8]
