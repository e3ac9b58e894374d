"""A real TensorBoard, started without any flag of ours, with either loader and without tensorflow."""

import csv
import io
import json
import urllib.parse
import urllib.request

import numpy as np
import pytest

from looptape.dashboard import metadata
from looptape.dashboard.server import binning, payload
from tests.dashboard import boards, odd_runs
from tests.dashboard.event_files import RunWriter


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd_runs")
    odd_runs.write_odd_runs(folder)
    return folder


@pytest.fixture(scope="module", params=["rust", "python"])
def board(request, logdir, tmp_path_factory):
    """The Rust loader behind a path prefix, the Python loader without one."""
    options = {"rust": {"path_prefix": "/a/b"}, "python": {}}[request.param]
    flags = {"rust": ["--load_fast", "true"], "python": ["--load_fast", "false"]}[request.param]
    with boards.tensorboard(logdir, tmp_path_factory.mktemp("board"), *flags, **options) as started:
        started.wait_for_tag("long", "timestep/lstm/state", 10 * (odd_runs.LONG_ROWS - 1))
        started.wait(lambda: len(started.tags()["runs"]) >= 8, "all runs")
        started.wait_for_tag("resumed", "timestep/lstm/state", 40)
        yield started


def heatmap(board, run, tag, **query):
    status, headers, body = board.get("heatmap", run=run, tag=tag, **query)
    assert status == 200, body
    assert headers["Content-Type"] == "application/octet-stream"
    header, arrays = payload.unpack(body)
    return header, arrays


def numbers(header, arrays):
    """Codes back to numbers (log10), NaN for everything that is none."""
    codes = arrays["codes"].astype(np.float64)
    span = (header["high"] - header["low"]) / (binning.LAST - binning.FIRST)
    values = header["low"] + (codes - binning.FIRST) * span
    return np.where((codes >= binning.FIRST) & (codes <= binning.LAST), values, np.nan)


def steps(header, arrays):
    return header["first_step"] + np.cumsum(arrays["step_gaps"].astype(np.int64))


def row(board, run, tag, step):
    status, _, body = board.get("row", run=run, tag=tag, step=step)
    assert status == 200, body
    header, arrays = payload.unpack(body)
    return header["step"], *metadata.decode_row(arrays["values"])


def test_tags_describe_every_series(board):
    found = {series["tag"]: series for series in board.tags()["runs"]["several"]}
    assert found.keys() == {
        "timestep/lstm/state",
        "timestep/lstm/gain",
        "timestep/lstm/weight/kernel",
        "timestep/lstm/loss_share/mse",
        "timestep/lstm/loss_share/l1",
        "timestep/lstm/credit",
    }
    share = found["timestep/lstm/loss_share/mse"]
    assert (share["kind"], share["layer"], share["quantity"], share["loss"]) == (
        "vector",
        "lstm",
        "loss_share",
        "mse",
    )
    assert found["timestep/lstm/credit"]["kind"] == "matrix"
    nested = next(s for s in board.tags()["runs"]["shapes"] if s["layer"] == "nested")
    assert (nested["direction"], nested["time_shape"]) == ("backward", [2, 3])


def test_the_default_keeps_a_thousand_rows_and_says_so(board):
    header, arrays = heatmap(board, "long", "timestep/lstm/state")
    assert header["kept"] == 1000 == len(arrays["step_gaps"])
    assert header["logged"] == odd_runs.LONG_ROWS
    kept = steps(header, arrays)
    assert kept[-1] == 10 * (odd_runs.LONG_ROWS - 1)
    assert len(set(kept.tolist())) == 1000 and set(kept.tolist()) <= {10 * r for r in range(odd_runs.LONG_ROWS)}


def test_a_picture_shows_the_largest_logged_value_of_each_line(board):
    header, arrays = heatmap(board, "long", "timestep/lstm/state")
    kept = steps(header, arrays)
    ends = [*arrays["starts"][1:].tolist(), len(kept)]
    logged = np.array([odd_runs.long_value(step // 10) for step in kept])
    expected = [logged[start:end].max(axis=0) for start, end in zip(arrays["starts"], ends, strict=True)]
    with np.errstate(invalid="ignore"):
        expected = np.log10(np.array(expected, dtype=np.float64))
    expected[~np.isfinite(expected)] = np.nan
    np.testing.assert_allclose(numbers(header, arrays), expected, atol=1e-3)
    assert len(arrays["starts"]) == 400
    last = arrays["codes"][-1]
    assert (last[2], last[3]) == (binning.NAN, binning.INF)
    assert arrays["nonfinite"].tolist() == [0] * 399 + [1]
    assert kept[arrays["peaks"][-1]] == 10 * (odd_runs.LONG_ROWS - 1)


def test_a_row_is_exact_and_the_nearest_kept_one(board):
    header, arrays = heatmap(board, "long", "timestep/lstm/state")
    for step in steps(header, arrays)[[0, 500, 999]].tolist():
        found, values, _ = row(board, "long", "timestep/lstm/state", step)
        assert found == step
        np.testing.assert_array_equal(values, odd_runs.long_value(step // 10))
    assert row(board, "several", "timestep/lstm/state", 24)[0] == 20
    assert row(board, "several", "timestep/lstm/state", 10**9)[0] == 30


def test_padding_nan_and_inf_stay_apart(board):
    _, values, valid = row(board, "shapes", "timestep/padded/state", 0)
    np.testing.assert_array_equal(values, np.float32([1, 2, np.nan, np.nan]))
    np.testing.assert_array_equal(valid, [True, True, True, False])
    _, arrays = heatmap(board, "shapes", "timestep/padded/state")
    assert arrays["codes"][:, 1:].tolist()[0][1:] == [binning.NAN, binning.PADDING]
    assert arrays["codes"][1, [1, 2, 3]].tolist() == [binning.PADDING, binning.INF, binning.PADDING]


def test_lengths_that_change_are_padded_and_other_shapes_counted(board):
    header, arrays = heatmap(board, "shapes", "timestep/ragged/state")
    assert (header["time"], header["kept"], header["skipped"], header["logged"]) == (5, 4, 1, 5)
    widths = (arrays["codes"] != binning.PADDING).sum(axis=1)
    assert widths.tolist() == [3, 2, 5, 0]
    header, arrays = heatmap(board, "shapes", "timestep/ragged/state", align="end")
    assert (arrays["codes"][:, -1] != binning.PADDING).tolist() == [True, True, True, False]
    np.testing.assert_allclose(10 ** numbers(header, arrays)[0, 2:], [1, 2, 3], rtol=1e-4)


def test_rows_of_nan_and_rows_of_zero(board):
    header, arrays = heatmap(board, "shapes", "timestep/bad/state")
    assert arrays["codes"].tolist() == [[binning.NAN] * 3, [binning.ZERO] * 3]
    assert (header["low"], header["high"], arrays["nonfinite"].tolist()) == (None, None, [1, 0])
    for query in ({"normalise": "last"}, {"align": "end"}, {"minus": "shapes"}):
        assert heatmap(board, "shapes", "timestep/bad/state", **query)[1]["codes"].shape == (2, 3)


def test_normalised_and_difference(board):
    header, arrays = heatmap(board, "several", "timestep/lstm/state", normalise="last")
    np.testing.assert_allclose(10 ** numbers(header, arrays), [[4, 2, 1]] * 3, rtol=1e-4)
    header, arrays = heatmap(board, "several", "timestep/lstm/state", minus="resumed")
    # At 10, 20 and 30 the other run logged [step, 1], then [30.5, 1]; it has two time steps only.
    expected = np.log10([[40 / 10, 20], [80 / 20, 40], [120 / 30.5, 60]])
    np.testing.assert_allclose(numbers(header, arrays)[:, :2], expected, atol=1e-4)
    assert (arrays["codes"][:, 2] == binning.PADDING).all()
    assert header["merged_by"] == "magnitude"


def test_shares_are_linear_and_may_be_negative(board):
    header, arrays = heatmap(board, "several", "timestep/lstm/loss_share/mse")
    np.testing.assert_allclose(numbers(header, arrays)[0], [0.5, 1.5, -0.25], atol=1e-4)


def test_credit_is_the_nearest_matrix_without_its_future_half(board):
    status, _, body = board.get("matrix", run="several", tag="timestep/lstm/credit", step=11)
    header, arrays = payload.unpack(body)
    assert (status, header["step"], header["steps"]) == (200, 10, [10, 30])
    np.testing.assert_allclose(
        10 ** numbers(header, arrays)[np.tril_indices(3)], 10.0 ** -np.array([0, 3, 4, 6, 7, 8]), rtol=1e-3
    )
    assert (arrays["codes"][np.triu_indices(3, 1)] == binning.PADDING).all()


def test_a_resumed_run_shows_no_step_twice(board):
    header, arrays = heatmap(board, "resumed", "timestep/lstm/state")
    assert steps(header, arrays).tolist() == [10, 20, 30, 40]
    assert row(board, "resumed", "timestep/lstm/state", 30)[1][0] == 30.5
    assert header["logged"] == 4


def test_half_written_files_and_missing_counts(board):
    header, arrays = heatmap(board, "cut-off", "timestep/lstm/state")
    assert steps(header, arrays).tolist() == [1, 2]
    assert heatmap(board, "uncounted", "timestep/lstm/state")[0]["logged"] is None


def test_foreign_tags_are_reported_and_do_no_harm(board):
    tags = board.tags()
    assert sorted(tags["unreadable"]) == [
        "foreign: timestep/lstm/from_the_future",
        "foreign: timestep/lstm/garbage",
        "foreign: timestep/lstm/nested",
    ]
    status, _, body = board.get("heatmap", run="foreign", tag="timestep/lstm/garbage")
    assert status == 404 and b"another version" in body
    for query in (
        {},
        {"align": "end"},
        {"normalise": "last"},
        {"minus": "several"},
        {"minus": "several", "align": "end"},
    ):
        tag = "timestep/lstm/state" if "minus" in query else "timestep/lstm/texts"
        assert heatmap(board, "foreign", tag, **query)[0]["time"] == (3 if "minus" in query else 0)
    header, _ = heatmap(board, "foreign", "timestep/lstm/texts")
    assert (header["kept"], header["skipped"]) == (0, 1)
    status, _, body = board.get("row", run="foreign", tag="timestep/lstm/texts", step=1)
    assert status == 404 and b"no readable rows" in body


def test_names_with_markup_and_slashes_open(board):
    runs = board.tags()["runs"]
    assert odd_runs.MARKUP_RUN in runs
    assert {series["layer"] for series in runs[odd_runs.MARKUP_RUN]} == {odd_runs.MARKUP_LAYER}
    for series in runs[odd_runs.MARKUP_RUN]:
        assert heatmap(board, odd_runs.MARKUP_RUN, series["tag"])[0]["kept"] == 1


@pytest.mark.parametrize(
    ("route", "query", "status", "sentence"),
    [
        ("heatmap", {"run": "nobody", "tag": "timestep/lstm/state"}, 404, "There is no tag"),
        ("heatmap", {"run": "long", "tag": "timestep/lstm/nothing"}, 404, "There is no tag"),
        ("heatmap", {"run": "long", "tag": "loss/total"}, 404, "There is no tag"),
        (
            "heatmap",
            {"run": "several", "tag": "timestep/lstm/state", "minus": "nobody"},
            404,
            "There is no tag",
        ),
        ("heatmap", {}, 400, "The query lacks `run`"),
        ("heatmap", {"run": "long"}, 400, "The query lacks `tag`"),
        (
            "heatmap",
            {"run": "several", "tag": "timestep/lstm/state", "align": "x"},
            400,
            "`align` is 'x'; it must",
        ),
        (
            "heatmap",
            {"run": "several", "tag": "timestep/lstm/state", "rows": "0"},
            400,
            "`rows` is '0'; it must",
        ),
        ("heatmap", {"run": "several", "tag": "timestep/lstm/state", "rows": "1e9"}, 400, "whole number"),
        ("heatmap", {"run": "several", "tag": "timestep/lstm/credit"}, 400, "holds a matrix"),
        (
            "heatmap",
            {"run": "several", "tag": "timestep/lstm/loss_share/mse", "normalise": "last"},
            400,
            "shares",
        ),
        (
            "row",
            {"run": "several", "tag": "timestep/lstm/state"},
            400,
            "`step` is None; it must be a whole number",
        ),
        ("row", {"run": "several", "tag": "timestep/lstm/state", "step": "-1"}, 400, "`step` is '-1'"),
        ("matrix", {"run": "several", "tag": "timestep/lstm/state", "step": "1"}, 400, "holds a vector"),
        ("csv", {"run": "several"}, 400, "The query lacks `tag`"),
    ],
)
def test_bad_requests_get_a_sentence(board, route, query, status, sentence):
    found, _, body = board.get(route, **query)
    assert (found, sentence in body.decode()) == (status, True), body


def test_csv_holds_the_kept_rows(board):
    status, headers, body = board.get("csv", run="shapes", tag="timestep/padded/state")
    assert status == 200 and headers["Content-Type"].startswith("text/csv")
    assert list(csv.reader(io.StringIO(body.decode()))) == [
        ["step", "t0", "t1", "t2", "t3"],
        ["0", "1", "2", "nan", ""],
        ["1", "5", "", "inf", ""],
    ]


def listing(board):
    with urllib.request.urlopen(f"{board.url}data/plugins_listing", timeout=20) as answer:
        return json.load(answer)


def test_own_files_are_served_and_no_others(board):
    module_path = listing(board)["gradient_flow"]["loading_mechanism"]["module_path"]
    folder = module_path.split("gradient_flow/")[1].removesuffix("/index.js")
    status, headers, body = board.get(f"{folder}/index.js")
    assert status == 200 and headers["Content-Type"].startswith("text/javascript")
    assert b"export function render" in body and "max-age" in headers["Cache-Control"]
    assert board.get(f"{folder}/style.css")[1]["Content-Type"].startswith("text/css")
    for path in (
        "../../plugin.py",
        "%2e%2e/%2e%2e/plugin.py",
        "..%2f..%2fplugin.py",
        "../plugin.py",
        "/../../plugin.py",
        "%2e%2e%2f%2e%2e%2f%2e%2e%2fsetup.cfg",
        "..\\..\\plugin.py",
        "/etc/passwd",
        "index.js/../../../plugin.py",
        "__init__.py",
        "",
    ):
        status, _, body = board.get(f"{folder}/{path}")
        assert status in (301, 308, 404), (path, status, body[:200])
        assert b"import" not in body
    assert board.get("static/index.js")[0] == 404


def test_the_tab_is_listed_as_active_beside_the_native_ones(board):
    found = listing(board)
    assert found["gradient_flow"]["enabled"] and found["gradient_flow"]["tab_name"] == "Gradient Flow"
    mechanism = found["gradient_flow"]["loading_mechanism"]
    assert mechanism["type"] == "IFRAME"
    assert mechanism["module_path"].startswith(
        urllib.parse.urlparse(board.url).path + "data/plugin/gradient_flow/static/"
    )
    assert found["scalars"]["enabled"] and found["timeseries"]["enabled"]


def test_answers_are_the_same_from_the_cache(board):
    query = {"run": "several", "tag": "timestep/lstm/gain", "align": "end"}
    assert board.get("heatmap", **query)[2] == board.get("heatmap", **query)[2]


def test_new_rows_are_seen_although_older_answers_are_cached(request, board, logdir):
    run = f"growing-{request.node.callspec.params['board']}"
    with RunWriter(logdir / run) as writer:
        for step in (1, 2):
            writer.row(step, "lstm", {"state": [step, 2]})
            writer.flush()
            board.wait_for_tag(run, "timestep/lstm/state", step)
            header, arrays = heatmap(board, run, "timestep/lstm/state")
            assert (header["kept"], header["logged"]) == (step, step)
            assert row(board, run, "timestep/lstm/state", 10)[1].tolist() == [step, 2]


def test_many_requests_at_once(board):
    from concurrent import futures

    wanted = [
        ("long", "timestep/lstm/state"),
        ("several", "timestep/lstm/gain"),
        ("shapes", "timestep/padded/state"),
    ]
    with futures.ThreadPoolExecutor(12) as pool:
        answers = list(
            pool.map(
                lambda i: board.get("heatmap", run=wanted[i % 3][0], tag=wanted[i % 3][1], rows=300)[2],
                range(24),
            )
        )
    assert [answers.count(answer) for answer in answers] == [8] * 24


def test_a_users_own_sampling_wins(logdir, tmp_path):
    flags = ["--samples_per_plugin", "gradient_flow=7"]
    with boards.tensorboard(logdir, tmp_path, *flags) as started:
        started.wait_for_tag("long", "timestep/lstm/state", 10 * (odd_runs.LONG_ROWS - 1))
        header, _ = heatmap(started, "long", "timestep/lstm/state")
    assert (header["kept"], header["logged"]) == (7, odd_runs.LONG_ROWS)


def test_relative_rows_are_divided_by_their_largest_value(board):
    header, arrays = heatmap(board, "several", "timestep/lstm/state", normalise="largest")
    np.testing.assert_allclose(numbers(header, arrays), np.log10([[1, 0.5, 0.25]] * 3), atol=1e-4)


def test_the_difference_to_a_layer_of_another_name(board):
    query = {"minus": "shapes", "minus_tag": "timestep/padded/state"}
    status, _, body = board.get("heatmap", run="several", tag="timestep/lstm/gain", **query)
    assert status == 200, body
    assert board.get("heatmap", run="several", tag="timestep/lstm/gain", minus="shapes")[0] == 404


def test_verdicts_of_a_run(board):
    status, _, body = board.get("verdicts", run="long")
    assert status == 200, body
    (found,) = json.loads(body)["findings"]
    assert (found["word"], found["layer"], found["tone"]) == ("NaN/Inf", "lstm", "bad")
    assert "first at step 14,990" in found["text"]
    words = {f["layer"]: f["word"] for f in json.loads(board.get("verdicts", run="shapes")[2])["findings"]}
    assert words == {"bad": "NaN/Inf", "padded": "NaN/Inf", "ragged": "too early", "nested": "too early"}
    assert json.loads(board.get("verdicts", run="foreign")[2])["loss"] == {"steps": [1], "values": [0.5]}
    assert board.get("verdicts", run="no such run")[0] == 404
    assert board.get("verdicts")[0] == 400
