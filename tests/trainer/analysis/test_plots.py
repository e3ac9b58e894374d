"""The pictures by the data that they hold."""

import io

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from looptape.trainer.analysis import plots


def rendered(axes):
    """A picture can be drawn, and has something in it."""
    file = io.BytesIO()
    axes.figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")


def test_norms_show_the_median_and_quantiles_of_the_logarithm():
    values = 10.0 ** np.array([[0, -1, -2], [1, 0, -1], [2, 1, 0], [3, 2, 1], [4, 3, 2]])
    axes = plots.norms(values)
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [2, 1, 0])
    widest, middle = (area.get_paths()[0].vertices[:, 1] for area in axes.collections)
    assert (widest.max(), middle.max()) == (pytest.approx(3.6), pytest.approx(3.0))
    assert (widest.min(), middle.min()) == (pytest.approx(-1.6), pytest.approx(-1.0))
    rendered(axes)


def test_norms_leave_zeros_and_padding_blank():
    line = plots.norms(np.array([0.0, 1.0, np.nan, 100.0])).lines[0].get_ydata()
    np.testing.assert_allclose(line, [np.nan, 0, np.nan, 2])


def test_several_norms_share_the_axes():
    axes = plots.norms({"a": np.ones(3), "b": np.full(3, 10.0)})
    assert [line.get_label() for line in axes.lines] == ["a", "b"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert axes.lines[0].get_color() != axes.lines[1].get_color()


def test_gains_have_one_line_at_one():
    axes = plots.gains({"a": [0.5, 2.0], "b": [1.0, 1.5]})
    assert [list(line.get_ydata()) for line in axes.lines] == [[1, 1], [0.5, 2.0], [1.0, 1.5]]
    rendered(axes)


def test_the_heat_map_places_rows_by_step():
    axes = plots.over_training([0, 10, 100], 10.0 ** np.arange(6).reshape(3, 2))
    mesh = axes.collections[0]
    np.testing.assert_allclose(np.asarray(mesh.get_array()).reshape(3, 2), np.arange(6).reshape(3, 2))
    np.testing.assert_allclose(mesh.get_coordinates()[:, 0, 1], [0, 5, 55, 100])
    rendered(axes)


def test_the_credit_map_is_triangular():
    axes = plots.credit(np.tril(np.full((3, 3), 100.0)))
    shown = np.ma.filled(np.ma.masked_invalid(axes.collections[0].get_array()), np.nan).reshape(3, 3)
    np.testing.assert_allclose(shown, [[2, np.nan, np.nan], [2, 2, np.nan], [2, 2, 2]])
    rendered(axes)


def test_the_credit_map_shows_the_time_steps_that_have_a_loss():
    matrix = np.zeros((5, 5))
    matrix[2, :3], matrix[3, :4] = 1.0, 1.0
    assert plots.credit(matrix).get_ylim() == (1.5, 3.5)


def test_shares_are_stacked_on_both_sides_of_zero():
    axes = plots.shares({"a": [0.7, 1.5], "b": [0.3, -0.5]})
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in axes.collections[::2]]
    lows = [area.get_paths()[0].vertices[:, 1].min() for area in axes.collections[1::2]]
    assert tops == [pytest.approx(1.5), pytest.approx(1.5)] and lows == [0, pytest.approx(-0.5)]
    rendered(axes)


def test_an_axes_of_ones_own():
    from matplotlib.figure import Figure

    own = Figure().subplots()
    assert plots.gains([1.0, 2.0], own) is own


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plots.over_training([1], [[1.0]]), "one row"),
        (lambda: plots.credit([1.0, 2.0]), r"must be \[time, time\]"),
        (lambda: plots.shares([1.0]), "must be {loss"),
        (lambda: plots.spread({}), "There are no curves to draw"),
    ],
)
def test_bad_input(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
