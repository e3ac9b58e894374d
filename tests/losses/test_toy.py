"""The two-dimensional toy of the CAGrad paper: 100,000 Adam updates take about a second each under XLA."""

import numpy as np
import pytest
import tensorflow as tf

from looptape import losses
from tests.losses.toy import STARTS, descend, toy_losses

UPDATES = 100_000
starts = pytest.mark.parametrize("start", STARTS, ids=["left", "low", "right"])


def test_the_losses_by_hand():
    x1, x2 = 1.5, -2.0
    q1, q2 = (((s * 7 - x1) ** 2 + 0.1 * (-x2 - 8) ** 2) / 10 - 20 for s in (1, -1))
    np.testing.assert_allclose(toy_losses(tf.constant([x1, x2])), np.tanh(1.0) * np.array([q1, q2]), rtol=1e-5)
    f1 = np.log(abs(0.5 * (-x1 - 7) - np.tanh(x2))) + 6
    f2 = np.log(abs(0.5 * (-x1 + 3) + np.tanh(x2) + 2)) + 6
    np.testing.assert_allclose(toy_losses(tf.constant([x1, -x2])), np.tanh(1.0) * np.array([f1, f2]), rtol=1e-4)


def optimum(point, values):
    np.testing.assert_allclose(point, (0.0, -8.3552), atol=2e-3)
    np.testing.assert_allclose(values, -15.092, atol=1e-3)


@pytest.mark.long
@starts
@pytest.mark.parametrize("combiner", [losses.CAGrad, losses.ConFIG])
def test_cagrad_and_config_reach_the_optimum(combiner, start):
    optimum(*descend(combiner(), start, UPDATES))


@pytest.mark.long
@starts
@pytest.mark.parametrize("combiner", [losses.PCGrad, losses.MGDA])
def test_pcgrad_and_mgda_reach_the_pareto_set(combiner, start):
    point, _ = descend(combiner(), start, UPDATES)
    assert point[1] < -8.3


@pytest.mark.long
@starts
def test_the_mean_gets_stuck(start):
    point, values = descend(losses.CAGrad(c=0.0), start, UPDATES)
    if start == STARTS[1]:
        optimum(point, values)
    else:
        assert point[1] > 2


@pytest.mark.parametrize("combiner", [losses.CAGrad(), losses.ConFIG()], ids=lambda c: c.name)
def test_in_the_valley_of_the_hard_start(combiner):
    """The short variant: 50,000 updates from the first start leave the valley where the mean stays."""
    point, _ = descend(combiner, STARTS[0], 50_000)
    assert point[1] < 0


def test_the_mean_stays_in_the_valley():
    point, _ = descend(losses.WeightedSum(), STARTS[0], 50_000)
    assert point[1] > 2
