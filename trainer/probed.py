"""The probed update: what the gradients of every time step, and of each loss, are made of.

It replaces a plain update every `probe_every` steps and moves the weights in the same way, bit for bit.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from trainer import probing


class Report(NamedTuple):
    """What a probed micro-batch found. All parts add up over micro-batches and replicas."""

    totals: Any  # {layer: {quantity: sums over examples}}, see `trainer.probing.report`
    products: Any  # {layer: [losses, losses, time]}, with several losses
    loss_gradients: Any  # [losses][variables], gradients of Σ w·l, with several losses


def open_session(owner, batch, tape):
    """A session over the model's layers, to be entered for the forward pass."""
    first = tf.nest.flatten(batch)[0]
    size = tf.shape(first)[0] if first.shape.rank else 1
    return probing.ProbeSession(owner.model, capacity=owner.probe_capacity, batch=size, tape=tape)


def measure(session, tape, sources, found, extra, examples, divisor, scale, alone=True):
    """The report of one micro-batch. Traced.

    Args:
        session: left, so that its sources are known.
        tape: persistent if `extra` holds anything.
        sources: the trainable `tf.Variable`s.
        found: gradients of the session's sources from the update's own backward pass, or None.
        extra: (target to differentiate where `found` is None, [each loss]).
        examples: of this micro-batch.
        divisor: what the update's target has to be divided by to be the micro-batch's mean, or None.
        scale: the loss scale.
        alone: this is the whole update, so that nothing to probe is a mistake; not so in a `train_step` of several.
    """
    mean, losses = extra
    if found is None:
        found = tape.gradient(mean, session.sources) if session.sources else []
    if alone and not session.layers and not losses:
        raise ValueError(
            "`probe_every` is set, but the model has no recurrent layer, no `probe` was reached, and there is only one "
            "loss: there is nothing to probe. Use probe_every=0, or call `probe(name, tensor, t)` in your loop."
        )
    factor = scale if divisor is None else scale * divisor
    totals = session.totals(found, examples, factor) if session.layers else {}
    products, loss_gradients = {}, []
    if losses:
        each = [tape.gradient(loss, sources + session.sources) for loss in losses]
        if session.layers:
            products = session.products([gradients[len(sources) :] for gradients in each])
        loss_gradients = [
            [
                tf.zeros_like(v) if g is None else tf.convert_to_tensor(g)
                for g, v in zip(gradients, sources, strict=False)
            ]
            for gradients in each
        ]
    return Report(totals, products, loss_gradients)


def zeros_like(report):
    """An empty report of the structure of a traced one; unknown lengths of time begin at 0."""
    return tf.nest.map_structure(lambda x: tf.zeros([size or 0 for size in x.shape], x.dtype), report)


def add(first, second):
    """Two micro-batches together."""
    if isinstance(first, tuple) and not first:
        return second
    products = {layer: _add_time(first.products[layer], second.products[layer]) for layer in second.products}
    gradients = tf.nest.map_structure(tf.add, first.loss_gradients, second.loss_gradients)
    return Report(probing.add(first.totals, second.totals) if second.totals else {}, products, gradients)


def _add_time(first, second):
    length = tf.maximum(tf.shape(first)[2], tf.shape(second)[2])
    return sum(tf.pad(x, [[0, 0], [0, 0], [0, length - tf.shape(x)[2]]]) for x in (first, second))


def conclude(report, factors, coefficients, update):
    """What a whole update's report amounts to, for the host. Traced.

    Args:
        report: over all micro-batches and replicas.
        factors: [K], static weight over divisor of each loss (and over the loss scale).
        coefficients: [K], by the combiner; times the factors they are what a loss counts with in this update.
        update: the gradient that is applied, before clipping.

    Returns:
        {"totals", "shares": {layer: [losses, time]}, "norms": [K], "cosines": [K, K], "update_mean": scalar}, what
        there is of it. The norms are those of what each loss contributes. The mean, which the update is compared with,
        is that of the gradients with their static weights alone: what a plain sum would follow.
    """
    concluded = {"totals": report.totals}
    if not report.loss_gradients:
        return concluded
    concluded["shares"] = probing.shares(report.products, factors * coefficients) if report.products else {}
    weighted = [
        [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        for gradients, factor in zip(report.loss_gradients, tf.unstack(factors), strict=True)
    ]
    flat = tf.stack([tf.concat([tf.reshape(g, [-1]) for g in gradients], axis=0) for gradients in weighted])
    norms = tf.norm(flat, axis=1)
    unit = tf.math.divide_no_nan(flat, norms[:, tf.newaxis])
    direction = tf.concat([tf.reshape(tf.convert_to_tensor(g), [-1]) for g in update], axis=0)
    mean = tf.reduce_mean(flat, axis=0)
    concluded["norms"] = norms * tf.abs(coefficients)
    concluded["cosines"] = tf.matmul(unit, unit, transpose_b=True)
    concluded["update_mean"] = tf.math.divide_no_nan(
        tf.reduce_sum(direction * mean), tf.norm(direction) * tf.norm(mean)
    )
    return concluded
