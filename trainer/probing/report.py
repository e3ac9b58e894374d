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

import tensorflow as tf

NORMS = ("state", "hidden", "cell", "recurrent", "external", "input")
# Steps whose state gradient is above this share of the largest one are within the horizon.
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
    """`{layer: {name: scalar}}`: `horizon`, `median_gain`, `omega`, `zero_fraction`, `nonfinite`, `cut_off`,
    as far as defined.

    - horizon: number of time steps whose mean ‖λ_t‖ is above 1 % of the largest;
    - median_gain: median over time of γ_t;
    - omega: Σ_t (γ_t − 1)², Pascanu's regulariser;
    - zero_fraction: share of exact zeros in λ, not counting what is 0 by definition;
    - nonfinite: number of (example, time step) pairs whose λ is not finite;
    - cut_off: mean ‖r_0‖, the gradient that a stateful layer loses at the start of its window.
    """
    found = vectors(sums, examples, scale)
    return {layer: _layer_scalars(values, found[layer], examples, scale) for layer, values in sums.items()}


def _layer_scalars(sums, found, examples, scale):
    result = {}
    if "state" in found:
        norms = tf.where(tf.math.is_nan(found["state"]), 0.0, found["state"])
        result["horizon"] = tf.reduce_sum(tf.cast(norms > HORIZON * tf.reduce_max(norms), tf.float32))
    if "gain" in found:
        gain, defined = found["gain"], ~tf.math.is_nan(found["gain"])
        result["median_gain"] = _median(gain, defined)
        result["omega"] = tf.reduce_sum(tf.where(defined, tf.square(gain - 1.0), 0.0))
    if "elements" in sums:
        result["zero_fraction"] = tf.math.divide_no_nan(sums["zeros"], sums["elements"])
        result["nonfinite"] = sums["nonfinite"]
    if "cut_off" in sums:
        result["cut_off"] = sums["cut_off"] / sums["cut_off_examples"] * (tf.cast(examples, tf.float32) / scale)
    return result


def _mean(total, count):
    return tf.where(count > 0, total / count, float("nan"))


def _median(values, defined):
    ordered = tf.sort(tf.where(defined, values, float("inf")))
    count = tf.reduce_sum(tf.cast(defined, tf.int32))
    low, high = tf.maximum((count - 1) // 2, 0), tf.minimum(count // 2, tf.shape(values)[0] - 1)
    return tf.where(count > 0, (tf.gather(ordered, low) + tf.gather(ordered, high)) / 2.0, float("nan"))
