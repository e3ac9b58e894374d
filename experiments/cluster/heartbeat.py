"""Heartbeats among all workers, which detect a network cut between any two of them and a worker that hangs.

TensorFlow's own heartbeats go from each worker to the first one. Two workers that both reach the first one but not each
other wait in a collective operation until TCP gives up, after fifteen minutes.
"""

import contextlib
import secrets
import socket
import sys
import threading
import time

from looptape.experiments.cluster import environment
from looptape.experiments.launch.options import Refused
from looptape.trainer.distribution import meetings

# Seconds of silence after which a worker counts as lost; LOOPTAPE_HEARTBEAT_SECONDS says otherwise, 0 turns it off.
SECONDS = 20.0
# Seconds after which a worker counts as hanging that answers, but for which others wait while it does nothing;
# LOOPTAPE_HANG_SECONDS says otherwise, 0 turns it off. Long enough for a slow file system.
HANG_SECONDS = 120.0
_BEATS = 10  # in this time
_ALIVE, _BYE = b"alive", b"bye"


class Heartbeat:
    """Sends a datagram to every other worker periodically, and listens for theirs, in a thread.

    A worker counts as lost if it was heard before and then falls silent. A worker that was never heard (because of a
    firewall) only causes a warning on standard error.

    Args:
        rank: rank of this worker.
        hosts: the host of each worker, in the order of their ranks.
        seconds: seconds of silence after which a worker is lost.
        lost: function that receives the silent ranks; called once, in the thread.
        hang_seconds: seconds that this worker waits for one that answers, but neither comes nor uses the processor
            (see `meetings`); 0 for any time. It is named on standard error before, after `seconds`.
        hanging: function that receives the ranks of such workers; called once, in the thread.
        own: the `Meetings` of this process.
    """

    def __init__(self, rank, hosts, seconds, lost, hang_seconds=0.0, hanging=None, own=meetings.own):
        self._rank, self._hosts, self._seconds, self._lost = rank, hosts, seconds, lost
        self._hang_seconds, self._hanging, self._own = hang_seconds, hanging, own
        self._named = -1  # the meeting for which late workers were named
        self._token = secrets.token_hex(8).encode()
        self._socket = socket.socket(_family(hosts), socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self._socket.settimeout(seconds / _BEATS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="looptape heartbeat", daemon=True)

    @property
    def card(self):
        """The port and token that the other workers need to hear this one."""
        return f"{self._socket.getsockname()[1]} {self._token.decode()}"

    def start(self, cards):
        """Starts sending and listening. `cards` are those of all workers, in the order of their ranks."""
        self._addresses, self._ranks = {}, {}
        for rank, (host, card) in enumerate(zip(self._hosts, cards, strict=True)):
            if rank != self._rank:
                port, token = card.split()
                self._addresses[rank] = _resolved(host, int(port), self._socket.family)
                self._ranks[token.encode()] = rank
        self._heard = dict.fromkeys(self._addresses, None)  # when each of the others was
        self._progress = {rank: meetings.Progress(time.monotonic()) for rank in self._addresses}
        self._thread.start()

    def hears_all(self, seconds):
        """Waits at most so many seconds for a first sign of every other worker. Returns whether all were heard."""
        end = time.monotonic() + seconds
        while None in self._heard.values() and time.monotonic() < end:
            time.sleep(0.05)
        return None not in self._heard.values()

    def close(self):
        """Stops, and tells the others that this worker leaves normally."""
        self._ended.set()
        for _ in range(3):  # a datagram may get lost
            self._send(_BYE)

    def _send(self, word):
        for rank, address in self._addresses.items():
            self._send_to(rank, address, self._token + b" " + word)

    def _send_to(self, rank, address, message):
        with contextlib.suppress(OSError):  # unreachable at present: its silence will tell
            self._socket.sendto(message, address)

    def _run(self):
        begun = last = sent = time.monotonic()
        self._send(self._sign())
        while not self._ended.is_set():
            with contextlib.suppress(OSError):  # nothing came
                self._receive(self._socket.recv(64))
            now = time.monotonic()
            if now - sent >= self._seconds / _BEATS:
                self._send(self._sign())
                sent = now
            if now - last > self._seconds / 2:  # it was this process that slept: nobody else's silence
                self._heard = {rank: now if heard else None for rank, heard in self._heard.items()}
                for progress in self._progress.values():
                    progress.excuse(now)
            last = now
            silent = [rank for rank, heard in self._heard.items() if heard and now - heard > self._seconds]
            if silent:
                self._ended.set()
                self._lost(silent)
            elif self._own.waited() > self._seconds:
                self._look_for_late_ones(now)
            if begun is not None and now - begun > self._seconds:
                self._mention_unheard()
                begun = None

    def _receive(self, message):
        token, _, word = message.partition(b" ")
        rank = self._ranks.get(token)
        if rank not in self._heard:
            return
        if word == _BYE:
            del self._heard[rank]
        else:
            self._heard[rank] = now = time.monotonic()
            with contextlib.suppress(ValueError):  # a sign without numbers
                count, cpu = word.split()[1:]
                self._progress[rank].note(int(count), float(cpu), now)

    def _sign(self):
        return _ALIVE + b" %d %.2f" % (self._own.count, time.process_time())

    def _look_for_late_ones(self, now):
        """Names the workers that this one waits for, and gives those up that do nothing for long."""
        count, waited = self._own.count, self._own.waited()
        counts = {rank: self._progress[rank].count for rank, heard in self._heard.items() if heard}
        late = [rank for rank, each in counts.items() if 0 <= each == min(counts.values()) < count]
        if not late or not waited:
            return
        if self._named != count:
            self._named = count
            limit = f"; it gives up after {self._hang_seconds:.0f} s without a sign of work" * bool(self._hang_seconds)
            print(
                f"worker {self._rank} has waited {waited:.0f} s for workers {late}, which are alive but late{limit}.",
                file=sys.stderr,
                flush=True,
            )
        idle = min(self._progress[rank].idle(now) for rank in late)
        if self._hang_seconds and min(idle, waited) > self._hang_seconds:
            self._ended.set()
            self._hanging(late)

    def _mention_unheard(self):
        unheard = [rank for rank, heard in self._heard.items() if heard is None]
        if unheard:
            print(
                f"worker {self._rank} hears no heartbeat of workers {unheard}: their datagrams do not arrive. Only TCP "
                "will detect a cut between them, after minutes. Allow UDP between the workers.",
                file=sys.stderr,
                flush=True,
            )


def _family(hosts):
    """Returns IPv4 if all hosts have an IPv4 address, else IPv6."""
    try:
        for host in hosts:
            socket.getaddrinfo(host, None, socket.AF_INET)
    except OSError:
        return socket.AF_INET6
    return socket.AF_INET


def _resolved(host, port, family):
    return socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0][4]


def begin(workers, hosts, leave):
    """Starts the heartbeat of a worker and returns it, or None if there are no other workers. A collective call.

    Args:
        workers: the `Workers`.
        hosts: the hosts of all workers, in the order of their ranks.
        leave: function that receives a sentence and ends the process.
    """
    seconds = environment.seconds("LOOPTAPE_HEARTBEAT_SECONDS", SECONDS)
    hang_seconds = environment.seconds("LOOPTAPE_HANG_SECONDS", HANG_SECONDS)
    if workers.count == 1:
        return None
    settings = workers.share_texts(f"LOOPTAPE_HEARTBEAT_SECONDS={seconds:g} LOOPTAPE_HANG_SECONDS={hang_seconds:g}")
    for rank, setting in enumerate(settings):
        if setting != settings[0]:
            raise Refused(
                f"The workers were started with different limits: worker 0 has {settings[0]}, worker {rank} has "
                f"{setting}. Start all workers with the same environment."
            )
    if seconds == 0:
        return None

    def lost(ranks):
        leave(
            f"{workers.name} has heard nothing from workers {ranks} for {seconds:.0f} s: they hang, or the network "
            "between them and this one is cut. Start all workers again with the same command: they resume from the "
            "newest checkpoint."
        )

    def hanging(ranks):
        leave(
            f"{workers.name} has waited for workers {ranks} for {hang_seconds:.0f} s, in which they answered but did "
            "nothing: they hang, for example in a data function or a file system. Start all workers again with the "
            "same command: they resume from the newest checkpoint. LOOPTAPE_HANG_SECONDS sets the limit, 0 for none."
        )

    heartbeat = Heartbeat(workers.rank, hosts, seconds, lost, hang_seconds, hanging)
    heartbeat.start(workers.share_texts(heartbeat.card))
    return heartbeat
