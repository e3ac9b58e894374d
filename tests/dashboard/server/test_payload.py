"""What goes over the wire, read back."""

import csv
import gzip
import io

import numpy as np
import pytest

from looptape.dashboard import metadata
from looptape.dashboard.server import payload
from looptape.dashboard.server.series import stack


def test_container_comes_back_with_aligned_arrays():
    arrays = {
        "codes": np.arange(15, dtype=np.uint16).reshape(3, 5),
        "gaps": np.array([4_000_000_000], dtype=np.uint32),
        "none": np.zeros((0, 7), dtype=np.uint16),
        "values": metadata.encode_row([1.0, np.nan, 2.0], [True, True, False]),
    }
    message = gzip.decompress(payload.pack({"step": 7, "run": "ünï <b>", "low": None}, arrays))
    header, found = payload.unpack(message)
    assert header == {"step": 7, "run": "ünï <b>", "low": None}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name].view(np.uint8), array.reshape(found[name].shape).view(np.uint8))
    import json

    entries = json.loads(message[8 : 8 + int(np.frombuffer(message, "<u4", 1, 4)[0])])["arrays"]
    assert all(int(entry["offset"]) % 8 == 0 for entry in entries)


def test_container_refuses_what_is_not_one_and_nan_in_its_header():
    with pytest.raises(ValueError, match="begins with b'<htm'"):
        payload.unpack(b"<html>")
    with pytest.raises(ValueError, match="not JSON compliant"):
        payload.pack({"low": float("nan")}, {})


def test_csv_holds_every_value_to_the_last_bit():
    values = np.float32([1 / 3, 1.2345678e-38, 3.4028234e38, 0])
    rows = stack(
        [
            (10, values),
            (20, metadata.encode_row([np.nan, np.inf, -np.inf, 5], [True, True, True, False])),
            (30, np.float32([1])),
        ],
        rank=1,
    )
    table = list(csv.reader(io.StringIO(payload.rows_csv(rows))))
    assert table[0] == ["step", "t0", "t1", "t2", "t3"]
    np.testing.assert_array_equal(np.float32([float(v) for v in table[1][1:]]), values)
    assert table[2] == ["20", "nan", "inf", "-inf", ""]
    assert table[3] == ["30", "1", "", "", ""]
