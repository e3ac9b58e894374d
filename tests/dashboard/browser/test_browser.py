"""The dashboard in a real browser, on a real TensorBoard: what the page says is what was logged."""

import csv
import io
import struct

import numpy as np
import pytest
from tensorboard.compat.proto import summary_pb2

from looptape.dashboard import metadata
from tests.dashboard import boards
from tests.dashboard.browser import browsing
from tests.dashboard.event_files import RunWriter, state_rows
from tests.dashboard.odd_runs import MARKUP_LAYER, MARKUP_RUN

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browsing.missing() is not None, reason=str(browsing.missing())),
]

ROWS, TIME, SHORT = 30, 20, 14
STEPS = [10 * (row + 1) for row in range(ROWS)]
Y_RANGE = (5, 10 * ROWS + 5)  # half the usual gap on either side
BAD_ROW = 20
GOOD, BAD, PADDED = "good/train", "bad/train", "padded/train"
LAYERS = ("decoder", "encoder/lstm")
AXES = {"time_steps": TIME, "steps": Y_RANGE}


def logged(run, layer):
    """The state gradient [rows, time] of a run as the test wrote it; zero where padded."""
    seed = LAYERS.index(layer)
    if run == GOOD:
        values = state_rows(ROWS, TIME, decay=0.05, seed=seed)
        values[:, 0] = 0 if layer == "decoder" else values[:, 0]
        return values
    if run == BAD:
        values = state_rows(ROWS, TIME, decay=-0.2, drift=-0.1, seed=10 + seed)
        values[BAD_ROW, :5], values[BAD_ROW, 5] = np.nan, np.inf
        return values
    values = np.zeros((ROWS, TIME), dtype=np.float32)
    values[:, :SHORT] = state_rows(ROWS, SHORT, decay=0.1, seed=20 + seed)
    return values


def shares(row):
    mse = np.linspace(0.2, 1.2, TIME) + row / 100
    return {"mse": mse, "penalty": 1 - mse}


def write_runs(logdir):
    for run in (GOOD, BAD, PADDED):
        with RunWriter(logdir / run) as writer:
            for layer in LAYERS:
                states = logged(run, layer)
                # The padded run's sequences are short in both layers: marked as padding in one, shorter in the other.
                length = SHORT if (run, layer) == (PADDED, "encoder/lstm") else TIME
                valid = np.arange(length) < (SHORT if run == PADDED else TIME)
                for row, step in enumerate(STEPS):
                    quantities = {"state": states[row, :length], "gain": np.full(length, 0.5 + 0.01 * row)}
                    extra = shares(row) if run == GOOD and layer == "decoder" else None
                    writer.row(step, layer, quantities, valid=valid, shares=extra)
            credit = np.tril(np.add.outer(10.0 * np.arange(TIME), np.arange(TIME)) + 1)
            writer.write(STEPS[-1], [metadata.credit_summary("decoder", credit)])
            writer.write(1, [summary_pb2.Summary.Value(tag="loss/total", simple_value=0.25)])
    with RunWriter(logdir / MARKUP_RUN) as writer:
        writer.row(1, MARKUP_LAYER, {"state": [1, 2, 3]}, shares={"<b>mse</b>": [1, 1, 1]})
    with RunWriter(logdir / "nested") as writer:
        for layer in range(12):
            values = {"state": np.arange(1, 7) + 10 * layer}
            writer.row(1, f"layer{layer}", values, time_shape=(2, 3), direction="backward")


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """One TensorBoard and one browser for all tests of this file."""
    scratch = tmp_path_factory.mktemp("browser")
    logdir = tmp_path_factory.mktemp("runs")
    write_runs(logdir)
    with boards.tensorboard(logdir, scratch) as board, browsing.chromium(scratch) as (browser, downloads):
        board.wait(lambda: len(board.tags()["runs"]) == 5, "all runs")
        yield browsing.Page(browser, board.url, downloads), logdir, scratch


@pytest.fixture
def page(site):
    found = site[0]
    found.browser.set_window_size(1300, 950)
    yield found
    assert found.problems() == []


def test_every_layer_of_every_run_has_a_heat_map_whose_values_are_those_logged(page):
    page.open(tiles=6, mode="absolute", runs=[GOOD, BAD, PADDED])
    for run, layer, row, column in [
        (GOOD, "decoder", 5, 7),
        (GOOD, "encoder/lstm", 29, 19),
        (BAD, "decoder", 0, 0),
        (BAD, "encoder/lstm", 29, 1),
        (PADDED, "decoder", 22, 13),
    ]:
        page.point(run, layer, column, STEPS[row], **AXES)
        value, place, name = page.tooltip()
        assert place == f"t = {column}, step {STEPS[row]}"
        assert name == run
        assert float(value) == pytest.approx(logged(run, layer)[row, column], rel=1e-3)


def test_what_is_no_number_is_named_and_has_a_colour_of_its_own(page):
    page.open(tiles=6, mode="absolute", runs=[GOOD, BAD, PADDED])
    seen = {}
    for run, column, text in [
        (BAD, 2, "NaN"),
        (BAD, 5, "Inf"),
        (GOOD, 0, "exactly 0"),
        (PADDED, 17, "padding: no valid example here"),
    ]:
        plot = page.point(run, "decoder", column, STEPS[BAD_ROW], **AXES)
        assert page.tooltip()[0] == text
        canvas = plot.find_element("css selector", "canvas")
        size = canvas.size
        x = browsing.LEFT + (size["width"] - 16) * (column + 0.5) / TIME
        y = browsing.TOP + (size["height"] - 23) * (1 - (STEPS[BAD_ROW] - Y_RANGE[0]) / (Y_RANGE[1] - Y_RANGE[0]))
        seen[text] = page.pixel(canvas, round(x), round(y))
        if text == "NaN":
            strip = page.pixel(canvas, size["width"] - 6, round(y))
            assert strip == page.pixel(canvas, round(x), round(y))
    assert (seen["NaN"], seen["Inf"], seen["exactly 0"]) == ("#e5007d", "#ff3b1f", "#b9bec6")


def test_rows_with_nan_are_counted_and_one_click_away(page):
    page.open(tiles=6, mode="absolute", runs=[GOOD, BAD, PADDED])
    alarm = page.tile(BAD, "encoder/lstm").find_element("css selector", ".alarm")
    assert alarm.text == "1 NaN/Inf"
    assert not page.tile(GOOD, "decoder").find_element("css selector", ".alarm").is_displayed()
    alarm.click()
    page.until(lambda: f"{BAD}, step {STEPS[BAD_ROW]}" in page.texts(".chart-key span"), "the bad row")
    assert page.one(".dock-head select").get_attribute("value") == "encoder/lstm"


def test_the_honesty_line_counts_what_was_logged(page):
    page.open(tiles=2, mode="absolute", runs=[GOOD])
    assert page.texts(".note") == ["30 of 30 logged steps kept, merged by max"] * 2


def profile_values(page, column, time=None):
    """Points at a column of the profile; returns {run and step: value} as the page writes it."""
    area = page.one(".dock .chart-area")
    left, right = 62, 14
    page.move(area, left + (area.size["width"] - left - right) * (column + 0.5) / TIME, 40)
    page.until(lambda: page.tooltip()[0] == (time or f"t = {column}"), "the profile's tooltip")
    lines = page.tooltip()
    return {line.split(None, 1)[1]: line.split(None, 1)[0] for line in lines[1:]}


def test_a_click_chooses_the_step_and_the_profile_is_exact(page):
    page.open(tiles=4, mode="absolute", runs=[GOOD, BAD])
    page.point(GOOD, "encoder/lstm", 3, STEPS[12], **AXES)
    page.chain().click().perform()
    page.until(lambda: f"{GOOD}, step {STEPS[12]}" in page.texts(".chart-key span"), "the chosen step")
    for column in (0, 11, 19):
        values = profile_values(page, column)
        for run in (GOOD, BAD):
            exact = logged(run, "encoder/lstm")[12, column]
            assert float(values[f"{run}, step {STEPS[12]}"]) == pytest.approx(exact, rel=6e-4)
    marks = [mark for mark in page.all(".mark-chosen") if mark.is_displayed()]
    assert len(marks) == 4


def test_a_pinned_step_is_compared_and_exported(page):
    page.open(tiles=2, mode="absolute", runs=[GOOD], layer="decoder", step=STEPS[25])
    from selenium.webdriver import Keys

    page.point(GOOD, "decoder", 3, STEPS[10], **AXES)
    page.chain().key_down(Keys.SHIFT).click().key_up(Keys.SHIFT).perform()
    keys = [f"{GOOD}, step {STEPS[25]}", f"{GOOD}, step {STEPS[10]}"]
    page.until(lambda: page.texts(".chart-key span") == keys, "both curves")
    assert page.texts(".pinned") == [f"compared with step {STEPS[10]} ×"]
    page.button("CSV", ".dock").click()
    table = list(csv.reader(io.StringIO(page.downloaded(f"profile-decoder-state-{STEPS[25]}.csv").decode())))
    assert table[0] == ["t", f"{GOOD} @ {STEPS[25]}", f"{GOOD} @ {STEPS[10]}"]
    values = np.float32([[float(cell) for cell in line[1:]] for line in table[1:]])
    np.testing.assert_array_equal(values, logged(GOOD, "decoder")[[25, 10]].T)
    page.one(".pinned").click()
    page.until(lambda: page.texts(".chart-key span") == keys[:1], "one curve")
    page.one("input[aria-label='Training step']").send_keys(Keys.ARROW_DOWN)
    page.until(lambda: page.texts(".chart-key span") == [f"{GOOD}, step {STEPS[24]}"], "the kept step before")


def test_another_quantity(page):
    page.open(tiles=2, mode="absolute", runs=[GOOD])
    select = page.one(".toolbar select")
    labels = [option.text for option in select.find_elements("css selector", "option")]
    assert labels == [
        "State gradient",
        "Backward gain",
        "Share of <b>mse</b>",
        "Share of mse",
        "Share of penalty",
    ]
    next(option for option in select.find_elements("css selector", "option") if option.text == "Backward gain").click()
    page.until(lambda: page.texts(".legend-title") == ["Backward gain (neutral colour: 1)"], "the gain")
    page.until_drawn(2)
    page.point(GOOD, "decoder", 3, STEPS[20], **AXES)
    page.until(lambda: page.tooltip()[0].startswith("0.7"), "the gain's value")
    assert float(page.tooltip()[0]) == pytest.approx(0.7, rel=1e-3)


def test_a_quantity_that_one_run_lacks(page):
    page.open(mode="absolute", runs=[GOOD, BAD], quantity="loss_share/mse")
    page.until_drawn(1)
    assert page.texts(".missing") == [f"Not logged in {BAD}."]
    page.point(GOOD, "decoder", 3, STEPS[12], **AXES)
    assert float(page.tooltip()[0]) == pytest.approx(shares(12)["mse"][3], rel=1e-3)
    for quantity, tiles in (("state", 4), ("loss_share/mse", 1), ("state", 4)):
        page.one(f".toolbar option[value='{quantity}']").click()
        page.until_drawn(tiles)
    page.point(BAD, "decoder", 3, STEPS[12], **AXES)
    assert float(page.tooltip()[0]) == pytest.approx(logged(BAD, "decoder")[12, 3], rel=1e-3)


def test_counting_from_the_end_aligns_rows_at_their_own_last_step(page):
    page.open(tiles=4, mode="absolute", runs=[GOOD, PADDED], align="end", step=STEPS[22])
    for layer in LAYERS:
        for back, text in [(0, "last time step"), (3, "3 back from the end")]:
            page.point(PADDED, layer, TIME - 1 - back, STEPS[22], **AXES)
            page.until(lambda text=text: page.tooltip()[1] == f"{text}, step {STEPS[22]}", text)
            value = float(page.tooltip()[0])
            assert value == pytest.approx(logged(PADDED, layer)[22, SHORT - 1 - back], rel=1e-3)
    values = profile_values(page, TIME - 1, "last time step")
    assert float(values[f"{PADDED}, step {STEPS[22]}"]) == pytest.approx(
        logged(PADDED, "decoder")[22, SHORT - 1], rel=6e-4
    )


def test_the_profile_leaves_padding_out(page):
    page.open(tiles=4, mode="absolute", runs=[GOOD, PADDED], layer="decoder", step=STEPS[22])
    page.until(lambda: len(page.texts(".chart-key span")) == 2, "both curves")
    assert profile_values(page, SHORT)[f"{PADDED}, step {STEPS[22]}"] == "–"
    assert float(profile_values(page, SHORT - 1)[f"{PADDED}, step {STEPS[22]}"]) > 0


def test_normalised_and_difference(page):
    page.open(tiles=4, mode="absolute", runs=[GOOD, BAD])
    page.button("Normalised", ".toolbar").click()
    page.until(lambda: "divided by its last time step" in page.texts(".legend-title")[0], "normalised")
    page.until_drawn(4)
    page.point(BAD, "decoder", 4, STEPS[3], **AXES)
    row = logged(BAD, "decoder")[3]
    page.until(lambda: float(page.tooltip()[0]) == pytest.approx(row[4] / row[-1], rel=1e-3), "the ratio")
    page.button("Difference", ".toolbar").click()
    page.until(lambda: len(page.all(".tile")) == 2, "one column less")
    select = page.one("select[aria-label='Baseline run']")
    next(option for option in select.find_elements("css selector", "option") if option.text == GOOD).click()
    page.until(lambda: [t.get_attribute("data-run") for t in page.all(".tile")] == [BAD, BAD], "the other run")
    page.until_drawn(2)
    page.point(BAD, "encoder/lstm", 4, STEPS[3], **AXES)
    expected = np.log10(logged(BAD, "encoder/lstm")[3, 4] / logged(GOOD, "encoder/lstm")[3, 4])
    text = page.tooltip()[0]
    assert float(text.split(" ")[0].replace("−", "-")) == pytest.approx(expected, abs=0.006)
    assert float(text.split("a factor of ")[1]) == pytest.approx(10**expected, rel=1e-2)


def test_loss_shares_stack_up_to_one(page):
    page.open(tiles=2, mode="absolute", runs=[GOOD], layer="decoder", panel="shares", step=STEPS[12])
    canvas = page.one(".chart canvas")
    page.move(canvas, 38 + (canvas.size["width"] - 48) * 17.5 / TIME, 30)
    lines = page.tooltip()
    assert lines[0] == "t = 17"
    values = {line.split()[1]: float(line.split()[0].replace("−", "-")) for line in lines[1:]}
    expected = shares(12)
    assert values == {name: pytest.approx(row[17], abs=1e-3) for name, row in expected.items()}
    assert sum(values.values()) == pytest.approx(1, abs=1e-3)


def test_a_link_to_an_unknown_panel_opens_the_first(page):
    page.open(tiles=2, mode="absolute", runs=[GOOD], layer="decoder", panel="gone")
    assert page.one(".dock-head [aria-pressed=true]").text == "Profile"


def test_the_credit_matrix_of_the_nearest_step(page):
    page.open(tiles=2, mode="absolute", runs=[GOOD], layer="decoder", panel="credit")
    canvas = page.one(".chart canvas")
    side = canvas.size["width"] - 62
    page.move(canvas, 54 + side * 3.5 / TIME, 3 + side * 11.5 / TIME)
    assert page.tooltip()[1] == "loss at s = 11, state at t = 3"
    assert float(page.tooltip()[0]) == pytest.approx(114, rel=1e-3)
    page.move(canvas, 54 + side * 15.5 / TIME, 3 + side * 11.5 / TIME)
    page.until(lambda: page.tooltip()[0] == "no influence: the state is later than the loss", "the upper half")


def test_run_picker_and_filter(page):
    page.open(tiles=4, mode="absolute", runs=[GOOD, BAD])
    box = page.one("input[type=search]")
    box.send_keys("^(good|padded)")
    names = lambda: page.texts(".runs tbody .choice-name")  # noqa: E731
    assert names() == [GOOD, PADDED]
    page.button("none", ".sidebar").click()
    page.until(lambda: {t.get_attribute("data-run") for t in page.all(".tile")} == {BAD}, "only the unfiltered one")
    assert not page.button("Difference", ".toolbar").is_enabled()
    page.button("all", ".sidebar").click()
    page.until_drawn(6)
    box.clear()
    box.send_keys("good(")
    assert names() == [] and "taken literally" in page.one(".problem").text
    box.clear()
    box.send_keys(" ")
    next(item for item in page.all(".choices[aria-label=Layers] li") if item.text == "decoder").find_element(
        "css selector", "input"
    ).click()
    page.until(lambda: {t.get_attribute("data-layer") for t in page.all(".tile")} == {"encoder/lstm"}, "one layer")


def test_markup_in_names_stays_text(page):
    page.open(tiles=1, mode="absolute", runs=[MARKUP_RUN])
    assert page.texts(".tile .run-name") == [MARKUP_RUN]
    assert page.texts(".layer h2 span:first-child") == [MARKUP_LAYER]
    page.point(MARKUP_RUN, MARKUP_LAYER, 1, 1, time_steps=3, steps=(0.5, 1.5))
    assert page.tooltip()[0] == "2" and page.tooltip()[-1] == MARKUP_RUN
    page.button("Loss shares", ".dock").click()
    page.until(lambda: page.texts(".chart-key span") == ["<b>mse</b>"], "the loss's name")
    assert page.run("return [window.hacked, document.images.length, document.scripts.length, parent.hacked]") == [
        None,
        0,
        1,
        None,
    ]


def test_dark_mode_follows_tensorboard(page):
    page.open(tiles=2, mode="absolute", runs=[GOOD])
    canvas = page.tile(GOOD, "decoder").find_element("css selector", "canvas")
    background = lambda: page.run("return getComputedStyle(document.body).backgroundColor")  # noqa: E731
    light = background(), page.pixel(canvas, 8, 40)
    page.browser.switch_to.default_content()
    page.run("document.body.classList.add('dark-mode')")
    page.enter()
    page.until(lambda: page.run("return document.documentElement.dataset.theme") == "dark", "the dark theme")
    page.until(lambda: page.pixel(canvas, 8, 40) != light[1], "a redrawn canvas")
    assert background() != light[0]
    page.browser.switch_to.default_content()
    page.run("document.body.classList.remove('dark-mode')")
    page.enter()
    page.until(lambda: (background(), page.pixel(canvas, 8, 40)) == light, "the light theme again")


def test_png_and_csv_of_what_is_shown(page):
    page.open(tiles=4, mode="absolute", runs=[GOOD, PADDED])
    page.button("PNG", ".toolbar").click()
    png = page.downloaded("gradient_flow-state-absolute.png")
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width > 1200 and height > 1000
    page.tile(PADDED, "decoder").find_element("css selector", "figcaption .quiet").click()
    table = list(csv.reader(io.StringIO(page.downloaded("padded_train-timestep_decoder_state.csv").decode())))
    assert [line[0] for line in table[1:]] == [str(step) for step in STEPS]
    assert {tuple(line[1 + SHORT :]) for line in table[1:]} == {("",) * (TIME - SHORT)}
    values = np.float32([[float(cell) for cell in line[1 : 1 + SHORT]] for line in table[1:]])
    np.testing.assert_array_equal(values, logged(PADDED, "decoder")[:, :SHORT])


def test_a_deep_link_restores_the_view(page):
    view = {
        "runs": [BAD],
        "quantity": "gain",
        "align": "end",
        "layer": "encoder/lstm",
        "step": STEPS[7],
        "pinned": STEPS[3],
    }
    page.open(tiles=2, fresh=True, **view)
    state = lambda: (  # noqa: E731
        page.texts(".tile .run-name"),
        page.one(".toolbar select").get_attribute("value"),
        [b.text for b in page.all(".toolbar [aria-pressed=true]") if b.text not in ("☰", "Live")],
        page.one(".dock-head select").get_attribute("value"),
        page.texts(".chart-key span"),
    )
    curves = [f"{BAD}, step {STEPS[7]}", f"{BAD}, step {STEPS[3]}"]
    page.until(lambda: page.texts(".chart-key span") == curves, "the curves")
    expected = ([BAD, BAD], "gain", ["Time steps", "Absolute", "from end"], "encoder/lstm", curves)
    assert state() == expected
    # A change goes into the address bar; reloading brings it back.
    page.button("t", ".toolbar").click()
    page.until(lambda: "align" not in page.run("return decodeURIComponent(parent.location.hash)"), "the new address")
    page.browser.switch_to.default_content()
    page.browser.refresh()
    page.enter(tiles=2)
    page.until(lambda: page.texts(".chart-key span") == curves, "the curves")
    assert state() == (*expected[:2], ["Time steps", "Absolute", "t"], *expected[3:])


def test_a_broken_link_opens_the_default_view(page):
    page.browser.switch_to.default_content()
    page.browser.get("about:blank")
    page.browser.get(f"{page.url}#gradient_flow&p.gradient_flow.view=%7Bnonsense")
    page.enter()
    page.until(lambda: page.all(".tile"), "heat maps")
    page.open(runs=["no such run"], step="x", range=[3, 1], mode="?")
    page.until(lambda: page.all(".tile"), "heat maps")
    page.open(runs=[])
    page.until(lambda: page.texts(".nothing") == ["Choose at least one run."], "what to do")


def test_everything_a_pointer_reads_the_keyboard_reads_too(page):
    from selenium.webdriver import Keys

    page.open(tiles=2, mode="absolute", runs=[GOOD])
    plot = page.tile(GOOD, "encoder/lstm").find_element("css selector", ".plot")
    page.run("arguments[0].focus()", plot)
    plot.send_keys(Keys.HOME)
    plot.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    spoken = lambda: page.run("return document.querySelector('[aria-live=polite]').textContent")  # noqa: E731
    row, column = ROWS - 2, 2
    page.until(lambda: f"t = {column}, step {STEPS[row]}" in spoken(), "the spoken place")
    assert float(spoken().split(". ")[0]) == pytest.approx(logged(GOOD, "encoder/lstm")[row, column], rel=1e-3)
    plot.send_keys(Keys.ENTER)
    page.until(lambda: page.texts(".chart-key span") == [f"{GOOD}, step {STEPS[row]}"], "the chosen step")
    plot.send_keys(Keys.PAGE_DOWN, "p")
    page.until(lambda: len(page.texts(".chart-key span")) == 2, "the pinned step")
    plot.send_keys(Keys.ESCAPE)
    page.until(lambda: len(page.texts(".chart-key span")) == 1, "no pinned step")


def test_the_colours_range_can_be_set_and_is_shared(page):
    page.open(tiles=4, mode="absolute", runs=[GOOD, BAD])
    low, high = page.all(".range input")
    automatic = low.get_attribute("value"), high.get_attribute("value")
    everything = np.concatenate([logged(r, la).ravel() for r in (GOOD, BAD) for la in LAYERS])
    numbers = np.log10(everything[np.isfinite(everything) & (everything > 0)])
    expected = np.percentile(numbers, [1, 99])
    np.testing.assert_allclose(np.log10([float(v) for v in automatic]), expected, atol=0.05)

    def fixed():
        # A live refresh between the two may put the automatic value back, as it may for a person who types slowly.
        low.clear()
        low.send_keys("0.01\n")
        return page.button("auto", ".range").get_attribute("aria-pressed") == "false"

    page.until(fixed, "a fixed range")
    low.clear()
    low.send_keys("nonsense\t")
    page.until(lambda: low.get_attribute("value") == "0.0100", "the last good value")
    page.button("auto", ".range").click()
    page.until(lambda: low.get_attribute("value") == automatic[0], "the automatic range")


@pytest.mark.parametrize("size", [(1000, 700), (1920, 1080)])
def test_usable_on_small_and_large_screens(page, size):
    # The size of the page, not of the window with its frame.
    page.browser.set_window_size(*size)
    height = page.run("return window.top.innerHeight")
    page.browser.set_window_size(size[0], size[1] + size[1] - height)
    page.open(tiles=6, mode="absolute", runs=[GOOD, BAD, PADDED])
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    for selector in (".toolbar", ".legend", ".dock .chart-area"):
        box = page.one(selector).rect
        assert box["x"] >= 0 and box["x"] + box["width"] <= size[0] and box["height"] > 20, (selector, box)
    plot = page.all(".plot")[0].rect
    scroller = page.one(".scroller").rect
    assert plot["width"] > 150 and plot["height"] >= 130
    assert plot["y"] + plot["height"] <= scroller["y"] + scroller["height"], "the first heat maps are whole"
    assert page.all(".dock .chart-area")[0].rect["height"] >= 90
    # The pictures follow the window.
    page.browser.set_window_size(1300, 950)
    plot = page.all(".plot")[0]
    width = plot.size["width"]
    canvas = plot.find_element("css selector", "canvas")
    page.until(lambda: abs(canvas.size["width"] - plot.size["width"]) <= 1 and plot.size["width"] == width, "a redraw")


def test_many_layers_are_drawn_when_scrolled_to_and_nested_loops_name_both_indices(page):
    page.open(tiles=12, mode="absolute", runs=["nested"])
    page.point("nested", "layer11", 4, 1, time_steps=6, steps=(0.5, 1.5))
    assert page.tooltip()[:2] == ["115", "t = 4 = (1, 1), step 1"]
    assert page.texts(".layer[data-layer=layer11] .subtitle") == ["State gradient · backward"]


def test_leaving_the_tab_and_coming_back(page):
    page.open(tiles=2, mode="absolute", runs=[GOOD])
    canvas = page.tile(GOOD, "decoder").find_element("css selector", "canvas")
    before = page.pixel(canvas, 60, 60)
    page.browser.switch_to.default_content()
    tabs = {tab.text.upper(): tab for tab in page.all("[role=tab]")}
    tabs["SCALARS"].click()
    page.until(lambda: page.run("return document.querySelector('iframe').offsetHeight") == 0, "the hidden tab")
    page.until(lambda: page.all("tf-scalar-dashboard"), "the native tab")
    tabs["GRADIENT FLOW"].click()
    page.enter(tiles=2)
    page.until(lambda: canvas.size["width"] > 200 and page.pixel(canvas, 60, 60) == before, "the same picture")


def test_a_server_that_fails_is_reported_and_recovered_from(page):
    page.open(tiles=2, mode="absolute", runs=[GOOD])
    page.button("Live", ".toolbar").click()
    page.run("window.realFetch = fetch; window.fetch = () => Promise.reject(new Error('gone away'))")
    reload_by_tensorboard(page)
    page.until(lambda: page.texts(".banner") == ["The data could not be read: gone away"], "the banner")
    page.run("window.fetch = window.realFetch")
    reload_by_tensorboard(page)
    page.until(lambda: not page.texts(".banner"), "no banner")
    page.button("Live", ".toolbar").click()


def reload_by_tensorboard(page):
    """Presses TensorBoard's own button, which tells the dashboard over the message channel."""
    page.browser.switch_to.default_content()
    page.one("app-header-reload button").click()
    page.enter()


def test_new_rows_appear_while_training_goes_on(site, page):
    _, logdir, _ = site
    with RunWriter(logdir / "live") as writer:
        writer.row(10, "lstm", {"state": [1, 2, 3]})
        writer.flush()
        page.open(fresh=True, mode="absolute", runs=["live"])
        page.until(
            lambda: page.texts(".note") == ["1 of 1 logged steps kept, merged by max"],
            "the first row",
            secs=20,
        )
        writer.row(20, "lstm", {"state": [4, 5, 6]})
        writer.flush()
        page.until(
            lambda: page.texts(".note") == ["2 of 2 logged steps kept, merged by max"],
            "the second row",
            secs=20,
        )
    page.until(lambda: page.texts(".chart-key span") == ["live, step 20"], "the latest step")
    page.point("live", "lstm", 1, 20, time_steps=3, steps=(5, 25))
    assert page.tooltip()[0] == "5"


def test_without_data_the_page_says_how_to_log_some(site, page, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with boards.tensorboard(empty, tmp_path) as board:
        other = browsing.Page(page.browser, board.url, page.downloads).open()
        assert other.one(".empty h1").text == "No training runs yet"
        assert "probe_every=10" in other.one(".empty pre").text
        assert not other.one(".app").is_displayed()
