"""Combines the summed gradients of an update's losses into one gradient."""

from typing import Any, NamedTuple

import tensorflow as tf

from looptape.trainer.step.gradients import stages
from looptape.trainer.step.plan import Backward
from looptape.trainer.step.reports import probe_report
from looptape.trainer.variables import creating_variables


class Combined(NamedTuple):
    """Result of a combiner for one update."""

    gradients: Any  # [variables]
    total: Any  # scalar, what is optimised
    coefficients: Any  # [K]; None where all are 1
    seen: Any  # (losses, present, measured), by which the combiner's state advances; None if it has none
    kept: Any = None  # by a combiner that rewrites gradients, for its `remember`


def is_plain_sum(combiner):
    """Whether a combiner's coefficients are always 1, so that they need not be computed."""
    return combiner.needs == "weights" and not combiner.variables


def inputs(combiner, losses, divisors, weights):
    """(the losses [K] as the combiner sees them, [K] bool: which take part). A loss at a weight of 0 takes no part.

    Its gradient is 0, and the shortest combination of gradients would be, too.
    """
    weights = tf.stack(weights)
    return losses * weights if combiner.weighs_losses else losses, (divisors > 0) & tf.not_equal(weights, 0.0)


def combine(minimizer, result):
    """A `Combined` from the `MicroResult` of a whole update. Traced or eager, outside replicas."""
    owner, plan, combiner = minimizer.owner, minimizer.plan, minimizer.combiner
    backward, scale = minimizer.micro.backward, owner.loss_scale.value()
    if backward is Backward.FOLDED or plan.combined:
        groups = [[stages.deduplicate(gradient) for gradient in group] for group in result.gradients]
        groups = stages.unscale(groups, scale)
    elif minimizer.divided_ahead:
        groups = result.gradients
    else:
        groups = stages.divide(result.gradients, _group_divisors(minimizer, result.divisors), scale)
    if backward is Backward.FOLDED and is_plain_sum(combiner):
        return Combined(stages.combine(groups), result.total, None, None)
    weights = minimizer.weights.at(owner.step.value())
    divisors = tf.stack(result.divisors)
    values = tf.math.divide_no_nan(tf.stack(result.sums), divisors)
    losses, present = inputs(combiner, values, divisors, weights)
    measured, coefficients, kept = None, result.coefficients, None
    if plan.combined:
        measured, gradients = result.measured, stages.combine(groups)
    elif backward.per_loss:
        groups = [[stages.scale_gradient(g, w) for g in group] for group, w in zip(groups, weights, strict=True)]
        shared = plan.shared if owner.head_gradients == "own" else None
        if combiner.rewrites:
            groups, kept = _rewrite(minimizer, groups, losses, present, shared)
        if combiner.gradients_every:
            factors = tf.math.divide_no_nan(tf.stack(weights), divisors)
            measured = _measure(minimizer, groups, result.products, factors)
        coefficients = combiner.coefficients(losses, present, measured)
        gradients = stages.combine(groups, coefficients, shared)
    elif combiner.in_turns:
        groups, kept = _rewrite(minimizer, [stages.combine(groups)], losses, present)
        coefficients = combiner.mixture(combiner.measure(groups), tf.not_equal(tf.stack(weights), 0.0))
        gradients = stages.combine(groups, coefficients)
    else:
        gradients = stages.combine(groups)
    coefficients = None if coefficients is None else tf.cast(coefficients, tf.float32)
    used = tf.ones([len(weights)]) if coefficients is None else coefficients
    total = combiner.total(values, used, tf.stack(weights), present)
    return Combined(gradients, total, coefficients, (losses, present, measured), kept)


def _group_divisors(minimizer, divisors):
    """[groups]: what the summed gradient of each is divided by. Of several losses, in the unit that they share."""
    if minimizer.micro.backward.per_loss:
        return divisors
    losses = minimizer.plan.losses
    return [divisors[group[0]] / losses.ratios[group[0]] for group in losses.groups]


def divisions(minimizer, divisors):
    """[groups]: what turns the summed gradients of each into means, from the losses' divisors. Traced or eager."""
    return stages.factors(_group_divisors(minimizer, divisors), minimizer.owner.loss_scale.value())


def _rewrite(minimizer, groups, losses, present, shared=None):
    """(the gradients by which the combiner replaces those of the losses, what it keeps); shared ones only, if given."""
    combiner = minimizer.combiner
    with creating_variables(minimizer.owner.strategy):
        combiner.build_buffers(groups[0])
    rewritten, kept = combiner.rewrite(groups, losses, present)
    kept = kept or None
    if shared is None:
        return rewritten, kept
    pairs = zip(groups, rewritten, strict=True)
    return [[b if own else a for a, b, own in zip(*pair, shared, strict=True)] for pair in pairs], kept


def refuse(combiner, seen, noted, message):
    """[an assertion that ends the run where the combiner cannot take the losses], or [].

    Args:
        combiner: the combiner.
        seen: of a `Combined`.
        noted: the operation that keeps the losses for the error.
        message: of the assertion.
    """
    if not combiner.requires_positive:
        return []
    losses, present, _ = seen
    with tf.control_dependencies([noted]):
        check = tf.raw_ops.Assert(condition=combiner.allows(losses, present), data=[message])
    return [] if check is None else [check]


def probes(minimizer, result, coefficients, gradients):
    """The probes of a whole update, reduced for the host; see `probe_report.conclude`. Traced."""
    weights = tf.stack(minimizer.weights.at(minimizer.owner.step.value()))
    coefficients = tf.ones_like(weights) if coefficients is None else coefficients
    scale = minimizer.owner.loss_scale.value()
    by = tf.math.divide_no_nan(weights, tf.stack(result.divisors) * (1.0 if scale is None else scale))
    return probe_report.conclude(result.report, by, coefficients, gradients)


def factors(minimizer, result, coefficients):
    """[groups]: what the summed gradient of each group was multiplied by to be the update. Traced.

    Variables that are not shared and have their own factors (`head_gradients`) count as if they were.
    """
    divisors = tf.stack(_group_divisors(minimizer, result.divisors))
    weights = tf.ones_like(divisors)
    if minimizer.micro.backward.per_loss:
        weights = tf.stack(minimizer.weights.at(minimizer.owner.step.value()))
        weights = weights if coefficients is None else weights * coefficients
    scale = minimizer.owner.loss_scale.value()
    return tf.math.divide_no_nan(weights, divisors if scale is None else divisors * scale)


def _measure(minimizer, groups, products, factors):
    """Chooses what the combiner measures: all variables, the shared ones, or products of shared features."""
    if products is not None:
        factors = tf.cast(factors, products.dtype)
        return products * factors[:, tf.newaxis] * factors[tf.newaxis, :]
    if minimizer.owner.shared_variables is not None:
        groups = [[g for g, shared in zip(group, minimizer.plan.shared, strict=True) if shared] for group in groups]
    return minimizer.combiner.measure(groups)
