"""The probed update: what the gradients of every time step, and of each loss, are made of.

It replaces a plain update every `probe_every` steps and moves the weights in the same way, bit for bit.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from looptape.trainer import probing
from looptape.trainer.step.gradients import stages
from looptape.trainer.step.reports import health_report


class Report(NamedTuple):
    """Findings of a probed micro-batch. All parts add up over micro-batches and replicas."""

    totals: Any  # {layer: {quantity: sums over examples}}, see `trainer.probing.report`
    products: Any  # {layer: [losses, losses, time]}, with several losses
    loss_gradients: Any  # [losses][variables], gradients of Σ w·l, with several losses
    health: Any = {}  # see `trainer.step.reports.health_report`


NOTHING = Report({}, {}, [])


class Looks(NamedTuple):
    """Targets that a report differentiates, and divisors of their gradients."""

    mean: Any  # over this micro-batch, times the loss scale; None where the update's own target will do
    losses: list  # Σ w·l of each loss, times the loss scale, if there are several
    examples: Any  # of this micro-batch
    divisor: Any  # what the update's target has to be divided by to be the micro-batch's mean, or None
    scale: Any  # the loss scale

    @property
    def factor(self):
        """The divisor for the gradients of the update's target."""
        return self.scale if self.divisor is None else self.scale * self.divisor


def open_session(owner, batch, tape):
    """A session over the model's layers, to be entered for the forward pass."""
    first = tf.nest.flatten(batch)[0]
    size = tf.shape(first)[0] if first.shape.rank else 1
    options = {"capacity": owner.probe_capacity, "batch": size, "tape": tape, "only": owner.probe_layers}
    return probing.ProbeSession(owner.model, **options)


def measure(session, tape, sources, found, looks, alone=True):
    """The report of one micro-batch. Traced.

    Args:
        session: left, so that its sources are known.
        tape: persistent if there are several losses, or `found` is None.
        sources: the trainable `tf.Variable`s.
        found: gradients of the session's sources from the update's own backward pass, or None.
        looks: what to differentiate and to divide by.
        alone: this is the whole update, so that nothing to probe is a mistake; not so in a `train_step` of several.
    """
    if found is None:
        found = tape.gradient(looks.mean, session.sources) if session.sources else []
    if alone and not session.layers and not looks.losses:
        raise ValueError(
            "`probe_every` is set, but the model has no recurrent layer, no `probe` was reached, and there is only one "
            "loss: there is nothing to probe. Use probe_every=0, or call `probe(name, tensor, t)` in your loop."
        )
    totals = session.totals(found, looks.examples, looks.factor) if session.layers else {}
    products, loss_gradients = {}, []
    if looks.losses:
        each = [tape.gradient(loss, sources + session.sources) for loss in looks.losses]
        if session.layers:
            products = session.products([gradients[len(sources) :] for gradients in each])
        loss_gradients = [
            [
                tf.zeros_like(v) if g is None else stages.to_dense(g, v.shape)
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
    products = {layer: _add_time(first.products[layer], second.products[layer]) for layer in second.products}
    gradients = tf.nest.map_structure(tf.add, first.loss_gradients, second.loss_gradients)
    totals = probing.add(first.totals, second.totals) if second.totals else {}
    health = health_report.add(first.health, second.health) if second.health else {}
    return Report(totals, products, gradients, health)


def _add_time(first, second):
    length = tf.maximum(tf.shape(first)[2], tf.shape(second)[2])
    return sum(tf.pad(x, [[0, 0], [0, 0], [0, length - tf.shape(x)[2]]]) for x in (first, second))


def conclude(report, factors, coefficients, update):
    """Reduces a whole update's report for the host. Traced.

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
        [tf.cast(gradient, tf.float32) * factor for gradient in gradients]
        for gradients, factor in zip(report.loss_gradients, tf.unstack(factors), strict=True)
    ]
    flat = tf.stack([tf.concat([tf.reshape(g, [-1]) for g in gradients], axis=0) for gradients in weighted])
    norms = tf.norm(flat, axis=1)
    unit = tf.math.divide_no_nan(flat, norms[:, tf.newaxis])
    direction = tf.concat([tf.reshape(tf.cast(tf.convert_to_tensor(g), tf.float32), [-1]) for g in update], axis=0)
    mean = tf.reduce_mean(flat, axis=0)
    concluded["norms"] = norms * tf.abs(coefficients)
    concluded["cosines"] = tf.matmul(unit, unit, transpose_b=True)
    concluded["update_mean"] = tf.math.divide_no_nan(
        tf.reduce_sum(direction * mean), tf.norm(direction) * tf.norm(mean)
    )
    return concluded
