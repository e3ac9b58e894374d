"""Positions, dead units, steering and findings about variables, in a real browser; the report as a page of its own."""

import json

import numpy as np
import pytest
from tensorboard.compat.proto import summary_pb2

from looptape.dashboard import events, health_rows, metadata, report
from looptape.dashboard.rules import logged_run
from tests.dashboard import boards
from tests.dashboard.browser import browsing
from tests.dashboard.event_files import RunWriter

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browsing.missing() is not None, reason=str(browsing.missing())),
]

DEEP, STEERED, RIVALS = "deep/train", "steered/train", "rivals/train"
STEPS, PLACES = list(range(20, 201, 20)), 12
LAYERS = ["tokens", "attention", "answer"]  # in the order of calls, which is not that of the alphabet
VARIABLES = [f"model/{layer}/kernel" for layer in LAYERS]


GRADIENTS = np.array([1.0, 1e-3, 1e-9])


def scalar(tag, value):
    return summary_pb2.Summary.Value(tag=tag, simple_value=value)


def position_row(depth, step):
    """Level in the last layer; each layer below has a thousandth of the one above at its first position."""
    return np.linspace(10.0 ** (-3 * (len(LAYERS) - 1 - depth)), 1.0, PLACES) * step


def write_runs(logdir):
    with RunWriter(logdir / DEEP) as writer:
        for count, step in enumerate(STEPS):
            table = {"gradient": GRADIENTS, "weight": np.full(3, 2.0), "ratio": np.array([1e-3, 1e-7, 1e-3])}
            table["zeros"] = np.array([0.75, 0.0, 0.0])
            values = [health_rows.summary(name, row, VARIABLES) for name, row in table.items()]
            values.append(health_rows.summary("dead", np.array([0.0, step / 200]), ["attention", "answer"]))
            for depth, layer in enumerate(LAYERS):
                row = position_row(depth, step)
                values += metadata.position_summaries(layer, row, np.ones(PLACES, bool), depth, count + 1)
            values += [scalar("loss/error", 1 / step), scalar("throughput/examples_per_second", 10.0)]
            values += [scalar("optimizer/gradient_cosine/a-b", -0.5), scalar(logged_run.NOISE + "total", 1000.0)]
            values.append(scalar(logged_run.NOISE + logged_run.EXAMPLES, 16.0))
            if step == 100:
                values.append(scalar(logged_run.SPIKE, 99))
            writer.write(step, values)
    with RunWriter(logdir / STEERED) as writer:
        for step in STEPS:
            before = 1.5 ** np.arange(PLACES)[::-1]
            writer.row(step, "lstm", {"state": before, "steered": np.minimum(before, 2.0)}, cell="LSTMCell")
            values = [scalar("loss/error", 0.5), scalar("timestep/lstm/acted", 0.25 + 0.5 * (step == 200))]
            writer.write(step, [*values, scalar("throughput/examples_per_second", 10.0)])

    with RunWriter(logdir / RIVALS) as writer:  # a GAN without health rows
        for step in STEPS:
            values = [scalar("loss/d/total", 2.0), scalar("loss/d/fake", 1.5), scalar("loss/d/real", 0.5)]
            values += [scalar("loss/g/fooling", 0.25 if step < 100 else np.nan)]
            values += [scalar("loss_share/d/fake", 0.75), scalar("loss_share/d/real", 0.25)]
            values += [scalar(f"optimizer/gradient_norm/{name}/global", 1.0) for name in "dg"]
            values += [scalar("optimizer/clipped/g", float(step == 60))]
            writer.write(step, [*values, scalar("throughput/examples_per_second", 10.0)])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    scratch, logdir = tmp_path_factory.mktemp("layers"), tmp_path_factory.mktemp("runs")
    write_runs(logdir)
    with boards.tensorboard(logdir, scratch) as board, browsing.chromium(scratch) as (browser, downloads):
        board.wait_for_tag(DEEP, "position/answer/output", 200)
        board.wait_for_tag(STEERED, "timestep/lstm/steered", 200)
        board.wait(lambda: RIVALS in board.tags()["trained"], "the run with two minimizers")
        page = browsing.Page(browser, board.url, downloads)
        page.board, page.logdir = board, logdir
        yield page


@pytest.fixture
def page(site):
    site.browser.set_window_size(1300, 950)
    yield site
    assert site.problems() == []


def test_the_tab_and_the_report_say_the_same_about_everything_that_is_judged(page):
    run = events.read_run(page.logdir / DEEP)
    expected = logged_run.findings(run.layers, run.scalars, run.health, run.cells)
    answer = json.loads(page.board.get("verdicts", run=DEEP)[2])
    assert [one["text"] for one in answer["findings"]] == [one.text for one in expected]
    assert [one.word for one in expected] == ["not learning", "dead units", "conflict", "spikes", "noisy"]
    assert expected[3].text == "1 spike at step 99."
    html = report.render([page.logdir / "deep"])
    assert all(one.word in html for one in expected) and "hardly learns" in html
    page.open(page="health", runs=[DEEP], fresh=True)
    page.until(lambda: any("and 2 more" in text for text in page.texts(".health-card[data-tone=bad]")), "the verdict")
    (card,) = page.texts(".health-card")
    assert expected[0].text in card and "conflict: " + expected[2].text in card.replace("\n", " ")
    assert page.texts(".runs td.verdict")[0] == "not learning"


def test_every_quantity_of_every_variable_is_a_choice_away(page):
    """The gradient of each layer, which everybody looks for first; weights and zeros as well."""
    page.open(page="health", runs=[DEEP])
    select = page.one(".measure select")
    page.run("arguments[0].value = 'gradient'; arguments[0].dispatchEvent(new Event('change'))", select)
    section = page.one(".layer-section.updates")
    page.until(lambda: section.get_attribute("data-shown") == "gradient", "the gradients")
    names = page.until(lambda: page.texts(".update-map .layer-names button"), "the variables")  # the run may come later
    assert names == [f"{layer}/kernel" for layer in LAYERS]
    assert "Gradient of each variable" in page.texts(".layer-section h2")
    canvas = page.one(".update-map .layer-area canvas")
    page.until(lambda: canvas.size["height"] > 72, "the map")
    page.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
    colours = [page.pixel(canvas, 100, 24 * row + 10) for row in range(3)]
    assert colours[0] == "#fde725" and colours[2] == "#b9bec6" and len(set(colours)) == 3, "largest, less, vanished"
    page.move(canvas, 100, 24 + 10)
    assert page.tooltip()[0] in ("0.001", "1.000e-3", "0.001003", "9.995e-4"), "bfloat16 keeps three digits"
    assert '"measure":"gradient"' in page.run("return decodeURIComponent(parent.location.hash)")
    page.open(page="health", runs=[DEEP], measure="zeros")
    page.until(lambda: page.one(".layer-section.updates").get_attribute("data-shown") == "zeros", "the zeros")
    canvas = page.one(".update-map .layer-area canvas")
    page.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
    page.move(canvas, 100, 10)
    assert page.tooltip()[0] == "74.8 % of the gradient is exactly 0", "190 of 254 parts"
    assert page.board.get("variables", run=RIVALS, quantity="gradient")[0] == 404
    assert page.board.get("variables", run=DEEP, quantity="speed")[0] == 400


def test_a_run_with_several_minimizers_shows_each_loss(page):
    page.open(page=None, fresh=True)
    page.until(lambda: page.one(".health").get_attribute("data-known") == "3", "all runs, also that without series")
    page.until(lambda: page.texts(f".health-card[data-run='{RIVALS}'] .finding"), "its verdict")
    (card,) = page.texts(f".health-card[data-run='{RIVALS}']")
    text = card.replace("\n", " ")
    assert "NaN/Inf" in text and "The loss of `g` is NaN or Inf in 6 of 10 rows, first at step 100." in text
    assert "loss/d/total 2" in text and "loss/g/fooling 0.25" in text and "NaN losses 6" in text
    assert len(page.all(f".health-card[data-run='{RIVALS}'] .sparkline")) == 2
    assert page.texts(f".mix-chart[data-run='{RIVALS}'] .chart-key span") == ["d/fake", "d/real"]
    assert json.loads(page.board.get("overview", run=RIVALS)[2])["clipped_at"] == [60]


def test_layers_by_position_over_training(page):
    page.open(page="health", runs=[DEEP])
    page.until(lambda: page.one(".positions").get_attribute("data-step") == "200", "the positions")
    assert page.texts(".position-map .layer-names button") == LAYERS, "in the order of calls"
    answer = json.loads(page.board.get("positions", run=DEEP, step=45)[2])
    assert (answer["step"], answer["layers"], answer["column_width"]) == (40, LAYERS, 1)
    np.testing.assert_allclose(answer["values"][0], position_row(0, 40), rtol=1e-3)
    canvas = page.one(".position-map canvas")
    page.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
    width = canvas.size["width"] - 10
    place = ".position-map canvas", width / PLACES * 0.5, 12
    assert page.tooltip_at(*place) == ["2.000e-4", "tokens, position 0, step 200"]
    canvas = page.one(".position-map canvas")
    colours = [page.pixel(canvas, 4, 24 * row + 10) for row in range(3)]
    assert len(set(colours)) == 3 and colours[2] == page.pixel(canvas, -14, 58), "the last layer is level"
    slider = page.one(".position-step input")
    page.run("arguments[0].value = 1; arguments[0].dispatchEvent(new Event('input'))", slider)
    page.until(lambda: page.one(".positions").get_attribute("data-step") == "40", "another step")
    assert page.tooltip_at(*place) == ["4.000e-5", "tokens, position 0, step 40"]
    page.all(".position-map .layer-names button")[1].click()
    page.until_drawn(3)
    assert page.one(".dock-head select").get_attribute("value") == "attention"
    assert page.one("section.layer").get_attribute("data-time-title") == "position"
    assert page.texts(".layer h2 span:first-child") == LAYERS
    assert page.texts(".tile .note")[0].startswith("10 of 10 logged steps kept")


def test_dead_units_are_drawn(page):
    page.open(page="health", runs=[DEEP])
    canvas = page.one(".dead-map canvas")
    page.until(lambda: canvas.size["height"] > 60, "the map")
    page.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
    assert page.pixel(canvas, 20, 10) == "#f5f5f5", "none is neutral"
    assert page.pixel(canvas, 20, 34) != page.pixel(canvas, -20, 34)
    page.move(canvas, canvas.size["width"] - 20, 34)
    assert page.tooltip() == ["100 % of the units are dead", "answer, step 200"]


def test_steering_is_drawn_before_and_after(page):
    page.open(tiles=1, runs=[STEERED], quantity="steered", mode="absolute")
    page.until(lambda: len(page.texts(".chart-key span")) == 2, "both curves")
    assert page.texts(".chart-key span") == ["steered, step 200", "steered, step 200, before steering"]
    assert "State gradient after steering" in page.texts(".layer .subtitle")[0]
    text = "steered: 75 % in the last probed update, 30 % on average."
    page.until(lambda: any(text in line for line in page.texts(".acted")), "how often it acted")
    label = page.one(".dock canvas").get_attribute("aria-label")
    assert label == "steered/train at step 200: from 1 to 2; steered/train before steering at step 200: from 1 to 86.5"
    page.open(tiles=1, runs=[STEERED])
    page.until(lambda: "steered, step 200, after steering" in page.texts(".chart-key span"), "beside the state, too")


LONG_SCREENS = [(1440, "light"), (1440, "dark"), (1024, "dark"), (390, "light")]


@pytest.mark.parametrize(
    ("width", "theme"),
    [(1024, "light"), (390, "dark")]
    + [
        pytest.param(*each, marks=pytest.mark.long)
        for each in ((1440, "light"), (1440, "dark"), (1024, "dark"), (390, "light"))
    ],
)
def test_axe_finds_nothing(page, width, theme):
    with page.screen(width, theme):
        for view in ({"page": "health"}, {"runs": [DEEP], "quantity": "output"}, {"runs": [STEERED]}):
            page.open(fresh="page" in view, **view)
            page.until(lambda: page.run("return document.documentElement.dataset.theme") == theme, theme)
            if view.get("page") == "health":
                page.until(lambda: page.one(".positions").get_attribute("data-step") == "200", "the positions")
            assert page.violations() == [], (view, width, theme)


def test_the_report_is_a_page_that_needs_nothing_else(page, tmp_path):
    path = report.report([page.logdir / "deep", page.logdir / "steered"], tmp_path / "report.html")
    page.browser.get(path.as_uri())
    assert (
        page.run("return performance.getEntriesByType('resource').filter((r) => !r.name.startsWith('data:')).length")
        == 0
    )
    assert page.run("return [...document.images].every((image) => image.naturalWidth > 0)")
    assert "lstm" in page.texts("body")[0] and "not learning" in page.texts("table")[0]
    assert page.violations() == []
