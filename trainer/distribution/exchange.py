"""Arrays sent between workers over connections of their own: each worker is connected to each other one.

TensorFlow's collective operations on the CPU send by gRPC, which copies what it sends eight times. This sends the bytes
of an array as they are, in less than half of the processor's time (`benchmarks.communication`). Workers on one machine
connect by Unix sockets, which cost about two thirds of TCP.
"""

import contextlib
import functools
import os
import secrets
import select
import selectors
import socket
import sys
import time
import weakref

import numpy as np
import tensorflow as tf

from looptape.trainer.distribution import meetings

_PIECE = 1 << 20  # bytes that are given to the system at a time
_BLOCK = 1 << 18  # bytes that are added up as soon as they have come, while the processor still has them in its cache
_BUFFER = 4 << 20  # of the system, for each connection and direction; the system may grant less
_ALIGNMENT = 64  # of arrays that TensorFlow takes over without a copy
_CONNECT_SECONDS = 20.0
# Seconds after which the system drops a connection whose other end does not answer.
_SILENT_SECONDS = 20
_HELLO = 24  # bytes: the rank of who connects, in digits, and the token of whom it connects to
_OPEN: weakref.WeakSet = weakref.WeakSet()  # the exchanges of this process


class Exchange:
    """The connections of one worker to all others. Calls must come in the same order on each worker.

    Args:
        rank: of this worker.
        hosts: the host of each worker, in the order of their ranks.
    """

    def __init__(self, rank, hosts):
        self.rank, self.count, self._hosts = rank, len(hosts), hosts
        self._token, self._name = secrets.token_hex(8), secrets.token_hex(8)
        self._peers: dict = {}
        self._why: str | None = None  # of an abort
        self._buffers = Buffers()
        self._machine = _machine()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listeners = [socket.create_server(("", 0), family=family, backlog=self.count, dualstack_ipv6=both)]
        if self._machine != _UNKNOWN:
            self._listeners.append(socket.socket(socket.AF_UNIX))
            self._listeners[1].bind(_path(self._name))
            self._listeners[1].listen(self.count)
        _OPEN.add(self)

    @property
    def card(self):
        """The address and key that other workers need to connect to this one."""
        return f"{self._listeners[0].getsockname()[1]} {self._token} {self._name} {self._machine}"

    def connect(self, cards, seconds=_CONNECT_SECONDS):
        """Connects to all others, of whom `cards` are. Returns whether that succeeded in time.

        Each connects to those of lower rank; so the first one only listens.
        """
        end = time.monotonic() + seconds
        try:
            for peer in range(self.rank):
                self._peers[peer] = self._reach(peer, cards[peer], end)
            self._accept(max(end, time.monotonic() + 0.1))
        except (OSError, ValueError):
            self.close()
            return False
        finally:
            self._close_listeners()
        for connection in self._peers.values():
            _prepare(connection)
        return True

    def _reach(self, peer, card, end):
        port, token, name, machine = card.split()
        if machine == self._machine != _UNKNOWN:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(max(end - time.monotonic(), 0.1))
            connection.connect(_path(name))
        else:
            connection = socket.create_connection((self._hosts[peer], int(port)), max(end - time.monotonic(), 0.1))
        connection.sendall(f"{self.rank:8d}{token}".encode())
        return connection

    def _accept(self, end):
        """Lets the workers of higher rank in. Whoever else connects, and says nothing, keeps nobody waiting."""
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as strangers:
            for listener in self._listeners:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
            while len(self._peers) < self.count - 1:
                ready = selector.select(max(end - time.monotonic(), 0.0))
                if not ready or time.monotonic() > end:
                    raise TimeoutError("not all workers have connected in time")
                for key, _ in ready:
                    if key.data is not None:
                        self._hear(selector, key.fileobj, key.data)
                        continue
                    with contextlib.suppress(BlockingIOError, ConnectionError):  # gone again
                        connection = key.fileobj.accept()[0]
                        connection.setblocking(False)
                        strangers.callback(self._drop, connection)
                        selector.register(connection, selectors.EVENT_READ, bytearray())

    def _hear(self, selector, connection, hello):
        """Reads more of what somebody says who has connected, until it is a worker's rank and the token, or is not."""
        try:
            piece = connection.recv(_HELLO - len(hello))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        hello += piece
        if piece and len(hello) < _HELLO:
            return
        selector.unregister(connection)
        if hello[8:] == self._token.encode():
            self._peers[int(hello[:8])] = connection
        else:  # somebody else: a scan of ports, a worker of an earlier start
            connection.close()

    def _drop(self, connection):
        if connection not in self._peers.values():
            connection.close()

    def _close_listeners(self):
        for listener in self._listeners:
            listener.close()

    def close(self):
        self._close_listeners()
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.close()
        self._peers = {}

    def abort(self, why):
        """Makes a call that waits for another worker, and any later one, fail. From any thread."""
        self._why = why
        for connection in list(self._peers.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def share(self, size, rank=None):
        """(begin, end) of the part of an array of so many elements that a worker, or this one, adds up."""
        rank = self.rank if rank is None else rank
        return size * rank // self.count, size * (rank + 1) // self.count

    def sum(self, array, factor=None):
        """The sum of an array [size] over all workers, a new array, equal on all of them to the bit.

        With a factor, the sum times that. Each worker multiplies its own share.
        """
        whole = self._buffers.empty(array.shape, array.dtype)
        begin, end = self.share(len(array))
        own, mine = array[begin:end], whole[begin:end]
        block = self._buffers.empty((_BLOCK // array.itemsize,), array.dtype)
        for distance, to, source in self._rounds():
            scale = factor if distance == self.count - 1 else None
            add = functools.partial(_add, own, block, mine, scale)
            first, last = self.share(len(array), to)
            self._swap(to, array[first:last], source, block, own.nbytes, add)
            own = mine
        self._collect(whole)
        return whole

    def sum_small(self, array):
        """As `sum`, of a few numbers: each worker sends all of them to each other one, and adds up all."""
        rows = self._buffers.empty((self.count, len(array)), array.dtype)
        rows[self.rank] = array
        for _, to, source in self._rounds():
            self._swap(to, array, source, rows[source])
        return rows.sum(axis=0, dtype=array.dtype)

    def _rounds(self):
        """(number, whom this worker sends to, whom it receives from): in each round everyone has another partner."""
        for distance in range(1, self.count):
            yield distance, (self.rank + distance) % self.count, (self.rank - distance) % self.count

    def _collect(self, whole):
        """Sends this worker's share of an array to every other one and puts theirs in."""
        begin, end = self.share(len(whole))
        for _, to, source in self._rounds():
            first, last = self.share(len(whole), source)
            self._swap(to, whole[begin:end], source, whole[first:last])

    def scatter(self, array):
        """Sends every other worker its share of an array [size]. Returns this one's share of theirs, [others, share].

        The rows are in the order in which they come: of the worker before this one, of the one before that.
        """
        begin, end = self.share(len(array))
        received = self._buffers.empty((self.count - 1, end - begin), array.dtype)
        for distance, to, source in self._rounds():
            first, last = self.share(len(array), to)
            self._swap(to, array[first:last], source, received[distance - 1])
        return received

    def gather(self, part, size):
        """Sends this worker's share to every other one. Returns the array [size] of all shares."""
        whole = self._buffers.empty((size,), part.dtype)
        begin, end = self.share(size)
        whole[begin:end] = part
        self._collect(whole)
        return whole

    def _swap(self, to, out, source, into, size=None, full=None):
        """Sends one array to a worker while it receives another one.

        Args:
            to: whom it sends to.
            out: the array to be sent.
            source: whom it receives from.
            into: where what comes is put.
            size: bytes that come; as many as `into` has by default. If they are more, it is filled again and again.
            full: called with the bytes received so far, whenever it is full and at the end.
        """
        with meetings.own.one_more():
            self._swap_bytes(to, out, source, into, size, full)

    def _swap_bytes(self, to, out, source, into, size, full):
        sender, receiver = self._peers.get(to), self._peers.get(source)
        out, into = _bytes_of(out), _bytes_of(into)
        size = len(into) if size is None else size
        sent = received = 0
        try:
            if self._why is not None or sender is None or receiver is None:
                raise ConnectionError(self._why or "this worker has closed its connections")
            while sent < len(out) or received < size:
                before = sent + received
                with contextlib.suppress(BlockingIOError):
                    sent += sender.send(out[sent : sent + _PIECE]) if sent < len(out) else 0
                with contextlib.suppress(BlockingIOError):
                    if received < size:
                        place = received % len(into)
                        received += _receive(receiver, into[place : place + size - received])
                        if full is not None and (received == size or received % len(into) == 0):
                            full(received)
                if sent + received == before:
                    _wait(sender if sent < len(out) else None, receiver if received < size else None)
        except (OSError, ValueError) as error:  # a ValueError: closed by this process
            why = self._why or error
            self.abort(str(why))  # those who wait for this worker, and not for the lost one, fail, too
            raise tf.errors.UnavailableError(
                None, None, f"between worker {self.rank} and {to} or {source}: {why}"
            ) from error


class Buffers:
    """Memory for arrays that TensorFlow takes over as they are, used again once nobody has them any more.

    New memory for each sum costs a page fault for every 4 KiB of it.
    """

    def __init__(self):
        self._memories: list = []

    def empty(self, shape, dtype):
        """An array without contents."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        begin, memory = self._memory(size + _ALIGNMENT)
        return memory[begin : begin + size].view(dtype).reshape(shape)

    def _memory(self, size):
        for index in range(len(self._memories)):
            # Two references, the list's and the call's: all arrays in this memory are gone.
            if len(self._memories[index]) == size and sys.getrefcount(self._memories[index]) == 2:
                memory = self._memories[index]
                break
        else:
            memory = np.empty(size, np.uint8)
            self._memories.append(memory)
        return -memory.ctypes.data % _ALIGNMENT, memory


def abort_all(why):
    """Aborts all exchanges of this process: another worker is lost. Returns whether there were any."""
    found = list(_OPEN)
    for exchange in found:
        exchange.abort(why)
    return bool(found)


def possible():
    """Whether this system has what an `Exchange` needs."""
    return hasattr(select, "poll") and hasattr(socket, "MSG_WAITALL")


_UNKNOWN = "-"


def _machine():
    """A name of this machine and its network that no other one has, for Unix sockets; only Linux has one."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return _UNKNOWN


def _path(name):
    return f"\0looptape-{name}"  # the zero: of no file, and gone with the process


def _add(own, block, total, factor, received):
    """Adds what has come to a part of one array and puts it into the same part of another one.

    Args:
        own: the array.
        block: its beginning holds the last of what has come.
        total: where the sum is put; may be `own`.
        factor: of the sum, or None.
        received: bytes that have come in all.
    """
    end = received // own.itemsize
    begin = (end - 1) // len(block) * len(block)
    into = total[begin:end]
    np.add(own[begin:end], block[: end - begin], out=into)
    if factor is not None:
        np.multiply(into, factor, out=into)


def _receive(connection, into):
    count = connection.recv_into(into)
    if count == 0:
        raise ConnectionError("the other worker has closed its connection")
    return count


def _wait(sender, receiver):
    """Waits until one can send or the other has received something, or either is closed."""
    poll = select.poll()
    if sender is receiver:
        poll.register(sender, select.POLLIN | select.POLLOUT)
    else:
        for connection, event in ((sender, select.POLLOUT), (receiver, select.POLLIN)):
            if connection is not None:
                poll.register(connection, event)
    poll.poll()


def _bytes_of(array):
    return memoryview(array.view(np.uint8)) if array.size else memoryview(b"")


def _prepare(connection):
    connection.setblocking(False)
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    options += [(socket.SOL_SOCKET, name, _BUFFER) for name in (socket.SO_SNDBUF, socket.SO_RCVBUF)]
    for name, value in (
        ("TCP_KEEPIDLE", _SILENT_SECONDS // 2),
        ("TCP_KEEPINTVL", _SILENT_SECONDS // 4),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", 1000 * _SILENT_SECONDS),
    ):
        if hasattr(socket, name):  # not on every system
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    for option in options:
        with contextlib.suppress(OSError):
            connection.setsockopt(*option)
