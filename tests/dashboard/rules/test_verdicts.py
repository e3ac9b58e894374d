"""Each rule with a run that must trigger it and one that must not."""

import json

import numpy as np
import pytest

from looptape.dashboard.rules import verdicts

TIME = 100
STEPS = np.arange(1, 13) * 50
FLAT = (np.arange(1, 41) * 15, np.full(40, 0.17))
FALLING = (np.arange(1, 41) * 15, 0.9 ** np.arange(40))


def decaying(gains, time=TIME):
    """State gradients [rows, time] of a loss at the end: each row shrinks by its gain per time step back."""
    return np.asarray(gains, dtype=np.float64)[:, None] ** np.arange(time)[::-1]


def reaching(horizons, time=TIME):
    """Rows whose gradient is above 1 % at exactly so many time steps."""
    back = np.arange(time)[::-1]
    return np.where(back < np.asarray(horizons)[:, None], 1.0, 1e-3)


def judge(state, **options):
    return verdicts.judge("lstm", STEPS[: len(state)], state, **options)


def test_the_sentence_of_a_network_that_forgets():
    found = verdicts.judge("lstm", 2 * STEPS, reaching([10] * 12), loss=FLAT, cell_class="LSTMCell")
    assert found.text == "lstm reaches back 10 of 100 time steps, unchanged since step 100, loss flat."
    assert (found.word, found.value, found.layer, found.source, found.tone) == ("vanishing", 10, "lstm", "state", "bad")
    assert "forget gate" in found.advice


def test_a_short_horizon_comes_with_the_median_gain_of_the_late_rows():
    gain = np.full((12, TIME), 0.9)
    gain[-3:] = 0.61
    gain[-3:, 0] = np.nan  # the last time step has no gain
    gain[-3:, 1:3] = 50.0  # a median, not a mean
    found = judge(reaching([30] * 12), gain=gain, loss=FLAT)
    assert found.text.startswith("lstm reaches back 30 of 100 time steps (median gain 0.61), unchanged")
    assert found.source == "state"
    for horizon, known in ((80, gain), (30, None), (30, gain * np.nan)):
        assert "gain" not in judge(reaching([horizon] * 12), gain=known).text


@pytest.mark.parametrize("horizon, word", [(10, "vanishing"), (11, "short"), (50, "short"), (51, "healthy")])
def test_words_follow_the_share_of_time_steps_reached(horizon, word):
    assert judge(reaching([horizon] * 12)).word == word


def test_the_horizon_of_a_geometric_decay_is_its_logarithm():
    found = judge(decaying([0.8] * 12))
    # 0.8 to the 20th is 0.0115, to the 21st 0.0092: time steps 0 to 20 back.
    assert found.value == 21 == np.ceil(np.log(0.01) / np.log(0.8))


def test_first_rows_alone_are_never_judged():
    early = reaching([5] * 12)
    assert verdicts.judge("gru", STEPS[:2], early[:2]).word == "too early"
    assert verdicts.judge("gru", [1, 2, 5, 10, 20], early[:5]).word == "too early"
    assert verdicts.judge("gru", STEPS[:3], early[:3]).word == "vanishing"
    # A gated cell that opened is healthy, whatever its first rows were.
    opened = judge(reaching([5] * 4 + [100] * 8))
    assert opened.word == "healthy" and "since step 250 (5 at step 50)" in opened.text
    closed = judge(reaching([100] * 4 + [5] * 8))
    assert closed.word == "vanishing" and "since step 250 (100 at step 50)" in closed.text


def test_a_horizon_that_still_grows_is_opening():
    assert judge(reaching(np.arange(2, 14))).word == "opening"
    assert judge(reaching([9, 10] * 6)).word == "vanishing"


def test_explosion_needs_growth_in_the_late_rows():
    found = judge(decaying([1.1] * 12))
    assert found.word == "exploding" and found.value == pytest.approx(1.1**90)  # by the largest of the last ten
    assert "since step 50" in found.text
    late = judge(decaying([1.0] * 4 + [1.1] * 8))
    assert late.word == "exploding" and "since step 250" in late.text
    assert judge(decaying([1.1] * 4 + [1.0] * 8)).word == "healthy"
    assert judge(decaying([1.04] * 12)).word == "healthy"  # 34 times, below the limit
    # Losses at the last ten time steps add up on the way back: the last state has a tenth of the gradient.
    summed = np.ones((12, TIME))
    summed[:, -10:] = np.linspace(1, 1e-3, 10)
    assert judge(summed).word == "healthy"


def test_explosion_where_every_time_step_has_a_loss_is_told_by_the_gain():
    ones, time = np.ones((12, 40)), 40
    found = judge(ones, gain=np.full((12, time), 1.2), external=ones)
    assert found.word == "exploding" and found.value == pytest.approx(1.2**40) and found.source == "gain"
    assert judge(ones, gain=np.full((12, time), 1.1), external=ones).word == "healthy"  # 45 times
    mixed = np.where(np.arange(time) % 2, 4.0, 0.25) * np.ones((12, 1))
    assert judge(ones, gain=mixed, external=ones).word == "healthy", "the product counts, not the largest"


def test_a_gradient_that_has_vanished_at_the_start_is_vanishing_whatever_its_horizon():
    """As the plain network of the guide: 10 of 60 time steps are above 1 %, and the first get 1e-11 of it."""
    found = judge(decaying([0.65] * 12, 60), loss=FLAT)
    assert (found.value, found.word, found.tone) == (11, "vanishing", "bad")
    assert (
        "reaches back 11 of 60 time steps, unchanged since step 50, loss flat. At the first ones 3e-11 of "
        in found.text
    )
    level = decaying([0.65] * 12, 60)
    cut = np.ones((12, 60))
    cut[:, :20] = 0.0  # two thirds of the way, and then nothing: a gradient that is cut off on its way
    assert (judge(cut).word, judge(cut).tone) == ("short", "warn")
    level[:, :-11] = 1e-5  # little, but the start is reached
    assert judge(level).word == "short" and "At the first" not in judge(level).text


@pytest.mark.parametrize(
    "cell, advice",
    [
        (
            "LSTMCell",
            "give the forget gate a bias of about 4.6, the logarithm of 100 time steps (chrono initialisation",
        ),
        ("GRUCell", "give the update gate a bias of about 4.6"),
        ("MinimalGatedCell", "give the update gate a bias"),
        ("SimpleRNNCell", "use a gated cell (GRU, LSTM) or an orthogonal recurrent matrix"),
        ("IdentityRNNCell", "use a gated cell (GRU, LSTM)"),
        ("Mine", "use a gated cell, or open the gates of this one"),
    ],
)
def test_advice_is_for_the_cell_at_hand(cell, advice):
    for horizon in (5, 30):
        found = judge(reaching([horizon] * 12), loss=FLAT, cell_class=cell)
        assert found.advice.startswith(advice)
    assert ("forget gate" in found.advice) == (cell == "LSTMCell")


@pytest.mark.parametrize(
    "cell, last, loss, word",
    [
        ("LSTMCell", 600, FLAT, "short"),  # the gates of an LSTM on the adding problem opened at step 650
        ("GRUCell", 600, FLAT, "short"),
        ("LSTMCell", 3000, FALLING, "short"),
        ("LSTMCell", 3000, FLAT, "vanishing"),
        ("SimpleRNNCell", 600, FALLING, "vanishing"),
        ("", 600, FALLING, "vanishing"),
    ],
)
def test_gates_may_still_open_early_and_while_the_loss_falls(cell, last, loss, word):
    found = verdicts.judge("rnn", np.linspace(1, last, 12), reaching([9] * 12), loss=loss, cell_class=cell)
    assert found.word == word and ("may still open" in found.text) == (word == "short")
    healthy = verdicts.judge("rnn", np.linspace(1, last, 12), reaching([90] * 12), loss=loss, cell_class=cell)
    assert healthy.word == "healthy" and "open" not in healthy.text


def test_nothing_green_beside_a_network_that_forgets():
    moving = {"variables": ["m/a/kernel", "m/b/kernel"], "steps": STEPS, "weight": np.ones((12, 2))}
    moving |= {"gradient": np.ones((12, 2)), "ratio": np.full((12, 2), 1e-3)}
    for gain, words in ((0.5, ["vanishing"]), (1.0, ["healthy", "healthy"])):
        layers = {"rnn": {"steps": STEPS, "state": decaying([gain] * 12), "cell_class": "SimpleRNNCell"}}
        assert [found.word for found in verdicts.run_findings(layers, {"": FLAT}, health={"": moving})] == words


def test_nan_and_inf_are_counted_from_their_first_row_but_padding_is_not():
    state = decaying([1.0] * 12)
    state[7, 3] = np.nan
    state[9, 4] = np.inf
    found = judge(state)
    assert (found.word, found.value) == ("NaN/Inf", 2)
    assert found.text == "lstm has NaN or Inf in 2 of 12 rows, first at step 400."
    padded = decaying([1.0] * 12)
    padded[3:, 60:] = np.nan
    padded[5:, :10] = np.nan
    assert judge(padded).word == "healthy"
    everywhere = decaying([1.0] * 12)
    everywhere[11] = np.nan
    assert judge(everywhere).value == 1


def test_no_gradient_at_all():
    state = np.zeros((12, TIME))
    assert judge(state).word == "no gradient"
    state[:, -1] = 1e-30
    assert judge(state).word == "vanishing"


def test_where_every_time_step_has_a_loss_the_horizon_comes_from_the_gain():
    time = 64
    state, gain = np.ones((12, time)), np.full((12, time), 0.32)
    everywhere, at_end = np.ones((12, time)), np.zeros((12, time))
    at_end[:, -1] = 1
    found = judge(state, gain=gain, external=everywhere)
    assert (found.value, found.source, found.word) == (4, "gain", "vanishing")
    way = "(from the gain: gradients enter at most time steps; median gain 0.32)"
    assert f"4 of 64 time steps {way}, unchanged" in found.text
    found = judge(state, gain=gain, external=at_end)
    assert (found.value, found.source, found.word) == (64, "state", "healthy")
    assert "gain" not in found.text


@pytest.mark.parametrize("gain, horizon", [(1.0, 64), (1.2, 64), (0.0, 0), (0.5, 6), (0.1, 2), (0.99, 64), (0.9, 43)])
def test_gain_horizons_by_multiplication(gain, horizon):
    product, count = 1.0, 0
    while count < 64 and product * gain >= 0.01 - 1e-12:
        product, count = min(product * gain, 1e6), count + 1
    assert count == horizon
    assert verdicts.gain_horizons(np.full((1, 9), gain), 64)[0] == horizon


def test_a_gain_that_is_never_defined_gives_no_verdict():
    found = judge(np.ones((12, 8)), gain=np.full((12, 8), np.nan), external=np.ones((12, 8)))
    assert found.word == "too early" and "not defined" in found.text


@pytest.mark.parametrize(
    "values, trend",
    [
        (np.full(40, 0.17), "flat"),
        (0.9 ** np.arange(40), "falling"),
        (1.1 ** np.arange(40), "rising"),
        (np.arange(7), None),
        ([np.nan] * 40, None),
        ([1.160, 0.784, 0.689, 0.672, 0.665, 0.643, 0.621, 0.589], "falling"),  # eight rows of a run that learns
        ([0.665, 0.643, 0.672, 0.621, 0.660, 0.630, 0.668, 0.625], "flat"),
        ([0.589, 0.621, 0.643, 0.665, 0.672, 0.689, 0.784, 1.160], "rising"),
    ],
)
def test_loss_trend(values, trend):
    assert verdicts.loss_trend((np.arange(len(values)), values)) == trend


def test_short_memory_with_a_falling_loss_needs_no_advice():
    assert judge(reaching([30] * 12), loss=FALLING).advice == ""
    assert judge(reaching([30] * 12), loss=FLAT).advice != ""


def test_a_run_lists_its_worst_finding_first():
    layers = {
        "good": {"steps": STEPS, "state": decaying([1.0] * 12)},
        "bad": {"steps": STEPS, "state": reaching([3] * 12)},
    }
    assert [finding.layer for finding in verdicts.run_findings(layers, {"": FLAT})] == ["bad", "good"]
    found = verdicts.run_findings(layers, {"": ([1, 2, 3], [1.0, np.nan, np.inf])})
    assert found[0].text == "The loss is NaN or Inf in 2 of 3 rows, first at step 2." and found[0].layer is None


def test_an_earlier_longer_horizon_is_named():
    found = judge(reaching([10] * 2 + [60] * 3 + [9] * 7))
    assert "reaches back 9 of 100 time steps, since step 300 (10 at step 50, 60 at step 150)" in found.text
    assert "60" not in judge(reaching([60] * 5 + [9] * 7)).text.split("(60 at step 50")[1], "the first is named once"


def test_nothing_is_left_in_words():
    state = reaching([5] * 12)
    state[:, :20] = 0
    assert judge(state).text.endswith("At the first ones nothing of the gradient is left.")


@pytest.mark.parametrize(("gain", "word"), [(0.5, "vanishing"), (1.0, "healthy"), (1.2, "exploding")])
def test_a_layer_that_reads_from_the_end_is_judged_in_its_own_order(gain, word):
    """As the second half of a bidirectional layer: its loss is at the first time step of the input."""
    rows = {"steps": STEPS, "state": decaying([gain] * 12), "gain": np.full((12, TIME), gain)}
    turned = rows | {"state": rows["state"][:, ::-1], "backward": True}
    (one,), (other,) = verdicts.run_findings({"rnn": rows}), verdicts.run_findings({"rnn": turned})
    assert (one.word, other.word) == (word, word) and one.horizons == other.horizons and other.layer == "rnn"
    assert other.text == one.text.replace("rnn ", "rnn (reads from the end) ", 1)


def test_each_minimizer_has_a_loss_of_its_own():
    """As in a GAN: a NaN is found in any of them, and a layer names the loss that trains it."""
    layers = {f"{name}/lstm": {"steps": STEPS, "state": reaching([10] * 12)} for name in "dg"}
    found = verdicts.run_findings(layers, {"d": FLAT, "g": FALLING})
    assert {one.layer: one.text.split(", loss ")[1] for one in found} == {"d/lstm": "flat.", "g/lstm": "still falling."}
    worst = verdicts.run_findings({}, {"d": FLAT, "g": ([1, 2], [1.0, np.nan])})[0]
    assert worst.text == "The loss of `g` is NaN or Inf in 1 of 2 rows, first at step 2."


def test_without_rows_and_as_json():
    assert verdicts.judge("lstm", [], np.zeros((0, 0))).word == "too early"
    found = verdicts.as_json(judge(reaching([10] * 12)))
    assert json.loads(json.dumps(found, allow_nan=False))["horizons"] == [10.0] * 12
    steps, state = np.arange(1, 17) * 50, reaching([3] * 12 + [2, 3, 2, 3])  # a median of 2.5
    between = verdicts.judge("lstm", steps, state)
    assert between.value == 2.5 and verdicts.as_json(between)["horizon"] == 2 and "reaches back 2 of" in between.text
    noisy = verdicts.as_json(judge(reaching([30] * 11 + [18])))
    assert noisy["horizon"] == 30 != noisy["horizons"][-1], "the table of runs says what the sentence says"


def test_noise_of_the_loss_is_no_trend():
    """Batches of a loss that stands still scatter; a real fall is seen through the same scatter."""
    steps = np.arange(80)
    noise = np.random.default_rng(0).normal(size=80)
    assert verdicts.loss_trend((steps, 0.17 + 0.01 * noise)) == "flat"
    assert verdicts.loss_trend((steps, 0.17 * 0.98**steps + 0.01 * noise)) == "falling"
    assert verdicts.loss_trend((steps, np.where(steps < 50, 0.2, 0.002) * (1 + 0.01 * noise))) == "falling"


@pytest.mark.parametrize("rows", [8, 12, 40])
def test_a_flat_noisy_loss_is_flat_and_a_steady_fall_falls(rows):
    """Of 200 runs each: scatter of 5 % about a constant, and about a line that falls by a fifth each quarter."""
    scatter = 0.05 * np.random.default_rng(rows).normal(size=(200, rows))
    line = 2 - 0.8 * np.arange(rows) / rows
    trends = [[verdicts.loss_trend((np.arange(rows), mean + own)) for own in scatter] for mean in (1.0, line)]
    assert np.mean([trend == "flat" for trend in trends[0]]) > 0.9
    assert trends[1].count("rising") == 0 and np.mean([trend == "falling" for trend in trends[1]]) > 0.4


def test_an_explosion_that_is_over_is_mentioned():
    time, rows = 20, 12
    growing, level = 2.0 ** np.arange(time)[::-1], np.ones(time)
    state = np.array([growing] * 3 + [level] * (rows - 3))
    found = verdicts.judge("rnn", [50 * (row + 1) for row in range(rows)], state)
    assert found.word == "healthy" and ", exploded up to step 150 (grew 262,144 times)" in found.text
