"""The format of health rows: three digits over the whole range of float32, exact ends of fractions, foreign bytes."""

import json

import numpy as np
import pytest
from tensorboard.util import tensor_util

from looptape.dashboard import health_rows


def test_norms_keep_three_digits_and_what_is_not_finite():
    values = np.concatenate([10.0 ** np.random.default_rng(0).uniform(-37, 37, 500), [0.0]]).astype("float32")
    found = health_rows.decode("ratio", health_rows.encode("ratio", values))
    np.testing.assert_allclose(found, values, rtol=2**-8)
    odd = health_rows.decode("gradient", health_rows.encode("gradient", [np.nan, np.inf, 1e300, 1.0]))
    assert np.isnan(odd[0]) and odd[1:].tolist() == [np.inf, np.inf, 1.0]


def test_rounding_is_to_the_nearest():
    exact = np.float32(1 + 2**-7)  # representable
    for value, expected in ((exact, exact), (1 + 0.9 * 2**-8, 1.0), (1 + 1.1 * 2**-8, exact)):
        assert health_rows.decode("weight", health_rows.encode("weight", [value]))[0] == np.float32(expected)


def test_fractions_are_0_and_1_only_if_they_are():
    values = [0.0, 1e-9, 0.5, 1 - 1e-9, 1.0, np.nan]
    found = health_rows.decode("zeros", health_rows.encode("zeros", values))
    assert found[0] == 0 and 0 < found[1] < 0.01 and found[2] == pytest.approx(0.5, abs=2e-3)
    assert 0.99 < found[3] < 1 and found[4] == 1 and np.isnan(found[5])
    assert health_rows.encode("zeros", values).dtype == np.uint8


def test_a_summary_is_read_back_without_tensorflow():
    summary = health_rows.summary("ratio", [0.5, 0.25], ["a/kernel", "a/bias"], "generator", 2)
    assert summary.tag == "health/generator/ratio@2"
    content = health_rows.parse_content(summary.metadata.plugin_data.content)
    assert content["variables"] == ["a/kernel", "a/bias"] and content["minimizer"] == "generator"
    codes = tensor_util.make_ndarray(summary.tensor)
    np.testing.assert_array_equal(health_rows.decode(content["quantity"], codes), [0.5, 0.25])


@pytest.mark.parametrize(
    "change",
    [{"version": 99}, {"kind": "vector"}, {"quantity": "x"}, {"variables": [1]}, {"minimizer": None}, {"part": "1"}],
)
def test_foreign_metadata_is_none(change):
    content = health_rows.content("ratio", ["a"])
    assert health_rows.parse_content(json.dumps(content)) == content
    assert health_rows.parse_content(json.dumps({**content, **change})) is None


def test_what_is_no_json_is_none():
    for text in (b"", b"\xff", b"[]", b"[" * 100_000):
        assert health_rows.parse_content(text) is None
    with pytest.raises(ValueError, match="`quantity` is 'norm'; it must be one of gradient"):
        health_rows.content("norm", [])
