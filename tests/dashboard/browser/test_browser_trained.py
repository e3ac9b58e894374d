"""Runs that were trained, in a real browser: the first rows, the basis of a horizon, skipped updates, the first tag."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from tests.dashboard import boards
from tests.dashboard.browser import browsing

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browsing.missing() is not None, reason=str(browsing.missing())),
]

TIME, STEPS = 50, 150
FIRST = [1, 2, 5, 10, 20]  # probed whatever `probe_every` is


class Logged(Trainer):
    max_skipped = 100

    def compute_losses(self, batch, training):
        self.log("accuracy", 0.5)
        return super().compute_losses(batch, training)


def train(workdir, steps, scale=1.0):
    """A plain network with a loss at every time step; it forgets: its recurrent matrix is a third of the identity."""
    x = np.random.default_rng(0).normal(size=(8, TIME, 2)).astype("float32") * np.float32(scale)
    matrix = keras.initializers.Identity(1 / 3)
    layer = keras.layers.SimpleRNN(4, None, recurrent_initializer=matrix, return_sequences=True, name="rnn")
    model = keras.Sequential([keras.Input((TIME, 2)), layer, keras.layers.Dense(1)])
    trainer = Logged(model, keras.optimizers.SGD(1e-5), {"error": "mse"}, probe_every=50)
    data = tf.data.Dataset.from_tensors((x, x[..., :1])).repeat()
    trainer.fit(data, steps=steps, log_every=10, workdir=workdir, progress=False)
    return trainer.diagnose()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    scratch, logdir = tmp_path_factory.mktemp("trained"), tmp_path_factory.mktemp("runs")
    found = train(logdir / "forgets", STEPS), train(logdir / "skips", 12, scale=np.nan)
    with boards.tensorboard(logdir, scratch) as board, browsing.chromium(scratch) as (browser, downloads):
        board.wait_for_tag("forgets/train", "timestep/rnn/state", STEPS)
        page = browsing.Page(browser, board.url, downloads)
        page.found = found
        yield page


@pytest.fixture
def page(site):
    site.browser.set_window_size(1300, 1000)
    yield site
    assert site.problems() == []


def test_a_card_names_what_the_horizon_comes_from(page):
    page.open(tiles=1, runs=["forgets/train"])
    ((found,), _) = page.found
    assert (found.word, found.source) == ("vanishing", "gain")
    assert "4 of 50 time steps (from the gain: gradients enter at most time steps; median gain 0.33)" in found.text
    cards = page.until(lambda: [text for text in page.texts(".strip > *") if "rnn reaches" in text], "the card")
    assert found.text in " ".join(cards[0].split()) and found.word in cards[0]


def test_the_first_steps_have_rows(page):
    shown = []
    for step in (*FIRST, 15):
        page.open(tiles=1, runs=["forgets/train"], step=step)
        shown += page.until(lambda: page.texts(".dock .chart-key span"), "the row's step")[:1]
    assert shown[:-1] == [f"forgets, step {step}" for step in FIRST]
    assert shown[-1] in ("forgets, step 10", "forgets, step 20"), "the nearest row: 15 was not probed"


def test_a_run_without_any_update_says_so(page):
    page.open(page="health", runs=["skips/train"])
    found = page.found[1][0]  # the probed rows hold NaN, too
    assert found.text == "No update was applied: all 12 were skipped (non-finite)."
    cards = page.until(lambda: [text for text in page.texts(".health-card") if found.text in text], "the sentence")
    assert "no update" in cards[0] and "skipped 12" in " ".join(cards[0].split())


def test_tensorboard_opens_with_the_loss(page):
    """The groups of its time series, by the names before the slash, in the order in which it shows them."""
    page.browser.switch_to.default_content()
    page.browser.get("about:blank")
    page.browser.get(f"{page.url}#timeseries")
    titles = page.until(lambda: page.texts("card-group-toolbar .group-title, .group-title-wrapper"), "the groups")
    names = [title.split("\n")[0].split()[0] for title in titles]
    assert names[:2] == ["loss", "metrics"]
