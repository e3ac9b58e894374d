"""The dashboard and TensorBoard's own tabs on runs that the trainer and the launcher made."""

import json
import urllib.request

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import launch
from looptape.dashboard import metadata
from looptape.experiments import adding_problem
from looptape.trainer import Trainer
from looptape.trainer.summaries import event_writer
from tests.dashboard import boards
from tests.dashboard.browser import browsing

LENGTH, EVERY, STEPS = 12, 4, 20
ROWS = [1, 2, *range(EVERY, STEPS + 1, EVERY)]
AXES = {"time_steps": LENGTH, "steps": (0, STEPS + EVERY / 2)}
LAUNCHED, WRITTEN = "launched/train", "written/train"


def train_two_losses(workdir):
    """A trainer of one's own with two losses on one output."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((LENGTH, 2)), keras.layers.LSTM(4, name="lstm"), keras.layers.Dense(1)])
    losses = {"squared": keras.losses.MeanSquaredError(), "absolute": keras.losses.MeanAbsoluteError()}
    x = np.random.default_rng(0).normal(size=(8, LENGTH, 2)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, 0, :1])).batch(8).repeat()
    trainer = Trainer(model, keras.optimizers.Adam(0.01), losses, probe_every=EVERY)
    trainer.fit(data, steps=STEPS, workdir=workdir, log_every=EVERY, progress=False)
    return trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    logdir = tmp_path_factory.mktemp("runs")
    config = adding_problem.Config(
        workdir=str(logdir / "launched"),
        steps=STEPS,
        length=LENGTH,
        units=4,
        batch_size=8,
        eval_examples=16,
        eval_every=10,
        log_every=EVERY,
        probe_every=EVERY,
        jit_compile=False,
    )
    launch.run(config, adding_problem.build, name="adding_problem", show=False)
    return logdir, train_two_losses(logdir / "written")


@pytest.fixture(scope="module")
def board(runs, tmp_path_factory):
    with boards.tensorboard(runs[0], tmp_path_factory.mktemp("board")) as found:
        for run in (LAUNCHED, WRITTEN):
            found.wait(
                lambda run=run: any(s["version"].startswith(f"{STEPS}/") for s in found.tags()["runs"].get(run, ())),
                f"the last row of {run}",
            )
        yield found


@pytest.fixture(scope="module")
def page(board, tmp_path_factory):
    if browsing.missing() is not None:
        pytest.skip(browsing.missing())
    with browsing.chromium(tmp_path_factory.mktemp("browser")) as (browser, downloads):
        browser.set_window_size(1300, 950)
        yield browsing.Page(browser, board.url, downloads)


def logged(logdir, run, quantity):
    """({layer}, [rows, time]) of a quantity, as the event files have it."""
    layers, rows = set(), []
    for _, value in event_writer.read(str(logdir / run)):
        content = metadata.parse_content(value.metadata.plugin_data.content)
        if content and content["kind"] == metadata.VECTOR and content["quantity"] == quantity:
            layers.add(content["layer"])
            rows.append(tf.make_ndarray(value.tensor))
    return layers, np.array(rows)


@pytest.mark.browser
def test_the_page_shows_what_the_updates_found(runs, page):
    logdir, trainer = runs
    page.open(tiles=2, mode="absolute", runs=[LAUNCHED, WRITTEN])
    together = "layer 1: gru / lstm"  # matched by their place
    for run in (LAUNCHED, WRITTEN):
        (layer,), states = logged(logdir, run, "state")
        assert states.shape == (len(ROWS), LENGTH)
        for row, column in ((0, 0), (2, 5), (4, LENGTH - 1)):
            assert layer in together
            page.point(run, together, column, ROWS[row], **AXES)
            value, place, name = page.tooltip()
            assert (place, name) == (f"t = {column}, step {ROWS[row]}", run)
            assert float(value) == pytest.approx(states[row, column], rel=1e-3)
    np.testing.assert_array_equal(states[-1], trainer._engine.timesteps.latest["lstm"]["state"])
    assert page.texts(".note") == [f"{len(ROWS)} of {len(ROWS)} logged steps kept, merged by max"] * 2
    assert page.problems() == []


@pytest.mark.browser
def test_the_shares_of_two_losses_sum_to_one_on_the_page(page):
    page.open(tiles=1, runs=[WRITTEN], layer="lstm", panel="shares", step=STEPS)
    canvas = page.one(".chart canvas")
    page.move(canvas, 38 + (canvas.size["width"] - 48) * 5.5 / LENGTH, 30)
    lines = page.tooltip()
    assert lines[0] == "t = 5"
    values = {line.split()[1]: float(line.split()[0].replace("−", "-")) for line in lines[1:]}
    assert set(values) == {"squared", "absolute"}
    assert sum(values.values()) == pytest.approx(1, abs=2e-3)


def ask(board, route):
    with urllib.request.urlopen(f"{board.url}data/plugin/{route}", timeout=20) as answer:
        return json.loads(answer.read())


def test_the_tabs_that_tensorboard_has_show_the_run_too(board):
    scalars = ask(board, "scalars/tags")
    assert {"loss/total", "loss/squared", "loss_weight/absolute", "loss_share/squared"} <= set(scalars[WRITTEN])
    assert {"timestep/lstm/horizon", "timestep/lstm/median_gain", "optimizer/gradient_norm/squared"} <= set(
        scalars[WRITTEN]
    )
    assert "loss/error" in scalars["launched/eval"]
    assert any(tag.endswith("/heatmap") for tag in ask(board, "images/tags")[LAUNCHED])
    texts = ask(board, "text/tags")
    assert any(texts[run] for run in texts if run.startswith("launched"))
    points = ask(board, f"scalars/scalars?run={WRITTEN.replace('/', '%2F')}&tag=loss%2Ftotal")
    assert [step for _, step, _ in points] == ROWS[2:]


def test_the_losses_of_a_run_are_on_one_chart(board):
    layout = json.dumps(ask(board, "custom_scalars/layout"))
    assert "loss/" in layout and "loss_weight/" in layout


def test_the_trainer_reports_its_own_run(runs):
    logdir, trainer = runs
    alone, both = trainer.report(), trainer.report(logdir / "written", logdir / "launched")
    assert "<h1>written</h1>" in alone.html and "<h1>written, launched</h1>" in both.html
    assert "lstm: " in alone.html


def test_a_trainer_without_a_workdir_says_where_a_report_comes_from():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    trainer = Trainer(model, "sgd", {"error": keras.losses.MeanSquaredError()})
    with pytest.raises(ValueError, match=r"had a `workdir`; a report is made from its files. Pass `fit\(workdir"):
        trainer.report()
