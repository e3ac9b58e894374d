"""Tables of health rows against numbers that were written: by layer, by variable, of several minimizers and lists."""

import numpy as np
import pytest

from looptape.dashboard import health_rows, layer_tables

NAMES = ["model/lstm/cell/kernel", "model/lstm/cell/bias", "model/head/kernel"]


def rows(quantity, by_step, names=NAMES, minimizer="", part=1):
    codes = {step: health_rows.encode(quantity, np.array(values)) for step, values in by_step.items()}
    tag = health_rows.tag(quantity, minimizer, part)
    return {tag: (health_rows.content(quantity, names, minimizer, part), codes)}


def test_the_ratio_of_a_layer_is_that_of_all_its_variables():
    """0.5 · 4 and 0.25 · 2 of a weight of norm √(16 + 4)."""
    tags = rows("ratio", {10: [0.5, 0.25, 0.125]}) | rows("weight", {10: [4.0, 2.0, 1.0]})
    table = layer_tables.updates(tags)
    assert table["layers"] == ["lstm/cell", "head"] and table["steps"] == [10]
    expected = np.hypot(0.5 * 4, 0.25 * 2) / np.hypot(4, 2)
    np.testing.assert_allclose(np.array(table["values"]), [[expected], [0.125]], rtol=1e-3)


def test_variables_of_minimizers_and_of_lists_that_changed():
    tags = rows("gradient", {1: [1.0, 2.0, np.nan]}) | rows("gradient", {2: [4.0]}, NAMES[2:], part=2)
    tags |= rows("gradient", {2: [8.0]}, ["dense/kernel"], "critic")
    table = layer_tables.variables(tags, "gradient")
    assert table["layers"] == ["lstm/cell/kernel", "lstm/cell/bias", "head/kernel", "critic/dense/kernel"]
    assert table["values"] == [[1.0, None], [2.0, None], [None, 4.0], [None, 8.0]]
    assert layer_tables.variables(tags, "zeros") is None and layer_tables.updates(tags) is None


def test_long_runs_are_thinned_and_keep_their_ends():
    tags = rows("zeros", {step: [0.0, 1.0, 0.5] for step in range(1, 1001)})
    table = layer_tables.variables(tags, "zeros")
    assert len(table["steps"]) == layer_tables.MAX_ROWS and table["steps"][0] == 1 and table["steps"][-1] == 1000
    assert [row[0] for row in table["values"]] == pytest.approx([0.0, 1.0, 0.5])


def test_a_new_bias_of_norm_0_is_left_out():
    tags = rows("ratio", {1: [0.5, np.inf, 0.1]}) | rows("weight", {1: [4.0, 0.0, 1.0]})
    assert layer_tables.updates(tags)["values"][0] == pytest.approx([0.5])
