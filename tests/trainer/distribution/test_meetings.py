"""Meetings of workers, and who does nothing between them."""

import pytest

from looptape.trainer.distribution.meetings import Meetings, Progress


def test_a_process_waits_only_inside_a_meeting():
    own = Meetings()
    assert (own.count, own.waited()) == (0, 0.0)
    with pytest.raises(OSError), own.one_more():
        assert own.count == 1 and own.waited() >= 0.0 and own._since is not None
        raise OSError
    assert own.count == 1 and own.waited() == 0.0 and own._since is None


@pytest.mark.parametrize(
    "signs, idle",
    [
        ([(5, 1.0, 10.0), (5, 1.1, 40.0)], 30.0),  # the same meeting, and no more work than idle threads take
        ([(5, 1.0, 10.0), (6, 1.1, 30.0), (6, 1.1, 40.0)], 10.0),  # it came to a meeting
        ([(5, 1.0, 10.0), (5, 9.0, 35.0), (5, 9.1, 40.0)], 5.0),  # it computed
        ([(5, 1.0, 10.0), (5, 1.3, 25.0), (5, 1.6, 40.0)], 30.0),
    ],
)
def test_a_worker_is_idle_since_its_last_meeting_or_work(signs, idle):
    progress = Progress(0.0)
    for sign in signs:
        progress.note(*sign)
    assert progress.idle(40.0) == pytest.approx(idle)
    progress.excuse(39.0)
    assert progress.idle(40.0) == pytest.approx(1.0)
