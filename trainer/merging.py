"""Micro-batches and replicas together: which parts of a result add up, and what becomes of the others."""

import tensorflow as tf

from trainer import microstep, probed, stages


def additive(result):
    return [result.gradients, result.sums, result.divisors, result.examples, result.logged, result.products]


def add(totals, result):
    summed = tf.nest.map_structure(tf.add, additive(totals), additive(result))
    report = probed.add(totals.report, result.report) if result.report else ()
    return replace_additive(result, summed)._replace(report=report)


def replace_additive(result, parts):
    return result._replace(**dict(zip(microstep.MicroResult._fields[:6], parts, strict=True)))


def leave_out_empty(result, before):
    """What a share without examples adds: nothing, and it moves nothing. Means over no example are NaN.

    Args:
        result: a `MicroResult` whose `state` is the values after it.
        before: the values before it, in the same order.
    """
    known = tf.get_static_value(result.examples)
    if known is not None and known > 0:
        return result
    present = result.examples > 0
    parts = tf.nest.map_structure(lambda x: tf.where(present, x, tf.zeros_like(x)), additive(result))
    report = tf.nest.map_structure(lambda x: tf.where(present, x, tf.zeros_like(x)), result.report)
    state = [tf.where(present, new, old) for new, old in zip(result.state, before, strict=True)]
    return replace_additive(result, parts)._replace(state=state, report=report)


def merge_replicas(before, after, is_metric, examples, total):
    """New state of several replicas as one. In a replica context; the same values come out on each.

    Statistics are averaged, weighted by the examples each replica saw. A metric's value in a replica is a part of the
    whole: the changes are added up. What is no real number (random states, counters) is that of the first replica.

    Args:
        before: values before the update, equal on all replicas.
        after: this replica's values after it.
        is_metric: [bool], which of them belong to metrics.
        examples: of this replica.
        total: examples of all of them.
    """
    context = tf.distribute.get_replica_context()
    first = tf.equal(context.replica_id_in_sync_group, 0)
    share = tf.math.divide_no_nan(examples, total)
    changes = []
    for old, new, metric in zip(before, after, is_metric, strict=True):
        if not new.dtype.is_floating:
            changes.append(tf.where(first, _as_integers(new), tf.zeros_like(_as_integers(new))))
        elif metric:
            changes.append(new - old)
        else:
            changes.append((new - old) * tf.cast(share, new.dtype))
    summed = stages.all_reduce(changes) if changes else []
    return [
        old + change if old.dtype.is_floating else _from_integers(change, old.dtype)
        for change, old in zip(summed, before, strict=True)
    ]


# Of what is no real number, collective operations add up these; other types travel as one of them.
_INTEGERS = (tf.int32, tf.int64)


def _as_integers(tensor):
    if tensor.dtype == tf.uint32:
        return tf.bitcast(tensor, tf.int32)
    return tensor if tensor.dtype in _INTEGERS else tf.cast(tensor, tf.int64)


def _from_integers(tensor, dtype):
    return tf.bitcast(tensor, dtype) if dtype == tf.uint32 else tf.cast(tensor, dtype)
