"""Run health, the loss beside the maps, the scrubber and the zoom, in a real browser; axe-core in every view."""

import json

import numpy as np
import pytest
from tensorboard.compat.proto import summary_pb2

from looptape.dashboard import health_rows, report
from tests.dashboard import boards
from tests.dashboard.browser import browsing
from tests.dashboard.event_files import RunWriter

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browsing.missing() is not None, reason=str(browsing.missing())),
]

TIME, STEPS = 20, list(range(20, 401, 20))
AXES = {"time_steps": TIME, "steps": (10, 410)}
CALM, STUCK, PLAIN, OLD = "calm/train", "stuck/train", "plain/train", "old/train"
VARIABLES = ["model/embedding/kernel", "model/lstm/lstm_cell/kernel", "model/lstm/lstm_cell/bias", "model/head/kernel"]


def scalars(**values):
    return [summary_pb2.Summary.Value(tag=tag.replace("__", "/"), simple_value=value) for tag, value in values.items()]


def write_runs(logdir):
    """A healthy run; one with dead units, whose LSTM gets nothing, and that skips; one without probes; one of 0.1."""
    for run in (CALM, STUCK):
        with RunWriter(logdir / run) as writer:
            for step in STEPS:
                ratio = np.array([1e-3, 1e-3 if run == CALM else 1e-6, 1e-3 if run == CALM else 1e-6, 0.2])
                sizes = np.full(4, 2.0)
                values = [health_rows.summary(*row, VARIABLES) for row in (("ratio", ratio), ("weight", sizes))]
                values += scalars(loss__total=1 / step, loss__a=0.5 / step, throughput__examples_per_second=1234.0)
                if run == STUCK:
                    values.append(health_rows.summary("gradient", [0, 0, 0, 1], VARIABLES))
                    values.append(health_rows.summary("dead", [1.0], ["head"]))
                skipped = 0.0 if run == CALM or step < 200 else 3.0
                values += scalars(optimizer__skipped_updates=skipped, optimizer__clipped=float(step <= 60))
                values += scalars(loss_share__a=0.25, loss_share__b=0.75)
                values += scalars(optimizer__gradient_conflict__rate=float(step % 40 == 0))
                writer.write(step, values)
                writer.row(step, "lstm", {"state": 0.8 ** np.arange(TIME)[::-1] * step})
        with RunWriter(logdir / run.replace("train", "eval")) as writer:
            for step in (200, 400):
                writer.write(step, scalars(loss__sum=2 / step, loss__a=1 / step))
    with RunWriter(logdir / PLAIN) as writer:
        for step in STEPS:
            writer.write(step, scalars(loss__error=1 / step, throughput__examples_per_second=50.0))
    with RunWriter(logdir / OLD) as writer:
        for step in STEPS:
            values = scalars(loss__total=1.0, skipped_updates=2.0, throughput__examples_per_second=9.0)
            writer.write(step, values)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    scratch, logdir = tmp_path_factory.mktemp("health"), tmp_path_factory.mktemp("runs")
    write_runs(logdir)
    with boards.tensorboard(logdir, scratch) as board, browsing.chromium(scratch) as (browser, downloads):
        board.wait(lambda: len(board.tags()["trained"]) == 4 and len(board.tags()["order"]) == 6, "all runs")
        page = browsing.Page(browser, board.url, downloads)
        page.board = board
        yield page


@pytest.fixture
def page(site):
    site.browser.set_window_size(1300, 950)
    yield site
    assert site.problems() == []


def cards(page):
    return page.run(  # at once: cards are replaced when an answer arrives
        "return Object.fromEntries([...document.querySelectorAll('.health-card')]"
        ".map((card) => [card.dataset.run, card.innerText.replace(/\\n+/g, '\\n')]))"
    )


def open_health(page):
    page.open(page=None, fresh=True)
    page.until(lambda: page.one(".health").get_attribute("data-known") == "4", "all overviews")
    page.until(lambda: not any("reading" in text for text in cards(page).values()), "all verdicts")


def test_the_overview_is_what_was_written(site):
    answer = json.loads(site.board.get("overview", run=STUCK)[2])
    assert answer["loss"] == {"steps": STEPS, "values": [float(f"{1 / step:.4g}") for step in STEPS]}
    assert answer["evaluations"] == {"steps": [200, 400], "values": [0.01, 0.005]}
    assert (answer["skipped"], answer["skipped_at"], answer["clipped_at"]) == (3, [200], [20, 40, 60])
    assert set(answer["shares"]) == {"a", "b"} and answer["shares"]["b"]["values"] == [0.75] * 20
    assert answer["updates"]["layers"] == ["embedding", "lstm/lstm_cell", "head"]
    ratios = np.array(answer["updates"]["values"])
    np.testing.assert_allclose(ratios, np.tile([[1e-3], [1e-6], [0.2]], 20), rtol=0.005)  # bfloat16
    assert json.loads(site.board.get("overview", run=OLD)[2])["skipped"] == 2, "a tag of version 0.1"


def test_run_health_is_the_landing_view_for_every_run(page):
    open_health(page)
    found = cards(page)
    assert set(found) == {CALM, STUCK, PLAIN, OLD}
    assert "healthy" in found[CALM] and "lstm reaches back 20 of 20 time steps" in found[CALM]
    assert "skipped\n3" in found[STUCK] and "examples/s\n1,234" in found[STUCK] and "evaluation\n0.005" in found[STUCK]
    # One finding of each word, the reason among them, and what to try once for each.
    words = ("No gradient arrives at", "such as units that are all off", "too large:", "dead units:", "and 2 more")
    assert [found[STUCK].count(text) for text in words] == [1] * 5
    assert "no time steps" in found[PLAIN] and "loss/error\n0.0025" in found[PLAIN]
    assert len(page.all(".health-card .sparkline")) == 4
    assert page.texts(".health-note") == [], "some runs have health rows, some have time steps: no advice is due"


def test_runs_without_a_loop_are_told_what_could_be_logged_and_nothing_wrong(page):
    page.open(page="health", runs=[PLAIN])
    page.until(lambda: "health_every" in "".join(page.texts(".health-note")), "the advice")
    (advice,) = page.texts(".health-note")
    assert advice.startswith("Trainer(…, health_every=50)") and "need a recurrent layer" in advice


def test_time_steps_of_runs_without_any_say_so_and_lead_on(page):
    page.open(page="flow", runs=[PLAIN])
    page.until(lambda: "no time steps" in "".join(page.texts(".nothing p")), "the reason")
    page.until(lambda: not any("Reading" in text for text in page.texts(".strip")), "a verdict, or none")
    assert not page.one(".dock").is_displayed() and not page.one(".legend").is_displayed()
    health, others = page.all(".nothing button")
    assert (health.text, others.text) == ("Run health", "Runs with time steps")
    others.click()
    page.until_drawn(2)
    assert page.one(".dock").is_displayed() and not page.one(".nothing").is_displayed()
    page.open(page="flow", runs=[PLAIN])
    page.all(".nothing button")[0].click()
    page.until(lambda: page.one(".app").get_attribute("data-page") == "health", "run health")


def test_the_map_of_updates_has_a_neutral_band_and_leads_to_the_time_steps(page):
    open_health(page)
    canvas = page.one(f".update-map[data-run='{STUCK}'] .layer-area canvas")
    page.until(lambda: canvas.size["height"] > 60, "the map")
    colours = [page.pixel(canvas, 100, 24 * row + 10) for row in range(3)]
    assert colours[0] == "#f5f5f5", "neutral"
    blue, orange = ([int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours[1:])
    assert blue[2] > blue[0] + 60 and orange[0] > orange[2] + 60
    page.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
    page.move(canvas, 100, 24 + 10)
    assert page.tooltip()[0].endswith("it hardly learns")
    assert page.texts(f".update-map[data-run='{STUCK}'] .layer-names button") == ["lstm/lstm_cell"]
    page.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
    page.move(canvas, 100, 24 + 10)
    page.chain().click().perform()
    page.until_drawn(2)
    assert page.one(".dock-head select").get_attribute("value") == "lstm"
    assert page.run("return document.querySelector('.app').dataset.page") == "flow"
    assert "step" in page.run("return decodeURIComponent(parent.location.hash)")


def test_shares_of_the_losses_and_their_conflict_rate(page):
    open_health(page)
    assert (
        page.texts(".mix-chart .conflict")
        == ["Gradients conflict in 50 % of the pairs of losses, over 20 probed updates."] * 2
    )
    canvas = page.one(".mix-chart canvas")
    page.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
    page.move(canvas, 200, 60)
    assert page.tooltip()[1:] == ["0.25   a", "0.75   b"]


def test_colours_are_those_of_tensorboard(page):
    """Its palette in the order in which its own list has the runs; evaluations have colours of their own there."""
    open_health(page)
    order = page.board.tags()["order"]
    palette = ["rgb(66, 80, 102)", "rgb(18, 181, 203)", "rgb(229, 37, 146)", "rgb(249, 171, 0)", "rgb(147, 52, 230)"]
    palette.append("rgb(124, 179, 66)")
    shown = page.run(
        "return Object.fromEntries([...document.querySelectorAll('.health-card')]"
        ".map((card) => [card.dataset.run, card.querySelector('.swatch').style.background]))"
    )
    assert shown == {run: palette[order.index(run)] for run in (CALM, STUCK, PLAIN, OLD)}


def test_the_loss_stands_beside_the_map_on_its_axis(page):
    page.open(tiles=1, runs=[STUCK])
    canvas = page.one(".losses canvas")
    page.until(lambda: "3 skipped updates" in (canvas.get_attribute("aria-label") or ""), "the loss")
    text = "stuck: loss 0.05 to 0.0025, 2 evaluations, 3 skipped updates, clipped at 3 logged steps"
    assert canvas.get_attribute("aria-label") == text
    plot = page.one(".plot canvas")
    assert (canvas.rect["y"], canvas.size["height"]) == (plot.rect["y"], plot.size["height"]), "one axis"
    size, (low, high) = canvas.size, AXES["steps"]
    inner = size["height"] - browsing.TOP - browsing.BOTTOM
    row = browsing.TOP + inner * (1 - (200 - low) / (high - low))  # where updates were skipped
    marks = [page.pixel(canvas, round(size["width"] - browsing.RIGHT - 5), round(row + shift)) for shift in (-1, 0, 1)]
    assert any(mark not in ("#000000", "#ffffff") for mark in marks), "a cross in the run's colour"


def test_dragging_zooms_a_double_click_resets_and_the_link_remembers(page):
    page.open(tiles=1, fresh=True, runs=[CALM])
    plot = page.point(CALM, "lstm", 4, 100, **AXES)
    size = plot.size
    width, height = size["width"] - browsing.LEFT - browsing.RIGHT, size["height"] - browsing.TOP - browsing.BOTTOM
    x = [browsing.LEFT + width * share - size["width"] / 2 for share in (0.26, 0.74)]
    y = [browsing.TOP + height * share - size["height"] / 2 for share in (0.25, 0.75)]
    chain = page.chain().move_to_element_with_offset(plot, round(x[0]), round(y[0])).click_and_hold()
    chain.move_to_element_with_offset(plot, round(x[1]), round(y[1])).release().perform()
    page.until(lambda: page.button("Reset zoom", ".toolbar").is_displayed(), "the zoom")
    view = page.run("return decodeURIComponent(parent.location.hash)")
    zoom = json.loads(view.partition("view=")[2])["zoom"]
    assert zoom["time"] == [5, 15] and zoom["steps"] == pytest.approx([110, 310], abs=6)
    assert page.run("return document.querySelector('.dock').dataset.step") == "400", "a drag chooses no step"
    page.point(CALM, "lstm", 2, 200, time_steps=10, steps=zoom["steps"])
    assert page.tooltip()[1].startswith("t = 7, step 200")
    page.browser.switch_to.default_content()
    page.browser.refresh()
    page.enter(tiles=1)
    page.point(CALM, "lstm", 2, 200, time_steps=10, steps=zoom["steps"])
    assert page.tooltip()[1].startswith("t = 7, step 200"), "after a reload"
    page.chain().double_click(page.one(".plot")).perform()
    page.until(lambda: not page.all(".toolbar button[title^='Show all training']")[0].is_displayed(), "everything")
    page.point(CALM, "lstm", 7, 200, **AXES)
    page.until(lambda: page.tooltip()[1].startswith("t = 7, step 200"), "the whole map")


def test_a_keyboard_zooms_too(page):
    page.open(tiles=1, runs=[CALM])
    plot = page.one(".plot")
    plot.send_keys("+")
    page.until(lambda: page.button("Reset zoom", ".toolbar").is_displayed(), "the zoom")
    plot.send_keys("0")
    page.until(lambda: not page.all(".toolbar button[title^='Show all training']")[0].is_displayed(), "everything")


def test_the_scrubber_plays_training_with_a_trail(page):
    page.open(tiles=1, fresh=True, runs=[CALM])
    slider = page.one(".scrubber input")
    page.until(lambda: page.texts(".scrubber output") == ["step 400 of 400"], "the last step")
    page.run("arguments[0].value = 3; arguments[0].dispatchEvent(new Event('input'))", slider)
    page.until(lambda: page.texts(".chart-key span") == ["calm, step 80"], "the fourth step")
    assert slider.get_attribute("aria-valuetext") == "step 80 of 400"
    page.one(".scrubber .play").click()
    page.until(lambda: page.one(".scrubber .play").get_attribute("aria-label") == "Pause", "playing")
    seen = set()

    def at_the_end():
        seen.update(page.texts(".chart-key span"))
        return page.one(".scrubber .play").get_attribute("aria-label") == "Play training"

    page.until(at_the_end, "the end of the training")
    assert page.texts(".chart-key span") == ["calm, step 400"] and len(seen) >= 5
    page.one(".scrubber .play").click()
    page.until(lambda: page.texts(".chart-key span") == ["calm, step 20"], "from the beginning again")
    page.one(".scrubber .play").click()
    page.until(lambda: page.one(".scrubber .play").get_attribute("aria-label") == "Play training", "a pause")


VIEWS = {
    "health": {"page": "health"},
    "flow": {"runs": [CALM, STUCK]},
    "gain": {"runs": [CALM, STUCK], "mode": "difference", "panel": "shares"},
    "credit": {"runs": [CALM], "panel": "credit", "mode": "absolute"},
    "bare": {"runs": [PLAIN]},
}


@pytest.mark.parametrize("width", [1440, 390])
def test_axe_finds_nothing_in_a_report(page, tmp_path, width):
    write_runs(tmp_path / "runs")
    runs = [tmp_path / "runs" / name for name in ("calm", "stuck", "plain")]
    saved = report.Report(runs).save(tmp_path / "report.html")
    with page.screen(width, "light"):
        page.browser.get(saved.as_uri())
        assert page.violations() == []
    page.browser.get("about:blank")


@pytest.mark.parametrize(
    ("width", "theme"),
    [
        pytest.param(width, theme, marks=[] if (width, theme) in {(1440, "dark"), (390, "light")} else pytest.mark.long)
        for width in (1440, 1024, 390)
        for theme in ("light", "dark")
    ],
)
def test_axe_finds_nothing_in_any_view(page, width, theme):
    """No violation of accessibility, and nothing wider than the page."""
    with page.screen(width, theme):
        for name, view in VIEWS.items():
            page.open(fresh=name == "health", **view)
            page.run("localStorage.clear()")
            page.until(lambda: page.run("return document.documentElement.dataset.theme") == theme, theme)
            assert page.violations() == [], (name, width, theme)
