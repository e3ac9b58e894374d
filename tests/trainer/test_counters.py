"""The host's counters: what a checkpoint holds of them, and phases of the batch size against a plain loop."""

import json
import math

import pytest

from looptape.trainer.counters import Counters, Phases


class Skips:
    """Stands for the skipped updates."""

    def __init__(self, value=0):
        self.value = value

    def state(self):
        return self.value

    def restore(self, value):
        self.value = value


def test_every_counter_survives_a_checkpoint():
    kept = Counters(Skips(7), step=5, epoch=2, rounds=3, restores=1, best_loss=0.5, probed=4, divisions=2)
    found = Counters(Skips())
    found.restore(5, json.loads(json.dumps(kept.state())))
    assert found.skips.value == 7
    assert {**vars(found), "skips": None} == {**vars(kept), "skips": None}


def test_a_best_loss_that_is_not_there_yet_survives_json():
    kept = Counters(Skips())
    assert json.loads(json.dumps(kept.state()))["best_loss"] is None
    kept.restore(0, kept.state())
    assert kept.best_loss == math.inf


def test_what_an_earlier_checkpoint_lacks_and_what_is_kept():
    found = Counters(Skips(), epoch=9, restores=2, probed=8)
    found.restore(3, {"skips": 1, "epoch": 4, "restores": 0}, keep=("epoch", "restores"))
    assert (found.step, found.epoch, found.restores, found.probed) == (3, 9, 2, 0)


def test_each_event_changes_its_own_counter():
    found = Counters(Skips(), step=5)
    found.made(3), found.end_pass(), found.end_round(), found.write_probes(), found.went_back(), found.divide(4)
    numbers = (found.step, found.epoch, found.rounds, found.probed, found.restores, found.divisions)
    assert numbers == (8, 1, 1, 1, 1, 4)
    assert [found.improves(score) for score in (0.5, 0.7, 0.5, 0.4, math.nan)] == [True, False, False, True, False]
    assert found.best_loss == 0.4
    found.forget_best()
    assert found.improves(9.0)


@pytest.mark.parametrize("phases", [{0: 1}, {0: 2, 3: 5}, {0: 4, 2: 1, 7: 3}], ids=str)
def test_phases_against_a_loop_over_updates(phases):
    def by_hand(step, batches):
        made = 0
        while batches > 0:
            batches -= [number for begin, number in sorted(phases.items()) if begin <= step + made][-1]
            made += 1
        return made

    for step in range(9):
        for batches in range(20):
            assert Phases(phases).updates(step, batches) == by_hand(step, batches), (step, batches)
