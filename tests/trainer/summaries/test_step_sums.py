"""Running sums: means over updates, several calls of one minimizer, and what `log` adds, against NumPy."""

import types

import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.step.forward.forward_state import Tracing
from looptape.trainer.step.reports.packed_row import pack
from looptape.trainer.summaries.step_sums import Ledger

FIRST, SECOND = (types.SimpleNamespace(names=["error"], last=None) for _ in range(2))


def row(loss, examples, logged=(), norm=1.0):
    """The vector of an update of so many examples with this mean loss."""
    logged = [tf.constant(value * examples) for value in logged]
    result = types.SimpleNamespace(
        sums=[tf.constant(loss * examples)],
        divisors=[tf.constant(examples)],
        logged=logged,
        examples=tf.constant(examples),
    )
    return pack(result, tf.constant(loss), tf.constant(norm), None)


def ledger():
    tracing = Tracing()
    return tracing, Ledger(lambda value, name: tf.Variable(value, name=name), tracing)


def update(tracing, sums, rows, extra=None, examples=None, wait=0.0):
    with tracing.update():
        sums.waited(tf.constant(wait))
        for minimizer, numbers in rows:
            sums.record(minimizer, numbers, ["size"] if len(numbers) > 5 else [], False)
        sums.commit(extra, examples)


def test_means_over_updates_are_weighted_by_examples():
    tracing, sums = ledger()
    losses, examples, sizes = np.array([1.0, 2.0, 4.0]), np.array([8.0, 8.0, 2.0]), np.array([3.0, 5.0, 7.0])
    for loss, count, size in zip(*(x.tolist() for x in (losses, examples, sizes)), strict=True):
        update(tracing, sums, [(FIRST, row(loss, count, [size], norm=loss))], wait=0.5)
        sums.receive(sums.drain())
    window = sums.take()
    assert (window.updates, window.seconds_waited, window.examples) == (3, 1.5, 18.0)
    [(minimizer, means)] = window.parts()
    assert minimizer is FIRST and means["norm"] == pytest.approx(losses.mean())
    assert means["loss"]["error"] == pytest.approx((losses * examples).sum() / examples.sum())
    assert means["logged"]["size"] == pytest.approx((sizes * examples).sum() / examples.sum())
    assert sums.take().updates == 0 and not sums.take().parts()  # each sum is taken once


def test_several_calls_of_a_minimizer_are_one_mean_and_logs_of_a_step_stand_beside_them():
    tracing, sums = ledger()
    rows = [(FIRST, row(1.0, 4.0)), (SECOND, row(10.0, 4.0)), (FIRST, row(3.0, 4.0))]
    update(tracing, sums, rows, {"reward": tf.constant([2.0, 4.0])})
    sums.receive(sums.drain())
    found = {id(minimizer): means for minimizer, means in sums.take().parts()}
    assert found[id(FIRST)]["loss"] == {"error": 2.0} and found[id(SECOND)]["loss"] == {"error": 10.0}
    assert found[id(None)]["logged"] == {"reward": 3.0}


def test_windows_add_up_and_begin_anew():
    tracing, sums = ledger()
    update(tracing, sums, [(FIRST, row(1.0, 4.0))])
    total = sums.window()
    for _ in range(2):
        sums.receive(sums.sums)
        total.add(sums.take())
    assert total.updates == 2
    total.clear()
    assert total.updates == 0


def test_names_must_not_change():
    tracing, sums = ledger()
    update(tracing, sums, [(FIRST, row(1.0, 4.0))])
    with pytest.raises(ValueError, match=r"reported \[\['error'\], \['reward'\]\], an earlier one \[\['error'\]\]"):
        update(tracing, sums, [(FIRST, row(1.0, 4.0))], {"reward": tf.constant(2.0)})
