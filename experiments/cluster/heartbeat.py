"""Heartbeats among all workers, which detect a network cut between any two of them and a worker that hangs.

TensorFlow's own heartbeats go from each worker to the first one. Two workers that both reach the first one but not each
other wait in a collective operation until TCP gives up, after fifteen minutes.
"""

import contextlib
import os
import secrets
import socket
import sys
import threading
import time

# Seconds of silence after which a worker counts as lost; LOOPTAPE_HEARTBEAT_SECONDS says otherwise, 0 turns it off.
SECONDS = 20.0
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
    """

    def __init__(self, rank, hosts, seconds, lost):
        self._rank, self._hosts, self._seconds, self._lost = rank, hosts, seconds, lost
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
        self._send(_ALIVE)
        while not self._ended.is_set():
            with contextlib.suppress(OSError):  # nothing came
                self._receive(self._socket.recv(64))
            now = time.monotonic()
            if now - sent >= self._seconds / _BEATS:
                self._send(_ALIVE)
                sent = now
            if now - last > self._seconds / 2:  # it was this process that slept: nobody else's silence
                self._heard = {rank: now if heard else None for rank, heard in self._heard.items()}
            last = now
            silent = [rank for rank, heard in self._heard.items() if heard and now - heard > self._seconds]
            if silent:
                self._ended.set()
                self._lost(silent)
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
            self._heard[rank] = time.monotonic()

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
    seconds = float(os.environ.get("LOOPTAPE_HEARTBEAT_SECONDS", SECONDS))
    if workers.count == 1 or seconds <= 0:
        return None

    def lost(ranks):
        leave(
            f"{workers.name} has heard nothing from workers {ranks} for {seconds:.0f} s: they hang, or the network "
            "between them and this one is cut. Start all workers again with the same command: they resume from the "
            "newest checkpoint."
        )

    heartbeat = Heartbeat(workers.rank, hosts, seconds, lost)
    heartbeat.start(workers.share_texts(heartbeat.card))
    return heartbeat
