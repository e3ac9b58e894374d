"""Pure functions on reports: per example → sums that add up over micro-batches and replicas → [time] vectors
→ scalars.

A report is `{layer: {quantity: tensor}}`; the keys are known when it is traced, so it can leave a
`tf.function` or go
round a `tf.while_loop`. Three forms:

- **per example** (`ProbeSession.report`): `state`, `hidden`, `cell`, `recurrent`, `external`, `input`, `gain`
  of shape [batch, time], NaN where `valid` is False; `weight/<variable>` of shape [time]; and what the
  scalars need.
- **totals** (`totals`): sums over the examples. Totals of micro-batches and replicas are simply added.
- **vectors** (`vectors`): the contract's [time] vectors, means over the valid examples, NaN where there is
  none.

Norms of weight gradients do not add up. What is kept of them is the mean square: the root mean square, over
micro-batches and replicas, of the norm that G_t would have if that micro-batch were the whole update. With
one micro-batch it is the norm.
"""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from looptape.trainer.probing import probe_calls
from looptape.trainer.probing.errors import ProbeError

NORMS = ("state", "hidden", "cell", "recurrent", "external", "input", "steered")
# The share of a gradient that still counts as arriving; `dashboard.rules.verdicts` reads logged rows by the same rule.
HORIZON = 0.01


def totals(report):
    """Sums over the examples of a per-example report: `{layer: {quantity: sums}}`, to be added over
    micro-batches.
    """
    return {layer: _sum_layer(values) for layer, values in report.items()}


def _sum_layer(values):
    sums = {"parts": tf.ones([])}
    if "valid" in values:
        valid = values["valid"]
        sums["examples"] = tf.reduce_sum(tf.cast(valid, tf.float32), axis=0)
        for name in NORMS:
            if name in values:
                sums[name] = tf.reduce_sum(tf.where(valid, values[name], 0.0), axis=0)
        if "gain" in values:
            defined = valid & ~tf.math.is_nan(values["gain"])
            sums["gain"] = tf.reduce_sum(tf.where(defined, values["gain"], 0.0), axis=0)
            sums["gain_examples"] = tf.reduce_sum(tf.cast(defined, tf.float32), axis=0)
        if "acted" in values:
            sums["acted"] = tf.reduce_sum(tf.where(valid, values["acted"], 0.0))
        wrong = valid & ~tf.math.is_finite(values["state"])
        sums["nonfinite"] = tf.reduce_sum(tf.cast(wrong, tf.float32))
        sums["zeros"], sums["elements"] = tf.reduce_sum(values["zeros"]), tf.reduce_sum(values["elements"])
    for name in ("visits", "beyond"):
        if name in values:
            sums[name] = values[name]
    if "cut_off" in values:
        sums["cut_off"] = tf.reduce_sum(values["cut_off"])
        sums["cut_off_examples"] = tf.cast(tf.size(values["cut_off"]), tf.float32)
    for name, value in values.items():
        if name == "weight" or name.startswith("weight/"):
            # In float64: squares of a vanished gradient leave the range of float32.
            sums[name] = tf.square(tf.cast(value, tf.float64))
    return sums


def add(first, second):
    """The totals of two micro-batches together. Time axes of different length are padded at the end."""
    return {
        layer: {name: _add_padded(value, second[layer][name]) for name, value in sums.items()}
        for layer, sums in first.items()
    }


def _add_padded(first, second):
    if first.shape.rank == 0 or (first.shape == second.shape and first.shape.is_fully_defined()):
        return first + second
    length = tf.maximum(tf.shape(first)[0], tf.shape(second)[0])
    return sum(tf.pad(value, [[0, length - tf.shape(value)[0]]]) for value in (first, second))


def vectors(sums, examples=1.0, scale=1.0):
    """The [time] vectors of the contract: `{layer: {quantity: [time]}}`.

    Args:
        sums: totals of a whole update.
        examples: number of examples of the update; per-example quantities are multiplied by it. 1 if the
            report has it.
        scale: what the gradients are too large by (loss scale, divisor of the loss). 1 if the report knew it.
    """
    return {layer: _layer_vectors(values, examples, scale) for layer, values in sums.items()}


def _layer_vectors(sums, examples, scale):
    found = {}
    for name in NORMS:
        if name in sums:
            found[name] = _mean(sums[name], sums["examples"]) * (tf.cast(examples, tf.float32) / scale)
    if "gain" in sums:
        found["gain"] = _mean(sums["gain"], sums["gain_examples"])
    for name, value in sums.items():
        if name == "weight" or name.startswith("weight/"):
            # The gradients of all parts add up to that of the update: each is 1/parts of what it would be
            # alone.
            root = tf.sqrt(value * tf.cast(sums["parts"], tf.float64)) / tf.cast(scale, tf.float64)
            found[name] = tf.cast(root, tf.float32)
            if "visits" in sums:
                found[name] = tf.where(sums["visits"] > 0, found[name], float("nan"))
    return found


def scalars(sums, examples=1.0, scale=1.0):
    """`{layer: {name: scalar}}`: `horizon`, `dense`, `median_gain`, `omega`, `zero_fraction`,
    `nonfinite`, `acted`, `cut_off`, as far as defined.

    - horizon: number of time steps whose mean ‖λ_t‖ is above 1 % of the largest. Where most time steps receive a
      gradient from outside (`dense`) that count says nothing: there it is the number of time steps until the
      product of the median gain falls below 1 %, at most those between two cuts by an action;
    - dense: 1.0 if the horizon is taken from the gain, else 0.0; only with `gain` and `external`;
    - median_gain: median over time of γ_t;
    - omega: Σ_t (γ_t − 1)², Pascanu's regulariser;
    - zero_fraction: share of exact zeros in λ, not counting what is 0 by definition;
    - nonfinite: number of (example, time step) pairs whose λ is not finite;
    - acted: share of the (example, time step) pairs whose λ an action changed;
    - cut_off: mean ‖r_0‖, the gradient that a stateful layer loses at the start of its window.
    """
    found = vectors(sums, examples, scale)
    return {layer: _layer_scalars(values, found[layer], examples, scale) for layer, values in sums.items()}


def _layer_scalars(sums, found, examples, scale):
    result = {}
    if "state" in found:
        result["horizon"] = _count_above(found["state"])
    if "gain" in found:
        gain, defined = found["gain"], ~tf.math.is_nan(found["gain"])
        result["median_gain"] = _median(gain, defined)
        if "external" in found:
            dense = _is_dense(found["external"])
            time = _count(~tf.math.is_nan(found["state"]))
            reach = tf.minimum(_gain_horizon(result["median_gain"], time), tf.math.ceil(time / (_cuts(found) + 1.0)))
            result["horizon"] = tf.where(dense, reach, result["horizon"])
            result["dense"] = tf.cast(dense, tf.float32)
        result["omega"] = tf.reduce_sum(tf.where(defined, tf.square(gain - 1.0), 0.0))
    if "elements" in sums:
        result["zero_fraction"] = tf.math.divide_no_nan(sums["zeros"], sums["elements"])
        result["nonfinite"] = sums["nonfinite"]
    if "acted" in sums:
        result["acted"] = tf.math.divide_no_nan(sums["acted"], tf.reduce_sum(sums["examples"]))
    if "cut_off" in sums:
        result["cut_off"] = sums["cut_off"] / sums["cut_off_examples"] * (tf.cast(examples, tf.float32) / scale)
    return result


def _count(mask):
    return tf.reduce_sum(tf.cast(mask, tf.float32))


def _count_above(norms):
    """The number of time steps above 1 % of the largest value; NaN counts as 0."""
    norms = tf.where(tf.math.is_nan(norms), 0.0, norms)
    return _count(norms > HORIZON * tf.reduce_max(norms))


def _is_dense(external):
    """Whether more than half of the valid time steps receive at least 1 % of the largest gradient from outside."""
    return _count_above(external) > 0.5 * _count(tf.math.is_finite(external))


def _cuts(found):
    """At how many time steps an action cut the gradient off; the rule of `dashboard.rules.verdicts.cut_counts`."""
    if "steered" not in found:
        return tf.zeros([])
    state, steered = found["state"], found["steered"]
    only_entering = tf.abs(steered - found["external"]) <= 1e-4 * state
    return _count(only_entering & (tf.abs(state - steered) > 0.01 * state))


def _gain_horizon(gain, time):
    """How many of `time` steps back at least 1 % is left if each keeps `gain`; NaN if that is not defined."""
    inside = tf.clip_by_value(gain, 1e-30, 1.0 - 1e-6)
    steps = tf.minimum(tf.floor(tf.math.log(HORIZON) / tf.math.log(inside) + 1e-4), time)
    return tf.where(gain >= 1.0, time, tf.where(gain <= 0.0, 0.0, tf.where(tf.math.is_nan(gain), gain, steps)))


def _mean(total, count):
    return tf.where(count > 0, total / count, float("nan"))


def _median(values, defined):
    ordered = tf.sort(tf.where(defined, values, float("inf")))
    count = tf.reduce_sum(tf.cast(defined, tf.int32))
    low, high = tf.maximum((count - 1) // 2, 0), tf.minimum(count // 2, tf.shape(values)[0] - 1)
    return tf.where(count > 0, (tf.gather(ordered, low) + tf.gather(ordered, high)) / 2.0, float("nan"))


# ---- On the host: vectors cut to the time steps there were, scalars, and capacity.


class Presented(NamedTuple):
    """The report of an update in NumPy."""

    vectors: Any  # {layer: {quantity: [time]}}
    scalars: Any  # {layer: {name: float}}
    shapes: Any  # {layer: shape} where t is a tuple: what the vectors are flattened from


@tf.function(autograph=False, reduce_retracing=True)
def _reduce(totals, examples, scale):
    """One call instead of some hundred small operations, which cost more than the probed update itself."""
    return vectors(totals, examples, scale), scalars(totals, examples, scale)


def present(totals, shapes=None, examples=1.0, scale=1.0):
    """Totals of a whole update as vectors and scalars. Eager, on the host.

    Args:
        totals: from `ProbeSession.totals`, added up.
        shapes: `session.shapes`, noted when it was traced.
        examples, scale: as in `vectors`; 1 if the totals had them.
    """
    shapes = shapes or {}
    totals = tf.nest.map_structure(tf.convert_to_tensor, totals)
    found, numbers = _reduce(totals, *(tf.cast(number, tf.float32) for number in (examples, scale)))
    found = _to_numpy(found)
    numbers = {layer: {name: float(value) for name, value in values.items()} for layer, values in numbers.items()}
    cut = {}
    for layer, shape in shapes.items():
        visits = totals[layer]["visits"].numpy().reshape(shape)
        _check_visits(layer, visits, float(totals[layer]["parts"]))
        extent = _extent(visits)
        found[layer] = {name: _cut(value, shape, extent) for name, value in found[layer].items()}
        if len(shape) > 1:
            cut[layer] = extent
    return Presented(found, numbers, cut)


def present_examples(found, shapes=None):
    """A per-example report (`ProbeSession.report`) as NumPy arrays, [batch, time] or [time], and the shapes
    of tuples.

    Only the quantities; what else a report holds for sums and scalars is left out.
    """
    shapes, cut, result = shapes or {}, {}, {}
    for layer, values in found.items():
        hidden = ("valid", "zeros", "elements", "visits", "beyond", "cut_off")
        result[layer] = {name: np.asarray(value) for name, value in values.items() if name not in hidden}
        if layer in shapes:
            shape = shapes[layer]
            visits = np.asarray(values["visits"]).reshape(shape)
            _check_visits(layer, visits, 1.0)
            extent = _extent(visits)
            result[layer] = {
                name: _cut(value, shape, extent, axis=1 if name.startswith("state") else 0)
                for name, value in result[layer].items()
            }
            if len(shape) > 1:
                cut[layer] = extent
    return result, cut


def missing_capacity(totals, shapes):
    """{name: capacity to ask for} of the `probe` calls that went beyond theirs; empty if all fitted. Eager,
    on the host.

    Pass it, over what was there before, as `capacity` to the session of the next trace. Until then the
    vectors end at the present capacity.
    """
    missing = {}
    for name, shape in shapes.items():
        beyond = totals[name].get("beyond")
        if beyond is None:
            continue
        buckets = np.asarray(beyond).reshape(len(shape), probe_calls.BUCKETS) > 0
        if buckets.any():
            wanted = [2 ** (int(np.max(np.nonzero(row)[0])) + 1) if row.any() else 0 for row in buckets]
            grown = tuple(max(size, want) for size, want in zip(shape, wanted, strict=True))
            missing[name] = grown if len(grown) > 1 else grown[0]
    return missing


def _extent(visits):
    """How far each index went."""
    return tuple(int(np.max(indices)) + 1 if len(indices) else 0 for indices in np.nonzero(visits))


def _cut(value, shape, extent, axis=0):
    if value.ndim <= axis:
        return value
    before, after = value.shape[:axis], value.shape[axis + 1 :]
    window = (slice(None),) * axis + tuple(slice(0, size) for size in extent)
    return value.reshape(*before, *shape, *after)[window].reshape(*before, -1, *after)


def _check_visits(layer, visits, parts):
    often = visits > parts
    if often.any():
        t = tuple(int(index[0]) for index in np.nonzero(often))
        raise ProbeError(
            f"`probe({layer!r}, ...)` was reached {int(visits[t])} times at t={t[0] if len(t) == 1 else t} "
            f"in {int(parts)} pass(es): gradients of different time steps are summed. In nested loops pass a "
            "tuple, outer index first; give different tensors different names."
        )


def _to_numpy(tree):
    return {layer: {name: value.numpy() for name, value in values.items()} for layer, values in tree.items()}
