"""The history that `diagnose` looks back at: thinned, rewound, and of the present list of variables."""

import numpy as np

from looptape.trainer.health import history


def test_a_long_series_is_thinned_and_keeps_its_ends():
    series = history.Series()
    for step in range(5 * history.MOST):
        series.add(step, step)
    assert len(series.steps) <= history.MOST and series.steps == series.values == sorted(set(series.steps))
    assert series.steps[0] == 0 and series.steps[-1] == 5 * history.MOST - 1
    assert len(series.steps) > history.MOST / 4 and np.diff(series.steps).max() <= 16


def test_a_step_that_comes_again_replaces_what_came_after_it():
    series = history.Series()
    for step, value in ((1, "a"), (2, "b"), (3, "c"), (2, "d")):
        series.add(step, value)
    assert series.steps == [1, 2] and series.values == ["a", "d"]


def test_rows_of_several_lengths_and_lists():
    rows = history.History()
    rows.add_timesteps("lstm", "state", 1, [1.0, 2.0])
    rows.add_timesteps("lstm", "state", 2, [1.0, 2.0, 3.0])
    rows.add_timesteps("lstm", "gain", 2, [1.0])  # not of the same steps: left out
    rows.add_timesteps("lstm", "input", 1, [1.0])
    layers = rows.layers()["lstm"]
    assert set(layers) == {"steps", "state", "cell_class", "backward"} and layers["cell_class"] == ""  # not known
    rows.add_timesteps("turned", "state", 1, [1.0], direction="backward")
    assert (layers["backward"], rows.layers()["turned"]["backward"]) == (False, True)
    np.testing.assert_array_equal(layers["state"], [[1, 2, np.nan], [1, 2, 3]])
    rows.add_health("", ["a", "b"], 1, np.ones((4, 2)))
    rows.add_health("", ["a"], 2, np.zeros((4, 1)))
    assert rows.health()[""]["variables"] == ["a"] and rows.health()[""]["ratio"].shape == (1, 1)
    rows.rewind(1)
    assert rows.health()[""]["variables"] == ["a", "b"] and rows.layers()["lstm"]["steps"].tolist() == [1]


def test_scalars_under_their_old_and_new_names():
    rows = history.History()
    rows.add_scalars(1, {"loss/error": 1.0, "gradient_cosine/a-b": -0.5, "gradient_cosine/update-mean": 1.0, "x": 1.0})
    rows.add_scalars(2, {"loss/error": 0.5, "optimizer/gradient_cosine/a-c": 0.5})
    assert rows.losses() == {"": ([1, 2], [1.0, 0.5])}
    assert rows.cosines() == {"a-b": [-0.5], "a-c": [0.5]}
