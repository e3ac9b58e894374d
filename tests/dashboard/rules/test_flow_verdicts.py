"""Positions and loss shares: each rule with a run that must trigger it and one that must not."""

import numpy as np
import pytest

from looptape.dashboard.rules import verdicts

STEPS = 10 * np.arange(1, 9)


def positions(reached, count=40, padded=0):
    """Rows whose last positions have a gradient, those before nearly none, and those at the end are padding."""
    row = np.where(np.arange(count)[::-1] < reached, 1.0, 1e-3)
    return STEPS, np.tile(np.concatenate([row, np.full(padded, np.nan)]), (8, 1))


@pytest.mark.parametrize("reached, word", [(4, "vanishing"), (5, "short"), (20, "short"), (21, "healthy")])
@pytest.mark.parametrize("padded", [0, 3])
def test_positions_that_the_gradient_reaches(reached, word, padded):
    layers = {"embedding": positions(reached, padded=padded), "logits": positions(1)}
    (one,) = verdicts.run_findings({}, positions=layers)
    only = "" if word == "healthy" else "only "
    assert one.text.startswith(f"The gradient reaches {only}{reached} of 40 positions of embedding,")
    assert (one.word, one.layer, one.value, "masks" in one.advice) == (word, "embedding", reached, word != "healthy")


def test_no_verdict_on_few_rows_one_position_or_no_gradient():
    steps, values = positions(1)
    for rows in ((steps[:2], values[:2]), ((1, 2, 5), values[:3]), (steps, values[:, :1]), (steps, 0 * values)):
        assert verdicts.run_findings({}, positions={"embedding": rows}) == []


def shares(far_early, time=20):
    """Shares of two losses: `far` has so much of the first half of the time steps and none of the second."""
    far = np.where(np.arange(time) < time // 2, far_early, 0.0)
    return {"near": (STEPS, np.tile(1 - far, (8, 1))), "far": (STEPS, np.tile(far, (8, 1)))}


@pytest.mark.parametrize("share, triggered", [(0.02, True), (0.04, True), (0.06, False), (0.5, False)])
def test_a_loss_that_carries_little_of_the_early_gradient(share, triggered):
    found = verdicts.run_findings({}, shares={"gru": shares(share)})
    assert [one.word for one in found] == ["one-sided"] * triggered
    if triggered:
        rest = f"`near` {1 - share:.0%}."
        assert found[0].text == (
            f"`far` carries {share:.0%} of the gradient of gru in the first half of the time steps, {rest}"
        )
        assert (found[0].layer, found[0].value, found[0].tone) == ("gru", pytest.approx(share), "none")


def test_no_verdict_on_shares_of_one_loss_or_of_few_rows():
    both = shares(0.0)
    few = {loss: (steps[:2], values[:2]) for loss, (steps, values) in both.items()}
    unknown = {loss: (steps, values * np.nan) for loss, (steps, values) in both.items()}
    for known in ({"near": both["near"]}, few, unknown):
        assert verdicts.run_findings({}, shares={"gru": known}) == []
