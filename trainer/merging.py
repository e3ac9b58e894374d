"""Micro-batches and replicas together: which parts of a result add up, and what becomes of the others."""

import tensorflow as tf

from trainer import microstep, probed
from trainer.state import is_seed


def additive(result):
    return [result.gradients, result.sums, result.divisors, result.examples, result.logged, result.products]


def add(totals, result):
    summed = tf.nest.map_structure(tf.add, additive(totals), additive(result))
    report = probed.add(totals.report, result.report) if result.report else ()
    return replace_additive(result, summed)._replace(report=report)


def replace_additive(result, parts):
    return result._replace(**dict(zip(microstep.MicroResult._fields[:6], parts, strict=True)))


def replace_empty(result, moved, before):
    """A replica without examples has moved nothing: statistics of an empty batch are NaN."""
    present = result.examples > 0
    state = [tf.where(present, after, before[id(v)]) for v, after in zip(moved, result.state, strict=True)]
    return result._replace(state=state)


def merge_replicas(variable, before, after, is_metric):
    """New state of several replicas as one: statistics are averaged, seeds are equal; of metrics the sum of changes.

    A metric's value in a replica is a part of the whole, so only its change means something there.
    """
    context = tf.distribute.get_replica_context()
    if is_seed(variable) or not after.dtype.is_floating:
        return after
    if is_metric:
        return context.all_reduce(tf.distribute.ReduceOp.SUM, after - before)
    return context.all_reduce(tf.distribute.ReduceOp.SUM, after) / context.num_replicas_in_sync
