"""Micro-batches and replicas together: which parts of a result add up, and what becomes of the others."""

import tensorflow as tf

from looptape.trainer.step.plan import ADDITIVE
from looptape.trainer.step.reports import probe_report


def additive(result):
    """{field: value} of what adds up over micro-batches and replicas, as far as it is there."""
    fields = {field: getattr(result, field) for field in ADDITIVE}
    return {field: value for field, value in fields.items() if value is not None}


def add(totals, result):
    summed = tf.nest.map_structure(tf.add, additive(totals), additive(result))
    report = None if result.report is None else probe_report.add(totals.report, result.report)
    return result._replace(**summed, report=report)


def leave_out_empty(result, before):
    """Lets a share without examples add nothing and move nothing. Means over no examples would be NaN.

    Args:
        result: a `MicroResult` whose `state` is the values after it.
        before: the values before it, in the same order.
    """
    known = tf.get_static_value(result.examples)
    if known is not None and known > 0:
        return result
    present = result.examples > 0
    kept = lambda x: tf.where(present, x, tf.zeros_like(x))  # noqa: E731
    parts = tf.nest.map_structure(kept, additive(result))
    report = None if result.report is None else tf.nest.map_structure(kept, result.report)
    state = [tf.where(present, new, old) for new, old in zip(result.state, before, strict=True)]
    return result._replace(**parts, state=state, report=report)


def changes_of_replica(before, after, is_metric, is_rows, examples):
    """The contribution of a replica to the new state of all, as real numbers to be summed. In a replica context.

    Statistics are averaged, weighted by the examples each replica saw. A metric's value in a replica is a part of the
    whole: the changes are added up. Integers (random states, counters) are those of the first replica.
    Recurrent states have a row for each example: every replica has its own rows, and zeros for the others.

    Args:
        before: values before the update, equal on all replicas.
        after: this replica's values after it.
        is_metric: [bool], which of them belong to metrics.
        is_rows: [bool], which of them are recurrent states.
        examples: of this replica.
    """
    first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
    changes = []
    for old, new, metric, rows in zip(before, after, is_metric, is_rows, strict=True):
        if not new.dtype.is_floating:
            numbers = _as_numbers(new)
            changes.append(numbers if rows else tf.where(first, numbers, tf.zeros_like(numbers)))
        elif rows:
            changes.append(tf.cast(new, _wide(new.dtype)))
        else:
            change = tf.cast(new - old, _wide(new.dtype))
            changes.append(change if metric else change * tf.cast(examples, change.dtype))
    return changes


def merged(before, changes, is_metric, is_rows, total):
    """The new state of all replicas, the same on each, from the sums of their changes.

    Args:
        before: as for `changes_of_replica`.
        changes: the sums of what that gave.
        is_metric: as for `changes_of_replica`.
        is_rows: as for `changes_of_replica`.
        total: examples of all replicas.
    """
    values = []
    for old, change, metric, rows in zip(before, changes, is_metric, is_rows, strict=True):
        if not old.dtype.is_floating:
            values.append(_from_numbers(change, old.dtype))
        elif rows:
            values.append(tf.cast(change, old.dtype))
        else:
            change = change if metric else tf.math.divide_no_nan(change, tf.cast(total, change.dtype))
            values.append(old + tf.cast(change, old.dtype))
    return values


def _wide(dtype):
    return tf.float64 if dtype == tf.float64 else tf.float32


def _as_numbers(tensor):
    """An integer tensor as pieces of 16 bits, each an exact float32, so that it is summed with everything else."""
    tensor = tf.cast(tensor, tf.int32) if tensor.dtype.size < 4 else tensor
    return tf.cast(tf.bitcast(tensor, tf.uint16), tf.float32)


def _from_numbers(numbers, dtype):
    pieces = tf.cast(numbers, tf.uint16)
    return tf.cast(tf.bitcast(pieces, tf.int32), dtype) if dtype.size < 4 else tf.bitcast(pieces, dtype)
