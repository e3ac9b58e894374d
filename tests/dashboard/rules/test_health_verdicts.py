"""Each rule about health on rows that are just on either side of it."""

import numpy as np
import pytest

from looptape.dashboard.rules import findings, verdicts
from looptape.dashboard.rules.health_verdicts import layers_of, recurrent_layers

NAMES = ["model/a/kernel", "model/a/bias", "model/b/kernel", "model/b/bias", "model/c/kernel"]


def rows(count=8, **columns):
    """Health rows of three layers that learn; `ratio_b=1e-9` and the like change a layer."""
    table = {name: np.ones((count, 5)) for name in ("gradient", "weight", "ratio", "zeros")}
    table["ratio"] *= 1e-3
    for key, value in columns.items():
        quantity, layer = key.split("_")
        for index in layers_of(NAMES)[layer]:
            table[quantity][:, index] = value
    return {"": {"variables": NAMES, "steps": 10 * np.arange(1, count + 1), **table}}


def found(health, **options):
    return verdicts.run_findings({}, None, health=health, **options)


def words(*arguments, **options):
    return {(one.word, one.layer) for one in found(*arguments, **options)}


def test_a_run_in_which_all_layers_learn():
    (one,) = found(rows())
    assert (one.word, one.layer, one.tone) == ("healthy", None, "good")
    assert one.text == "All 3 layers learn: an update moves them by 1e-03 of their norm."


@pytest.mark.parametrize(("ratio", "triggered"), [(0.9e-5, True), (1.1e-5, False)])
def test_a_layer_far_below_the_others(ratio, triggered):
    result = found(rows(ratio_b=ratio))
    assert (("not learning", "b") in {(one.word, one.layer) for one in result}) is triggered
    if triggered:
        assert result[0].text == "b: update-to-weight ratio 9e-06, 111 × below the others: it hardly learns."
        assert result[0].value == pytest.approx(0.9e-5) and "learning rate" in result[0].advice


@pytest.mark.parametrize(("ratio", "word"), [(0.0, "not learning"), (1e-9, "not learning"), (1e-7, "healthy")])
def test_a_model_that_stands_still_is_not_healthy(ratio, word):
    result = found(rows(ratio_a=ratio, ratio_b=ratio, ratio_c=ratio))
    assert {one.word for one in result} == {word}
    assert word == "healthy" or all(one.text.endswith("it does not move.") for one in result)


@pytest.mark.parametrize(("ratio", "triggered"), [(0.11, True), (0.09, False)])
def test_steps_that_are_too_large(ratio, triggered):
    assert (("too large", "a") in words(rows(ratio_a=ratio))) is triggered


def test_a_bias_that_grows_from_zero_is_no_alarm():
    health = rows()
    health[""]["ratio"][:, 1] = 0.5
    health[""]["weight"][:, 1] = 1e-3
    health[""]["ratio"][:2, 3] = np.inf
    assert words(health) == {("healthy", None)}


@pytest.mark.parametrize(("gradient", "triggered"), [(0.0, True), (1e-30, False)])
def test_no_gradient(gradient, triggered):
    assert (("no gradient", "c") in words(rows(gradient_c=gradient))) is triggered


def test_only_later_rows_count_and_two_are_too_few():
    health = rows(ratio_a=1.0)
    health[""]["ratio"][4:, :2] = 1e-3
    assert words(health) == {("healthy", None)}
    assert words(rows(2, ratio_b=1e-9)) == set()


def test_rows_that_are_not_finite():
    health = rows()
    health[""]["gradient"][6, 2] = np.nan
    one = found(health)[0]
    assert one.word == "NaN/Inf" and one.layer == "model/b/kernel" and one.text.endswith("first at step 70.")
    assert words(rows(gradient_a=np.inf, gradient_b=np.inf, gradient_c=np.inf)) == {("NaN/Inf", "model/a/kernel")}


@pytest.mark.parametrize(("share", "triggered"), [(0.5, True), (0.45, False)])
def test_dead_units(share, triggered):
    health = rows()
    health[""]["dead"] = {"layers": ["a", "b"], "values": [[0.9, 0.0]] * 3 + [[share, 0.0]] * 5}
    assert (("dead units", "a") in words(health)) is triggered


def test_many_layers_with_the_same_finding_share_a_sentence():
    names = [f"m/layer_{index}/kernel" for index in range(12)]
    table = {name: np.ones((8, 12)) for name in ("gradient", "weight")}
    table["ratio"] = np.where(np.arange(12) < 5, 1e-9, 1e-3) * np.ones((8, 1))
    table |= {"variables": names, "steps": 10 * np.arange(1, 9)}
    table["dead"] = {"layers": ["a", "b", "c", "d"], "values": [[0.6, 0.7, 0.8, 0.9]] * 8}
    slow, dead = found({"": table})
    assert slow.text == (
        "5 of 12 layers hardly move: update-to-weight ratios of 1e-09 to 1e-09 (layer_0, layer_1, layer_2, …)."
    )
    assert (slow.word, slow.layer, dead.word) == ("not learning", "layer_0", "dead units")
    assert dead.text == "4 of the layers have dead units: shares of 60% to 90% (a, b, c, …)."


def test_gradients_that_are_nearly_orthogonal_are_not_in_conflict():
    cosines = {"a-b": [-0.01] * 8 + [0.3] * 2}
    (one,) = verdicts.run_findings({}, cosines=cosines)
    assert one.word == "healthy" and one.text == (
        "Losses do not conflict: the gradients of `a` and `b` were opposed in 80% of the 10 probed updates "
        "(median cosine -0.01)."
    )
    assert verdicts.run_findings({}, cosines={"a-b": [0.1] * 7}) == [], "seven are too few"
    (several,) = verdicts.run_findings({}, cosines={"a-b": [0.1] * 9, "a-c": [-0.1, *[0.1] * 9]})
    assert "`a` and `c` were opposed in at most 10% of the 10" in several.text
    both = verdicts.run_findings({}, cosines={"a-b": [0.1] * 9, "a-c": [-0.9] * 9})
    assert [one.word for one in both] == ["conflict"]


@pytest.mark.parametrize(("negative", "triggered"), [(6, True), (5, False)])
def test_losses_in_conflict(negative, triggered):
    cosines = {"a-b": [-0.1] * negative + [0.1] * (10 - negative), "a-c": [-1.0] * 7}  # seven are too few
    result = verdicts.run_findings({}, cosines=cosines)
    assert [one.word for one in result] == ["conflict" if triggered else "healthy"]
    if triggered:
        assert result[0].text == "Losses `a` and `b` conflict in 60% of the 10 probed updates (median cosine -0.10)."


@pytest.mark.parametrize(("scale", "triggered"), [(330.0, True), (310.0, False), (np.inf, True), (np.nan, False)])
def test_a_batch_that_is_small(scale, triggered):
    result = verdicts.run_findings({}, noise={"": (1.0, 32, 9), "a": (scale, 32, 9), "b": (scale, 32, 2)})
    assert [one.word for one in result] == ["noisy"] * triggered
    assert not triggered or result[0].text.startswith("loss `a`: the batch of 32 examples is small")


def test_every_word_has_a_tone_and_every_bad_one_advice():
    assert set(findings.ADVICE) <= set(findings.WORDS)
    for word, tone in findings.WORDS.items():
        assert tone in ("bad", "warn", "none", "good") and (tone != "bad" or word in findings.ADVICE)


@pytest.mark.parametrize("skips, said", [((40, 40), "all 40 were"), ((1, 1), "the only one was")])
def test_a_run_without_any_update_says_so(skips, said):
    (one,) = verdicts.run_findings({}, skips=skips)
    assert one.text == f"No update was applied: {said} skipped (non-finite)."
    assert (one.word, one.tone, one.layer, one.value) == ("no update", "bad", None, skips[0])
    assert "NaN in the data" in one.advice and "learning rate" not in one.advice


@pytest.mark.parametrize("skips", [(39, 40), (0, 40), (0, 0)])
def test_a_run_with_an_update_that_was_applied_does_not(skips):
    assert verdicts.run_findings({}, skips=skips) == []


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["m/gru/gru_cell/recurrent_kernel"], "gru: its time steps were not probed; whether it forgets is not known."),
        (["own/recurrent_matrix"], "own: its time steps were not probed; whether it forgets is not known."),
        (
            ["m/a/own_cell/k", "m/b/lstm_cell/k", "m/c/lstm_cell/k", "m/d/lstm_cell/k"],
            "a, b, c, …: their time steps were not probed; whether they forget is not known.",
        ),
    ],
)
def test_weights_that_learn_do_not_prove_that_a_recurrent_layer_remembers(names, said):
    names = [*names, "m/head/kernel"]
    table = {name: np.ones((8, len(names))) for name in ("gradient", "weight")}
    table |= {"variables": names, "steps": 10 * np.arange(1, 9), "ratio": np.full((8, len(names)), 1e-3)}
    (one,) = found({"": table})
    assert (one.word, one.tone, one.text) == ("not probed", "none", said), "nothing green"
    level = {"steps": [50, 100, 150], "state": np.ones((3, 10))}
    assert {one.word for one in verdicts.run_findings({"gru": level}, health={"": table})} == {"healthy"}
    early = {"steps": [1, 2], "state": np.ones((2, 10))}
    assert [one.word for one in verdicts.run_findings({"gru": early}, health={"": table})] == ["too early"]


def test_what_is_not_recurrent():
    assert recurrent_layers(["m/conv/kernel", "m/excellent/kernel", "recurrent_kernel", "cell/k"]) == []


def test_layers_of_paths_without_a_model():
    assert layers_of(["kernel", "dense/bias"]) == {"kernel": [0], "dense": [1]}
    assert layers_of([]) == {}


def test_praise_names_the_minimizer_and_counts_layers():
    rows = {
        "steps": [10, 20, 30],
        "gradient": np.ones((3, 1)),
        "weight": np.ones((3, 1)),
        "ratio": np.full((3, 1), 2e-3),
    }
    (one,) = verdicts.run_findings({}, health={"generator": {"variables": ["dense/kernel"], **rows}})
    assert one.text == "generator: the only layer learns: an update moves it by 2e-03 of its norm."


def test_a_layer_that_never_moved():
    rows = {"steps": [10, 20, 30], "gradient": np.ones((3, 1)), "weight": np.ones((3, 1)), "ratio": np.zeros((3, 1))}
    (one,) = verdicts.run_findings({}, health={"": {"variables": ["dense/kernel"], **rows}})
    assert one.text == "dense: update-to-weight ratio 0: it does not move."
