"""Checksums against TensorBoard's, and runs that are read from damaged event files."""

import itertools
import time
import warnings

import numpy as np
import pytest
from tensorboard.compat.proto import summary_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

import looptape
from looptape.dashboard import event_records, report
from tests.dashboard.event_files import RunWriter


def test_checksums_are_those_of_tensorboard():
    contents = np.random.default_rng(0).integers(0, 256, 70_000, np.uint8).tobytes()
    lengths = [*range(140), 1000, 4096, 65_535]
    parts = [contents[length : 2 * length] if length < 30_000 else contents[:length] for length in lengths]
    expected = [masked_crc32c(part) for part in parts]
    assert event_records.masked_crc32c(parts).tolist() == expected
    assert [event_records.masked_crc32c([part])[0] for part in parts[::20]] == expected[::20]


def test_a_long_file_is_checked_at_once():
    parts = [bytes(1000)] * 8000
    begin = time.perf_counter()
    event_records.masked_crc32c(parts)
    assert time.perf_counter() - begin < 2  # TensorBoard's own function takes 0.1 µs or more per byte


@pytest.fixture
def workdir(tmp_path):
    with RunWriter(tmp_path / "train") as writer:
        for step in range(1, 10):
            writer.write(step, [summary_pb2.Summary.Value(tag="loss/total", simple_value=step / 2)])
    return tmp_path


def starts(path):
    """Where each record of a file begins, and the end."""
    lengths = [len(record) + 16 for record in event_records.read_records(path)[0]]
    return [0, *itertools.accumulate(lengths)]


PLACES = {"length": 0, "high length": 5, "its checksum": 9, "kind": 12, "value": -8, "checksum": -1}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_one_flipped_byte_costs_one_row(place, workdir):
    [path] = (workdir / "train").iterdir()
    begin, end = starts(path)[4:6]  # after the version: step 4
    contents = bytearray(path.read_bytes())
    contents[begin + place if place >= 0 else end + place] ^= 0x10
    path.write_bytes(contents)
    with pytest.warns(UserWarning, match=rf"is damaged: {end - begin} bytes cannot.*The 5 intact records after"):
        steps, values = looptape.read(workdir).scalars["loss/total"]
    assert steps.tolist() == [1, 2, 3, 5, 6, 7, 8, 9]
    assert (values == steps / 2).all()
    with pytest.warns(UserWarning, match="is damaged"):
        report.report([workdir], workdir / "report.html")


def test_two_damaged_places_cost_two_rows(workdir):
    [path] = (workdir / "train").iterdir()
    places = starts(path)
    contents = bytearray(path.read_bytes())
    contents[places[2]] ^= 1  # a length
    contents[places[6] + 14] ^= 1  # contents
    path.write_bytes(contents)
    with pytest.warns(UserWarning, match="The 6 intact records after"):
        assert looptape.read(workdir).scalars["loss/total"][0].tolist() == [1, 3, 4, 5, 7, 8, 9]


@pytest.mark.parametrize("cut", [1, 8, 20])
def test_a_record_that_is_cut_off_needs_no_warning(cut, workdir):
    [path] = (workdir / "train").iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert looptape.read(workdir).scalars["loss/total"][0].tolist() == list(range(1, 9))


def test_a_record_that_is_no_event_is_named(workdir):
    path = workdir / "train" / "events.out.tfevents.2.other"
    body, length = b"\x0a\xff\xff", (3).to_bytes(8, "little")
    path.write_bytes(
        length + masked_crc32c(length).to_bytes(4, "little") + body + masked_crc32c(body).to_bytes(4, "little")
    )
    with pytest.warns(UserWarning, match=r"tfevents.2.other holds records that are no events: 1 of 1, which"):
        assert len(looptape.read(workdir).scalars["loss/total"][0]) == 9
