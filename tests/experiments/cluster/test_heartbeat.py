"""Heartbeats among three workers, in one process, with a network that can be cut."""

import re
import socket
import time

import pytest

from looptape.experiments.cluster import heartbeat
from looptape.experiments.cluster.heartbeat import Heartbeat
from looptape.experiments.launch.options import Refused
from looptape.trainer.distribution import meetings

SECONDS = 0.5


class Network:
    """Three workers on loopback; datagrams between ranks in `cut` are dropped."""

    def __init__(self):
        self.cut, self.lost = set(), {}
        network = self

        class Cuttable(Heartbeat):
            def _send_to(self, rank, address, message):
                if frozenset((self._rank, rank)) not in network.cut:
                    super()._send_to(rank, address, message)

        def note(rank):
            return lambda ranks: self.lost.setdefault(rank, (ranks, time.monotonic()))

        self.workers = [Cuttable(rank, ["localhost"] * 3, SECONDS, note(rank)) for rank in range(3)]

    def start(self):
        for worker in self.workers:
            worker.start([each.card for each in self.workers])

    def wait(self, count, seconds=5.0):
        end = time.monotonic() + seconds
        while len(self.lost) < count and time.monotonic() < end:
            time.sleep(0.02)


@pytest.fixture
def network():
    made = Network()
    yield made
    for worker in made.workers:
        worker._ended.set()
        if worker._thread.is_alive():
            worker._thread.join()
        worker._socket.close()


def test_a_cut_between_two_workers_is_noticed_by_both_and_by_no_other(network):
    network.start()
    time.sleep(SECONDS)
    assert not network.lost
    begun = time.monotonic()
    network.cut.add(frozenset((1, 2)))
    network.wait(2)
    assert {rank: ranks for rank, (ranks, _) in network.lost.items()} == {1: [2], 2: [1]}
    assert all(SECONDS / 2 < when - begun < 4 * SECONDS for _, when in network.lost.values())


def test_a_worker_that_hangs_is_noticed_by_all(network):
    network.start()
    time.sleep(SECONDS / 2)
    network.workers[1]._ended.set()  # its thread ends without a word
    network.wait(2)
    assert {rank: ranks for rank, (ranks, _) in network.lost.items()} == {0: [1], 2: [1]}


class Waiting(meetings.Meetings):
    """A process at a meeting of a number, which waits or has not come to wait."""

    def __init__(self, count, waits):
        super().__init__()
        self.count, self._since = count, time.monotonic() if waits else None


@pytest.mark.parametrize("works", [False, True])
def test_a_worker_that_answers_but_neither_comes_nor_works_is_given_up_by_those_that_wait(works, network, capsys):
    """The first two are at their seventh meeting, and the third one still at the sixth."""
    gone, processor = {}, [0.0]
    for rank, worker in enumerate(network.workers):
        worker._own = Waiting(7 if rank < 2 else 6, waits=rank < 2)
        worker._hang_seconds, worker._hanging = 2 * SECONDS, lambda ranks, rank=rank: gone.setdefault(rank, ranks)

    def sign():
        processor[0] += 1.0 if works else 0.001
        return b"alive 6 %.3f" % processor[0]

    network.workers[2]._sign = sign
    network.start()
    time.sleep(1.5 * SECONDS)
    assert not gone
    end = time.monotonic() + (3 * SECONDS if works else 5.0)
    while len(gone) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert gone == ({} if works else {0: [2], 1: [2]}) and not network.lost
    told = capsys.readouterr().err
    for rank in (0, 1):
        match = rf"worker {rank} has waited \d s for workers \[2\], which are alive but late; it gives up after 1 s"
        assert len(re.findall(match, told)) == 1, told
    assert "worker 2 has waited" not in told


def test_nobody_is_late_while_all_wait_at_one_meeting(network, capsys):
    for worker in network.workers:
        worker._own, worker._hang_seconds, worker._hanging = Waiting(7, waits=True), 0.1, network.lost.setdefault
    network.start()
    time.sleep(3 * SECONDS)
    assert not network.lost and "late" not in capsys.readouterr().err


def test_a_worker_that_leaves_in_order_is_not_missed(network):
    network.start()
    time.sleep(SECONDS / 2)
    network.workers[2].close()
    time.sleep(3 * SECONDS)
    assert not network.lost


def test_where_datagrams_never_come_through_nobody_is_lost(network, capsys):
    network.cut.add(frozenset((0, 1)))
    network.start()
    time.sleep(3 * SECONDS)
    assert not network.lost
    told = capsys.readouterr().err
    assert "worker 0 hears no heartbeat of workers [1]: their datagrams do not arrive" in told
    assert "worker 2" not in told


def test_strangers_are_not_heard(network):
    network.start()
    time.sleep(SECONDS / 2)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        port = int(network.workers[0].card.split()[0])
        for message in (b"", b"bye", b"0123456789abcdef bye", b"\xff" * 64):
            stranger.sendto(message, ("localhost", port))
    network.cut.add(frozenset((0, 1)))
    network.wait(2)
    assert network.lost[0][0] == [1]


def test_a_sentence_and_an_exit(monkeypatch):
    class Two:
        count, rank, name = 2, 0, "worker 0 of 2 (a:1)"

        def share_texts(self, text):
            return [text, text if "=" in text else f"{silent.getsockname()[1]} 00ff"]

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("localhost", 0))
        monkeypatch.setenv("LOOPTAPE_HEARTBEAT_SECONDS", "0")
        assert heartbeat.begin(Two(), ["localhost"] * 2, None) is None
        monkeypatch.setenv("LOOPTAPE_HEARTBEAT_SECONDS", "0.3")
        left = []
        made = heartbeat.begin(Two(), ["localhost"] * 2, left.append)
        silent.sendto(b"00ff alive", ("localhost", int(made.card.split()[0])))
        made._thread.join(5)
        made._socket.close()
    [told] = left
    assert told.startswith("worker 0 of 2 (a:1) has heard nothing from workers [1] for 0 s: they hang, or the network")
    assert "Start all workers again with the same command" in told


def test_workers_with_other_limits_are_refused():
    class Two:
        count, rank, name = 2, 0, "worker 0 of 2 (a:1)"

        def share_texts(self, text):
            return [text, text.replace("HEARTBEAT_SECONDS=20", "HEARTBEAT_SECONDS=0")]

    match = r"worker 0 has LOOPTAPE_HEARTBEAT_SECONDS=20 .*, worker 1 has LOOPTAPE_HEARTBEAT_SECONDS=0 .* Start all"
    with pytest.raises(Refused, match=match):
        heartbeat.begin(Two(), ["localhost"] * 2, None)
