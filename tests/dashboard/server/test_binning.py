"""From rows to pictures, against plain loops over single cells."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from looptape.dashboard import metadata
from looptape.dashboard.server import binning
from looptape.dashboard.server.series import Rows, stack

NAN, INF, PAD = np.nan, np.inf, None


def rows_of(*rows):
    """Rows with None for padding, as the reader hands them on."""
    return stack(
        list(
            enumerate(
                metadata.encode_row([0 if v is None else v for v in row], [v is not None for v in row]) for row in rows
            )
        ),
        1,
    ).values


def as_lists(values):
    """The reverse of `rows_of`, NaN written as the text "nan" so that lists can be compared."""
    numbers, valid = metadata.decode_row(values)
    return [
        [None if not ok else "nan" if np.isnan(v) else float(v) for v, ok in zip(row, oks, strict=True)]
        for row, oks in zip(numbers, valid, strict=True)
    ]


def decoded(picture):
    """Codes as numbers, None for padding and texts for what is no number."""
    names = {binning.PADDING: None, binning.ZERO: "zero", binning.INF: "inf", binning.NAN: "nan"}
    per_code = (picture.high - picture.low) / (binning.LAST - binning.FIRST) if picture.low is not None else 0
    return [
        [names[c] if c in names else picture.low + (int(c) - binning.FIRST) * per_code for c in row]
        for row in picture.codes
    ]


def test_align_end_moves_each_row_by_its_own_length():
    values = rows_of([1, 2, 3], [4, 5, PAD], [PAD, 6, PAD], [PAD, PAD, PAD])
    assert as_lists(binning.align_end(values)) == [[1, 2, 3], [PAD, 4, 5], [PAD, PAD, 6], [PAD, PAD, PAD]]
    assert as_lists(binning.align_end(values[:2], width=5)) == [[PAD, PAD, 1, 2, 3], [PAD, PAD, PAD, 4, 5]]


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (0, 4)])
def test_rows_without_time_steps_stay_empty(shape):
    nothing = np.zeros(shape, dtype=np.float32)
    assert binning.align_end(nothing).shape == shape
    assert binning.normalise_last(nothing).shape == shape


def test_normalise_divides_by_the_last_number_that_is_not_zero():
    values = rows_of([8, 4, 2], [8, 4, PAD], [6, 3, 0], [0, 0, 0], [4, 2, NAN], [NAN, INF, 2])
    assert as_lists(binning.normalise_last(values)) == [
        [4, 2, 1], [2, 1, PAD], [2, 1, 0], [0, 0, 0], [2, 1, "nan"], ["nan", INF, 1],
    ]  # fmt: skip


def test_difference_compares_with_the_nearest_step_inside_the_baselines_range():
    ours = Rows(np.array([0, 10, 20, 30, 40]), rows_of([10], [10], [10], [10], [10]), 0)
    theirs = Rows(np.array([8, 21, 33]), rows_of([1], [100], [1000]), 0)
    steps, values = binning.difference(ours, theirs)
    np.testing.assert_array_equal(steps, [10, 20, 30])
    np.testing.assert_allclose(values[:, 0], [1, -1, -2])


def test_difference_of_zeros_nonfinite_and_padding():
    ours = Rows(np.array([1]), rows_of([0, 0, 2, NAN, PAD, 100, INF]), 0)
    theirs = Rows(np.array([1]), rows_of([0, 3, 0, 1, 1, 10]), 0)
    values = binning.difference(ours, theirs)[1]
    assert as_lists(values) == [[0, -INF, INF, "nan", PAD, 1, PAD]]


def test_difference_of_different_lengths_counts_from_either_end():
    ours = Rows(np.array([1]), rows_of([1, 10, 100]), 0)
    theirs = Rows(np.array([1]), rows_of([1, 1]), 0)
    assert as_lists(binning.difference(ours, theirs)[1]) == [[0, 1, PAD]]
    assert as_lists(binning.difference(ours, theirs, end=True)[1]) == [[PAD, 1, 2]]


def test_difference_without_common_steps_is_empty():
    ours = Rows(np.array([1, 2]), rows_of([1], [1]), 0)
    theirs = Rows(np.array([5, 6]), rows_of([1], [1]), 0)
    steps, values = binning.difference(ours, theirs)
    assert len(steps) == 0 and values.shape == (0, 1)
    assert binning.picture(values).codes.shape == (0, 1)


def test_picture_keeps_what_no_number_is():
    picture = binning.picture(rows_of([1, 0, NAN, INF, PAD, 1e-6, -1]))
    assert decoded(picture) == [[0, "zero", "nan", "inf", None, pytest.approx(-6), "nan"]]
    assert picture.nonfinite.tolist() == [1]


def test_merging_shows_the_worst_of_what_went_in():
    values = rows_of([1, 0, PAD, 1], [10, 1, PAD, NAN], [2, PAD, 0, INF], [INF, 0.1, PAD, 3])
    picture = binning.picture(values, max_rows=2)
    np.testing.assert_allclose(
        np.array([[c if isinstance(c, float) else -99 for c in row] for row in decoded(picture)]),
        [[1, 0, -99, -99], [-99, -1, -99, -99]],
        atol=1e-4,
    )
    assert [row[2:] for row in decoded(picture)] == [[None, "nan"], ["zero", "inf"]]
    assert picture.starts.tolist() == [0, 2]
    assert picture.nonfinite.tolist() == [1, 2]
    assert picture.peaks.tolist() == [1, 2]


def test_merging_by_magnitude_keeps_the_farther_from_zero():
    values = rows_of([0.5, -0.1, 0.2], [-0.75, 0.3, NAN], [0.1, 0.1, PAD], [0.25, -0.2, -0.1])
    picture = binning.picture(values, logarithmic=False, by_magnitude=True, max_rows=2)
    numbers = [[c if not isinstance(c, float) else round(c, 3) for c in row] for row in decoded(picture)]
    assert numbers == [[-0.75, 0.3, "nan"], [0.25, -0.2, -0.1]]


def test_one_bad_row_in_ten_thousand_is_never_hidden():
    values = np.full((10_000, 20), 0.5, dtype=np.float32)
    values[7_777, 3] = np.nan
    picture = binning.picture(values)
    assert picture.codes.shape == (400, 20)
    assert (picture.codes == binning.NAN).sum() == 1 and picture.nonfinite.sum() == 1
    bad = int(picture.nonfinite.argmax())
    assert picture.peaks[bad] == 7_777


@pytest.mark.parametrize(("rows", "time"), [(10_000, 200), (1_000, 5_000), (3, 100_000), (100_000, 3)])
def test_pictures_stay_small(rows, time):
    picture = binning.picture(np.ones((rows, time), dtype=np.float32))
    assert picture.codes.size <= binning.MAX_CELLS
    assert picture.codes.shape[1] <= binning.MAX_COLUMNS
    assert picture.column_width * picture.codes.shape[1] >= time


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (4, 0)])
def test_nothing_is_a_picture_too(shape):
    picture = binning.picture(np.zeros(shape, dtype=np.float32))
    assert picture.codes.size == 0 and picture.low is None


finite = st.floats(2.0**-100, 2.0**100, width=32)
cells = st.one_of(finite, st.sampled_from([0.0, NAN, INF, -1.0]))


@settings(max_examples=60, deadline=None)
@given(
    values=hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=cells),
    mask=st.integers(0, 2**32 - 1),
    max_rows=st.integers(1, 12),
)
def test_pictures_equal_a_loop_over_single_cells(values, mask, max_rows):
    valid = np.random.default_rng(mask).random(values.shape) < 0.8
    picture = binning.picture(metadata.encode_row(values, valid), max_rows=max_rows)
    ends = [*picture.starts[1:].tolist(), len(values)]
    for shown, start, end in zip(decoded(picture), picture.starts.tolist(), ends, strict=True):
        for column, cell in enumerate(shown):
            merged = [values[r, column] for r in range(start, end) if valid[r, column]]
            if not merged:
                assert cell is None
            elif any(np.isnan(v) or v < 0 for v in merged):
                assert cell == "nan"
            elif any(np.isinf(v) for v in merged):
                assert cell == "inf"
            elif max(merged) == 0:
                assert cell == "zero"
            else:
                tolerance = 1e-5 + (picture.high - picture.low) / 60_000
                assert cell == pytest.approx(np.log10(float(max(merged))), abs=tolerance)


def test_stack_pads_sorts_and_leaves_out():
    rows = stack(
        [
            (30, np.float32([1, 2, 3])),
            (10, np.float32([4])),
            (20, np.float32([[1, 2]])),
            (40, np.array([b"text"], dtype=object)),
            (30, np.float64([7, 8])),
            (50, np.array(3.0, dtype=np.float32)),
        ],
        rank=1,
    )
    np.testing.assert_array_equal(rows.steps, [10, 30])
    assert as_lists(rows.values) == [[4, PAD], [7, 8]]
    assert rows.skipped == 3
