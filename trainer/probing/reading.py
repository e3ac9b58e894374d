"""Turns the gradients of a session's sources into its report: one function for loops, one for `probe` calls."""

import math

import numpy as np
import tensorflow as tf

from looptape.trainer.probing import errors, probe_calls, quantities, report, taps


def read_loop(record, gradients, factor, scale, full):
    """{layer: {quantity: per-example values}} of one run of a loop: the layer, its inner cells, the probes in
    its steps.

    Args:
        record: `LoopRecord`.
        gradients: {key: gradient or None} of its sources.
        factor: what norms per example are multiplied by.
        scale: what gradients of weights are divided by.
    """
    if not record.is_reached(gradients):
        errors.raise_no_gradient(record.name)
    gradients = record.translate(gradients)
    found = {
        group.name: {
            **quantities.examples(record, group, gradients, factor, full),
            **quantities.weights(record, group, gradients, 1.0 / scale),
        }
        for group in record.groups
    }
    if len(found) > 1:
        names = [name.removeprefix(f"{record.name}/") for name in found]
        found = {record.name: merge_cells(list(found.values()), names), **found}
    for name, (label, batched) in record.probes.items():
        gradient = gradients[f"probe/{name}"]
        found[label] = _read_loop_probe(record, gradient, batched, factor, scale, full)
    return found


def _read_loop_probe(record, gradient, batched, factor, scale, full):
    if not batched:
        return {"weight": gradient[:, 0] / tf.cast(scale, tf.float32)}
    ordered = None if record.valid is None else quantities.in_input_time(record, record.valid)
    found = examples_of(gradient, ordered, factor)
    if full:
        found["state_gradient/0"] = quantities.swap(tf.cast(gradient, tf.float32)) * tf.cast(factor, tf.float32)
    return found


def examples_of(gradient, valid, factor):
    """Per-example values of one probed tensor from its gradient [time, batch, ...]; `valid` is [time, batch]
    or None.
    """
    norms = tf.cast(tf.sqrt(taps.row_squares(gradient, 2)) * tf.cast(factor, tf.float64), tf.float32)
    valid = tf.ones_like(norms, tf.bool) if valid is None else valid
    zeros = taps.row_zeros(gradient, 2)
    size = tf.cast(tf.reduce_prod(tf.shape(gradient)[2:]), tf.float32)
    found = {
        "state": tf.where(valid, norms, float("nan")),
        "valid": valid,
        "zeros": tf.where(valid, zeros, 0.0),
        "elements": tf.where(valid, size, 0.0),
    }
    return {name: tf.transpose(value) for name, value in found.items()}


def merge_cells(groups, names):
    """The report of a stack of cells as a whole from those of its cells, bottom first."""

    def root_sum(name):
        squares = [tf.square(tf.cast(group[name], tf.float64)) for group in groups if name in group]
        return tf.cast(tf.sqrt(tf.add_n(squares)), tf.float32)

    present = {name for group in groups for name in group}
    merged = {name: root_sum(name) for name in ("state", "hidden", "cell", "recurrent", "cut_off") if name in present}
    merged["gain"] = merged["recurrent"] / merged["state"]
    merged["external"], merged["valid"] = groups[-1]["external"], groups[0]["valid"]
    if "input" in groups[0]:
        merged["input"] = groups[0]["input"]
    for name in ("zeros", "elements"):
        merged[name] = tf.add_n([group[name] for group in groups])
    for group, cell in zip(groups, names, strict=True):
        for name, value in group.items():
            kind, slash, rest = name.partition("/")
            if slash:
                merged[f"{kind}/{cell}/{rest}"] = value
    return merged


def read_probe(record, gradients, factor, scale, full):
    """{quantity: per-example values} of the `probe` calls of one name.

    Args:
        record: `ProbeRecord`.
        gradients: {t or key: gradient or None}.
    """
    _require(record, gradients)
    if "table" not in record.sources:
        return _read_visits(record, gradients, factor, scale, full)
    if record.batched and "examples" not in record.sources:
        errors.raise_no_examples(record.name)
    sums = read_table(record, gradients, factor, scale)
    found = {name: sums[name] for name in ("visits", "beyond", "zeros", "elements")}
    if not record.batched:
        found["weight"] = tf.cast(tf.sqrt(sums["weight"]), tf.float32)
    else:
        norms = _with_visits(record, gradients, "examples") * tf.cast(factor, tf.float32)
        valid = tf.broadcast_to(found["visits"][:, tf.newaxis] > 0, tf.shape(norms))
        found["state"] = tf.transpose(tf.where(valid, norms, float("nan")))
        found["valid"] = tf.transpose(valid)
    if full:
        whole = tf.cast(_with_visits(record, gradients, "full"), tf.float32)
        if record.batched:
            found["state_gradient/0"] = quantities.swap(whole) * tf.cast(factor, tf.float32)
        else:
            found["weight_gradient"] = whole / tf.cast(scale, tf.float32)
    return found


def read_table(record, gradients, factor, scale):
    """The totals of a probed name, see `report.totals`."""
    _require(record, gradients)
    if "table" not in record.sources:
        return report.totals({"": _read_visits(record, gradients, factor, scale, False)})[""]
    table = _with_visits(record, gradients, "table", rows=record.rows)
    columns = dict(zip(probe_calls.COLUMNS, tf.unstack(table[: record.cells], axis=1), strict=True))
    sums = {"parts": tf.ones([]), "visits": columns["visits"], "beyond": table[record.cells :, 0]}
    sums |= {name: tf.reduce_sum(columns[name]) for name in ("zeros", "elements", "nonfinite")}
    if record.batched:
        return sums | {
            "state": columns["value"] * tf.cast(factor, tf.float32),
            "examples": columns["examples"],
        }
    return sums | {"weight": tf.square(tf.cast(columns["value"], tf.float64) / tf.cast(scale, tf.float64))}


def whole_gradient(record, gradients):
    """All of the gradient of a probed name, [time, batch, ...], or None if it was not kept or nothing
    arrived.
    """
    if all(gradient is None for gradient in gradients.values()):
        return None
    if "table" not in record.sources:
        return _stack_visits(record, gradients)[0]
    return _with_visits(record, gradients, "full") if "full" in record.sources else None


def _require(record, gradients):
    if all(gradient is None for gradient in gradients.values()):
        errors.raise_no_gradient(record.name)


def _stack_visits(record, gradients):
    """[time, ...] gradients of time steps that Python knows all of, and [time], 1 where there was one."""
    visited = [0.0] * math.prod(record.shape)
    rows = [None] * len(visited)
    for t, source in record.visits.items():
        # Some other time step has a gradient: this one is cut off by no accident, no loss depends on it.
        gradient = tf.zeros_like(source) if gradients[t] is None else tf.convert_to_tensor(gradients[t])
        position = int(np.ravel_multi_index(t, record.shape))
        rows[position], visited[position] = gradient, 1.0
    like = next(row for row in rows if row is not None)
    return tf.stack([tf.zeros_like(like) if row is None else row for row in rows]), tf.constant(visited)


def _read_visits(record, gradients, factor, scale, full):
    stacked, visits = _stack_visits(record, gradients)
    if not record.batched:
        found = {"visits": visits, "weight": taps.row_norms(stacked, 1) / tf.cast(scale, tf.float32)}
        return found | ({"weight_gradient": stacked / tf.cast(scale, stacked.dtype)} if full else {})
    valid = tf.broadcast_to(visits[:, tf.newaxis] > 0, tf.shape(stacked)[:2])
    found = {"visits": visits, **examples_of(stacked, valid, factor)}
    if full:
        found["state_gradient/0"] = quantities.swap(tf.cast(stacked, tf.float32)) * tf.cast(factor, tf.float32)
    return found


def _with_visits(record, gradients, key, rows=None):
    """The gradient of a table with the time steps that Python knew put in."""
    source = record.sources[key]
    table = tf.zeros_like(source) if gradients[key] is None else gradients[key]
    for t in record.visits:
        if gradients[t] is not None:
            update = probe_calls.update(key, tf.convert_to_tensor(gradients[t]), record.batched)
            table = tf.tensor_scatter_nd_add(table, [[record.row(t)]], tf.cast(update, table.dtype)[tf.newaxis])
    return table if rows else table[: record.cells]


def check_sums(found, variables, variable_gradients):
    """{variable path: ‖Σ_t G_t − dL/dW‖ / ‖dL/dW‖}, see `ProbeSession.sum_check`. `found`: [(record, gradients)]."""
    sums = {}
    for record, gradients in found:
        gradients = record.translate(gradients)
        for index, variable in enumerate(record.variables):
            total = tf.reduce_sum(tf.cast(gradients[f"weight/{index}"], tf.float64), axis=0)
            sums[id(variable)] = sums.get(id(variable), 0.0) + total
    deviations = {}
    for variable, gradient in zip(variables, variable_gradients, strict=True):
        if id(variable) in sums and gradient is not None:
            gradient = tf.cast(tf.convert_to_tensor(gradient), tf.float64)
            deviations[variable.path] = tf.norm(sums[id(variable)] - gradient) / tf.norm(gradient)
    return deviations
