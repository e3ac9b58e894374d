"""Real kills at random moments."""

import pytest

from benchmarks.faults import kills


@pytest.mark.long
def test_fifty_random_kills_change_nothing(tmp_path):
    counts, runs, different = kills.campaign(50, directory=tmp_path)
    assert sum(counts.values()) >= 50 and runs >= 1 and different == 0


def test_two_random_kills_change_nothing(tmp_path):
    counts, _, different = kills.campaign(2, seed=1, steps=60, directory=tmp_path)
    assert sum(counts.values()) >= 2 and different == 0
