"""What the tab answers, in a real browser: verdicts, the table of runs, layers matched across cells, colours."""

import numpy as np
import pytest
from tensorboard.compat.proto import summary_pb2

from tests.dashboard import boards
from tests.dashboard.browser import browsing
from tests.dashboard.event_files import RunWriter

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browsing.missing() is not None, reason=str(browsing.missing())),
]

ROWS, TIME = 12, 20
STEPS = [50 * (row + 1) for row in range(ROWS)]
AXES = {"time_steps": TIME, "steps": (25, 50 * ROWS + 25)}
GAINS = {"gru": 0.95, "lstm": 0.7, "rnn": 0.02}
HORIZONS = {"gru": 20, "lstm": 13, "rnn": 2}  # powers of the gain that are above 1 %
RUNS = [f"sweep/{cell}" for cell in GAINS]
MANY = [f"sweep/many-{index:02d}" for index in range(27)]


def logged(cell):
    return np.float32(GAINS[cell] ** np.arange(TIME)[::-1])


def write_runs(logdir):
    for cell in GAINS:
        with RunWriter(logdir / "sweep" / cell) as writer:
            for row, step in enumerate(STEPS):
                writer.row(step, cell, {"state": logged(cell) * (row + 1)})
            for step in range(10, 600, 10):
                writer.write(step, [summary_pb2.Summary.Value(tag="loss/total", simple_value=GAINS[cell])])
    for index, run in enumerate(MANY):
        with RunWriter(logdir / run) as writer:
            values = np.full(TIME, np.nan if index == 3 else 1.0)
            writer.row(100, "gru", {"state": values})


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    scratch, logdir = tmp_path_factory.mktemp("answers"), tmp_path_factory.mktemp("runs")
    write_runs(logdir)
    with boards.tensorboard(logdir, scratch) as board, browsing.chromium(scratch) as (browser, downloads):
        board.wait(lambda: len(board.tags()["runs"]) == len(RUNS) + len(MANY), "all runs")
        yield browsing.Page(browser, board.url, downloads)


@pytest.fixture
def page(site):
    site.browser.set_window_size(1300, 950)
    yield site
    assert site.problems() == []


def table(page):
    """{run: [name, verdict, loss, horizon]} of the rows that are shown, in their order."""
    return {
        row[0]: row[1:]
        for row in page.run(
            "return [...document.querySelectorAll('.runs tbody tr')].filter((row) => !row.hidden)"
            ".map((row) => [row.dataset.name, ...[...row.children].map((cell) => cell.innerText.trim())])"
        )
    }


def test_layers_of_different_cells_stand_side_by_side(page):
    page.open(tiles=3, runs=RUNS)
    title = "layer 1: gru / lstm / rnn"
    assert page.texts(".layer h2 span:first-child") == [title]
    assert page.texts(".tile .run-name") == [f"{cell} · {cell}" for cell in GAINS]
    page.until(lambda: len(page.texts(".dock .chart-key span")) == 3, "three curves")
    page.button("Difference", ".toolbar").click()
    page.until(lambda: len(page.all(".tile")) == 2, "two differences")
    page.until_drawn(2)
    page.point("sweep/rnn", title, 4, STEPS[3], **AXES)
    expected = np.log10(logged("rnn")[4] / logged("gru")[4])
    page.until(lambda: page.texts(".tooltip"), "the tooltip")
    assert float(page.tooltip()[0].split(" ")[0].replace("−", "-")) == pytest.approx(expected, abs=0.006)


def cell_pixel(page, run, layer, column, step):
    canvas = page.tile(run, layer).find_element("css selector", "canvas")
    size, (low, high) = canvas.size, AXES["steps"]
    x = browsing.LEFT + (size["width"] - browsing.LEFT - browsing.RIGHT) * column / TIME
    y = browsing.TOP + (size["height"] - browsing.TOP - browsing.BOTTOM) * (1 - (step - low) / (high - low))
    return page.pixel(canvas, round(x), round(y))


def test_colours_are_relative_with_a_line_at_one_per_cent_and_a_colour_for_vanished(page):
    page.open(tiles=3, runs=RUNS)
    title = "layer 1: gru / lstm / rnn"
    assert [box.get_attribute("value") for box in page.all(".range input")] == ["1.0e-6", "1.00"]
    assert cell_pixel(page, "sweep/rnn", title, 3.5, STEPS[5]) == "#b9bec6"
    assert "vanished: below 10⁻⁶, or 0" in page.texts(".special")
    page.point("sweep/lstm", title, 4, STEPS[5], **AXES)
    assert float(page.tooltip()[0]) == pytest.approx(0.7**15, rel=1e-3)
    # White within dark, at the border of the last cell above 1 %.
    border = TIME - HORIZONS["lstm"]
    brightness = [
        sum(int(cell_pixel(page, "sweep/lstm", title, border + shift / 40, STEPS[5])[i : i + 2], 16) for i in (1, 3, 5))
        for shift in range(-8, 9)
    ]
    assert max(brightness) > 600
    # The largest value of a row is 1 whatever its size: the same colour in all rows.
    colours = {cell_pixel(page, run, title, TIME - 0.5, step) for run in RUNS for step in (STEPS[1], STEPS[10])}
    assert colours == {"#fde725"}


def test_absolute_colours_span_at_least_two_decades(page):
    page.open(tiles=1, runs=["sweep/gru"], mode="absolute")
    low, high = (float(box.get_attribute("value")) for box in page.all(".range input"))
    assert high / low == pytest.approx(100, rel=0.05)


def test_the_strip_answers_and_leads_to_the_layer(page):
    page.open(tiles=3, runs=RUNS)
    page.until(lambda: len(page.all(".card")) == 3, "three verdicts")
    cards = {card.get_attribute("data-run"): card.text for card in page.all(".card")}
    assert cards["sweep/rnn"].startswith("vanishing\nrnn\nrnn reaches back 2 of 20 time steps, unchanged since step 50")
    assert "loss flat. At the first ones" in cards["sweep/rnn"] and "Try: use a gated cell" in cards["sweep/rnn"]
    assert cards["sweep/gru"].startswith("healthy") and "Try" not in cards["sweep/gru"]
    assert page.all(".card")[0].get_attribute("data-run") == "sweep/rnn", "worst first"
    assert len(page.all(".card .sparkline path")) == 3
    page.all(".card-head")[0].click()
    page.until(lambda: "layer 1" in page.one(".dock-head select").get_attribute("value"), "the layer")


def test_a_card_links_to_why_and_what_to_do(page):
    page.open()
    link = page.one(".strip .card[data-tone=bad] a.why")
    assert link.get_attribute("href").endswith("/why#why-vanishing") or "#why-" in link.get_attribute("href")
    assert link.get_attribute("aria-label").endswith("why, and what to do")
    before = page.browser.current_window_handle
    page.run("arguments[0].click()", link)
    page.until(lambda: len(page.browser.window_handles) == 2, "the page behind the link")
    page.browser.switch_to.window(page.browser.window_handles[1])
    try:
        word = page.browser.current_url.split("#")[1]
        text = page.until(lambda: page.run(f"return document.getElementById({word!r})?.innerText"), "the section")
        assert "What to try" in text
        assert page.violations() == []
    finally:
        page.browser.close()
        page.browser.switch_to.window(before)
    page.enter()


def test_the_table_of_runs_sorts_and_flags_nan(page):
    page.open(tiles=3, runs=RUNS)
    page.until(lambda: all(row[1] != "…" for row in table(page).values()), "all verdicts")
    rows = table(page)
    assert rows["sweep/lstm"] == ["lstm", "healthy", "0.7", "13"]
    assert rows["sweep/rnn"] == ["rnn", "vanishing", "0.02", "2"]
    assert rows[MANY[3]] == ["many-03", "NaN/Inf", "–", "–"]
    page.button("verdict", ".runs").click()
    page.until(lambda: list(table(page))[:2] == [MANY[3], "sweep/rnn"], "the worst first")
    assert page.one(".runs th:nth-child(2)").get_attribute("aria-sort") == "ascending"
    page.button("horizon", ".runs").click()
    page.until(lambda: list(table(page))[:2] == ["sweep/rnn", "sweep/lstm"], "the shortest first")


def colours(page):
    return page.run(
        "return Object.fromEntries([...document.querySelectorAll('.runs tbody tr')]"
        ".map((row) => [row.dataset.name, row.querySelector('.swatch').style.background]))"
    )


def test_colours_do_not_depend_on_the_selection(page):
    page.open(tiles=3, runs=RUNS)
    before = colours(page)
    assert len(set(before.values())) == len(RUNS) + len(MANY)
    page.open(tiles=1, runs=["sweep/rnn"])
    assert colours(page) == before


def test_thirty_runs_leave_room_for_the_profile(page):
    page.open(tiles=30, runs=RUNS + MANY)
    page.until(lambda: len(page.all(".dock .chart-key span")) == 30, "all curves")
    assert page.one(".dock .chart-area").rect["height"] >= 90


def test_the_profile_reads_the_right_time_step_after_an_export(page):
    page.open(tiles=3, runs=RUNS)
    page.until(lambda: len(page.texts(".dock .chart-key span")) == 3, "three curves")
    page.button("PNG", ".toolbar").click()
    page.downloaded("gradient_flow-state-relative.png")
    area = page.one(".dock .chart-area")
    page.move(area, 62 + (area.size["width"] - 62 - 14) * 15.5 / TIME, 40)
    page.until(lambda: page.tooltip()[0] == "t = 15", "the time step under the pointer")


def test_a_telephone_shows_everything_within_its_width(page):
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.run("localStorage.clear()")
        page.open(tiles=3, fresh=True, runs=RUNS)
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        assert not page.one(".sidebar").is_displayed()
        for selector in (".toolbar", ".legend", ".strip", ".dock .chart-area"):
            box = page.one(selector).rect
            assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["height"] > 20, (selector, box)
        assert page.all(".plot")[0].rect["width"] > 120
        page.one(".menu").click()
        page.until(lambda: page.one(".runs").is_displayed(), "the runs")
        box = page.one(".sidebar").rect
        assert box["x"] >= 0 and 250 < box["width"] <= 390
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.run("localStorage.clear()")
