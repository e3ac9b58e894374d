"""Connections between workers, here threads of one process, against NumPy's sums."""

import re
import secrets
import socket
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.distribution import exchange as exchange_module
from looptape.trainer.distribution import replica_sums, workers
from looptape.trainer.distribution.exchange import Buffers, Exchange


def connected(count):
    exchanges = [Exchange(rank, ["localhost"] * count) for rank in range(count)]
    cards = [exchange.card for exchange in exchanges]
    assert together(exchanges, lambda exchange: exchange.connect(cards)) == [True] * count
    return exchanges


def together(exchanges, call):
    """[what the call returns for each exchange], or the error it raises, each in a thread of its own."""
    results = [None] * len(exchanges)

    def run(rank):
        try:
            results[rank] = call(exchanges[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(exchanges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return results


@pytest.fixture(scope="module", params=[2, 3, 4])
def exchanges(request):
    made = connected(request.param)
    yield made
    for exchange in made:
        exchange.close()


@pytest.mark.parametrize("size", [1, 2, 7, 100_003, 1_500_000])  # fewer than workers; not divisible; many pieces
def test_sums_equal_numpy_and_each_other(exchanges, size):
    arrays = np.random.default_rng(size).normal(size=(len(exchanges), size)).astype("float32")
    sums = together(exchanges, lambda exchange: exchange.sum(arrays[exchange.rank]))
    np.testing.assert_allclose(sums[0], arrays.astype("float64").sum(0), rtol=0, atol=1e-5)
    means = together(exchanges, lambda exchange: exchange.sum(arrays[exchange.rank], np.float32(0.3)))
    small = together(exchanges, lambda exchange: exchange.sum_small(arrays[exchange.rank]))
    np.testing.assert_array_equal(means[0], sums[0] * np.float32(0.3))  # whoever multiplies a share
    np.testing.assert_allclose(small[0], sums[0], rtol=0, atol=1e-5)
    for kind in (sums, means, small):
        for other in kind[1:]:
            np.testing.assert_array_equal(other, kind[0])  # the same bits


@pytest.mark.parametrize("wire, roundings", [(None, 0), (tf.bfloat16, 2.0**-8), (tf.float16, 2.0**-11)])
def test_sums_by_type_on_the_wire(exchanges, wire, roundings):
    """Each part and the sum are rounded once: at most that share of the magnitudes. Counts keep every bit."""
    count = len(exchanges)
    rng = np.random.default_rng(5)
    large, small = rng.normal(size=(count, 700, 500)).astype("float32"), rng.normal(size=(count, 9)).astype("float32")
    counts = np.float32(2**24 - 1)

    def work(exchange):  # eager: traced, the waiting workers would share the threads of one process
        sums = replica_sums.ReplicaSums(exchange, wire)
        own = [tf.constant(x[exchange.rank]) for x in (small, large)]
        return sums([own], {"counts": tf.constant(counts if exchange.rank == 0 else np.float32(0))})

    results = together(exchanges, work)
    for [[few, many]], others in results:
        for found, parts in ((few, small), (many, large)):
            limit = 1.01 * roundings * (np.abs(parts).sum(0) + np.abs(parts.sum(0))) + 1e-5
            assert (np.abs(found.numpy() - parts.sum(0)) <= limit).all()
        assert others["counts"].numpy() == counts
        np.testing.assert_array_equal(many, results[0][0][0][1])  # the same bits
    if wire is not None:
        assert np.abs(results[0][0][0][1].numpy() - large.sum(0)).max() > 1e-4  # it was rounded


@pytest.mark.parametrize("wire, relative", [(None, 1e-6), (tf.bfloat16, 2.0**-6), (tf.float16, 2.0**-9)])
def test_sums_of_gradients_are_divided_by_the_counts_of_all(exchanges, wire, relative):
    """Each group by its own; large and small ones; also to numbers that float16 does not have."""
    count = len(exchanges)
    rng = np.random.default_rng(6)
    large, small = (rng.uniform(1, 2, size=(count, *shape)).astype("float32") for shape in ((700, 500), (9,)))

    def work(exchange):
        sums = replica_sums.ReplicaSums(exchange, wire)
        own = [tf.constant(x[exchange.rank]) for x in (small, large)]
        counts = sums.ahead([tf.constant(float(exchange.rank + 1)), tf.constant(2e9)])
        return counts, sums([own, own], {"other": tf.constant(3.0)}, [1.0 / each for each in counts])

    for counts, (groups, others) in together(exchanges, work):
        divisors = [count * (count + 1) / 2, count * 2e9]
        np.testing.assert_array_equal(counts, np.float32(divisors))
        assert others["other"].numpy() == 3.0 * count
        for group, divisor in zip(groups, divisors, strict=True):
            for found, parts in zip(group, (small, large), strict=True):
                np.testing.assert_allclose(found, parts.sum(0) / divisor, rtol=relative)


def test_a_worker_that_is_gone_is_an_error_of_tensorflow():
    exchanges = connected(3)
    exchanges[2].close()
    results = together(exchanges[:2], lambda exchange: exchange.sum(np.ones(10, "float32")))
    assert any(isinstance(each, tf.errors.UnavailableError) for each in results), results
    for exchange in exchanges:
        exchange.close()


def test_all_fail_if_one_is_gone_also_those_that_wait_for_another_one():
    """None of them closes its connections: a program that catches the error lives on."""
    exchanges = connected(4)
    exchanges[3].close()
    results = together(exchanges[:3], lambda exchange: exchange.sum(np.ones(3_000_000, "float32")))
    assert all(isinstance(each, tf.errors.UnavailableError) for each in results), results
    for exchange in exchanges:
        exchange.close()


def test_silent_strangers_keep_nobody_waiting():
    exchanges = [Exchange(rank, ["localhost"] * 2) for rank in range(2)]
    cards = [exchange.card for exchange in exchanges]
    address = "localhost", int(cards[0].split()[0])
    strangers = [socket.create_connection(address) for _ in range(2)]
    begun = time.monotonic()
    assert together(exchanges, lambda exchange: exchange.connect(cards)) == [True, True]
    assert time.monotonic() - begun < 1
    for each in [*strangers, *exchanges]:
        each.close()


def test_who_connects_may_say_who_it_is_in_pieces():
    exchange = Exchange(0, ["localhost"] * 2)
    port, token, *_ = exchange.card.split()
    results = []
    waiting = threading.Thread(target=lambda: results.append(exchange.connect([exchange.card, ""], 5)), daemon=True)
    waiting.start()
    with socket.create_connection(("localhost", int(port))) as peer:
        for piece in ("       1" + token[:2], token[2:]):
            peer.sendall(piece.encode())
            time.sleep(0.2)
        waiting.join(10)
    assert results == [True]
    exchange.close()


def test_strangers_are_not_let_in():
    exchanges = [Exchange(rank, ["localhost"] * 2) for rank in range(2)]
    cards = [exchange.card for exchange in exchanges]
    with socket.create_connection(("localhost", int(cards[0].split()[0]))) as stranger:
        stranger.sendall(b"       1" + b"x" * 16)
        assert together(exchanges, lambda exchange: exchange.connect(cards)) == [True, True]
        arrays = np.arange(10, dtype="float32").reshape(2, 5)
        sums = together(exchanges, lambda exchange: exchange.sum(arrays[exchange.rank]))
    np.testing.assert_array_equal(sums[0], arrays.sum(0))
    for exchange in exchanges:
        exchange.close()


def test_who_cannot_be_reached_is_given_up():
    exchange = Exchange(0, ["localhost"] * 2)
    begun = time.monotonic()
    assert not exchange.connect([exchange.card, "1 nobody nowhere -"], seconds=0.3)
    assert time.monotonic() - begun < 5


def test_buckets_follow_the_backward_pass():
    small, large, other = tf.zeros([10]), tf.zeros([600, 600]), tf.zeros([3], tf.float64)
    assert replica_sums.buckets([small, large, small, other, large]) == [[4], [3], [1], [0, 2]]
    medium = tf.zeros([250_000])  # almost 1 MiB: four fill a bucket
    assert replica_sums.buckets([medium] * 6) == [[2, 3, 4, 5], [0, 1]]


def test_arrays_for_tensorflow_are_aligned_and_their_memory_is_used_again():
    buffers = Buffers()
    made = [buffers.empty((3, 5), kind) for kind in ("float32", "float32", "float16")]
    assert all(array.ctypes.data % 64 == 0 for array in made)
    addresses = {array.ctypes.data for array in made}
    assert len(addresses) == 3  # while somebody has them
    part = made[0][1:]
    kept = made[0].ctypes.data
    del made
    again = [buffers.empty((3, 5), "float32") for _ in range(2)]
    assert kept not in {array.ctypes.data for array in again}, part  # somebody has a part of it
    assert again[0].ctypes.data in addresses


def test_results_that_tensorflow_keeps_are_not_overwritten():
    exchanges = connected(2)
    kept = []
    for number in range(4):
        arrays = np.full((2, 300_000), number, "float32")
        # As TensorFlow takes over what a `numpy_function` returns, without a copy.
        results = together(exchanges, lambda e, a=arrays: tf.numpy_function(e.sum, [a[e.rank]], tf.float32))
        kept.append(results[0])
    assert [float(tf.reduce_max(tf.abs(sums - 2.0 * number))) for number, sums in enumerate(kept)] == [0.0] * 4
    for exchange in exchanges:
        exchange.close()


def test_workers_of_different_machines_connect_by_tcp(monkeypatch):
    arrays = np.random.default_rng(0).normal(size=(3, 100_003)).astype("float32")
    families = {}
    for machine in ("one", None):
        if machine is None:
            monkeypatch.setattr(exchange_module, "_machine", lambda: secrets.token_hex(4))
        exchanges = connected(3)
        families[machine] = {peer.family for exchange in exchanges for peer in exchange._peers.values()}
        [first, *_] = sums = together(exchanges, lambda exchange: exchange.sum(arrays[exchange.rank]))
        np.testing.assert_allclose(first, arrays.sum(0), atol=1e-5)
        assert all((each == first).all() for each in sums)
        for exchange in exchanges:
            exchange.close()
    assert socket.AF_UNIX not in families[None]
    assert families["one"] == {socket.AF_UNIX} or sys.platform != "linux"


@pytest.mark.parametrize("of", ["this process", "the other"])
def test_a_wait_for_another_worker_can_be_aborted(of):
    exchanges = connected(2)
    results = []
    waiting = threading.Thread(
        target=lambda: results.extend(together(exchanges[:1], lambda e: e.sum(np.ones(10, "float32")))), daemon=True
    )
    waiting.start()
    time.sleep(0.2)
    assert not results
    if of == "this process":
        assert exchange_module.abort_all("worker 1 is silent")
    else:
        exchanges[1].close()
    waiting.join(5)
    [error] = results
    assert isinstance(error, tf.errors.UnavailableError)
    words = "worker 1 is silent" if of == "this process" else "closed its connection|Connection reset"
    assert re.search(words, str(error)), error
    for exchange in exchanges:
        exchange.close()


@pytest.mark.parametrize(
    "settings, message",
    [
        (("auto", "int8"), r"`communication_dtype` is 'int8'; it must be None or one of \['bfloat16'"),
        (("gloo", None), r"`communication` is 'gloo'; it must be one of \['auto', 'connections', 'tensorflow'\]"),
    ],
)
def test_unknown_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replica_sums.between(workers.Alone(), *settings)


class Several(workers.Alone):
    """Worker 0 of two, whose other one answers as is set."""

    count, name, hosts = 2, "worker 0 of 2 (a:1)", ["localhost"] * 2

    def __init__(self, on_one_cpu_each=True, heard=True, answer=1):
        self.on_one_cpu_each, self._heard, self._answer, self.asked = on_one_cpu_each, heard, answer, 0

    def heard(self):
        return self._heard

    def share(self, numbers):
        self.asked += 1
        return np.array([numbers, [self._answer] * len(numbers)], np.int64)

    def share_texts(self, text):
        return [text, "1 nobody nowhere -"]


@pytest.mark.parametrize("choice", [{"on_one_cpu_each": False}, {"heard": False}, {"answer": 0}])
def test_workers_choose_together_and_tensorflow_sends_where_connections_are_not_safe(choice):
    sums = replica_sums.between(Several(**choice))
    assert sums.variables == []  # nothing of an exchange
    if choice != {"heard": False}:  # asked for, connections need no heartbeat
        with pytest.raises(ValueError, match="`communication` is 'connections', but not all workers have one CPU each"):
            replica_sums.between(Several(**choice), "connections")


def test_workers_that_cannot_connect_say_so(monkeypatch):
    monkeypatch.setattr(Exchange, "connect", lambda self, cards: False)
    with pytest.warns(UserWarning, match="not all workers could connect to each other by TCP, so gradients travel by"):
        assert replica_sums.between(Several()).variables == []
    match = "`communication_dtype` is 'bfloat16', but the workers could not connect to each other"
    with pytest.raises(ValueError, match=match), pytest.warns(UserWarning):
        replica_sums.between(Several(), dtype="bfloat16")
