"""Real kills at random moments."""

import pytest

from benchmarks.faults import kills


def check(found, wanted):
    """Nothing differs, and something was there to be lost each time."""
    assert found.kills == wanted and found.runs >= 1
    assert found.different == 0 and found.uneven == 0
    assert found.resumes >= wanted, "every session but the first of a run resumes from a checkpoint"
    assert found.set_aside == found.hurt["SIGKILL and truncation"]


@pytest.mark.long
def test_fifty_random_kills_change_nothing(tmp_path):
    found = kills.campaign(50, directory=tmp_path)
    check(found, 50)
    assert found.set_aside > 0


@pytest.mark.long
def test_two_random_kills_change_nothing(tmp_path, monkeypatch):
    """After the second one the newest checkpoint is cut: by then there is one of each session."""
    monkeypatch.setattr(kills, "KINDS", {"SIGKILL and truncation": 1.0})
    monkeypatch.setattr(kills, "LONGEST_WAIT_SECONDS", 0.3)
    found = kills.campaign(2, seed=1, steps=200, directory=tmp_path)
    check(found, 2)
    assert found.set_aside > 0
