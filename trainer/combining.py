"""The stage between the sums of an update and its gradient: what the combiner makes of losses and gradients."""

from typing import Any, NamedTuple

import tensorflow as tf

from trainer import microstep, stages


class Combined(NamedTuple):
    """What a combiner makes of one update."""

    gradients: Any  # [variables]
    total: Any  # scalar, what is optimised
    coefficients: Any  # [K], or () where all are 1
    seen: Any  # (losses, present, measured), by which the combiner's state advances; () if it has none


def combine(minimizer, result):
    """A `Combined` from the `MicroResult` of a whole update. Traced or eager, outside replicas."""
    owner, micro, combiner = minimizer.owner, minimizer.micro, minimizer.combiner
    scale = owner.loss_scale.value()
    if micro.fold or micro.featured:
        groups = [[stages.deduplicate(gradient) for gradient in group] for group in result.gradients]
        groups = stages.unscale(groups, scale)
    else:
        divisors = [result.divisors[group[0]] / micro.ratios[group[0]] for group in micro.groups]
        if micro.per_loss:
            divisors = result.divisors
        groups = stages.divide(result.gradients, divisors, scale)
    if micro.fold and microstep.is_plain_sum(combiner):
        return Combined(stages.combine(groups), result.total, (), ())
    weights = minimizer.weights.at(owner.step.value())
    divisors = tf.stack(result.divisors)
    losses, present = tf.math.divide_no_nan(tf.stack(result.sums), divisors), divisors > 0
    measured, coefficients = None, result.coefficients
    if micro.featured:
        measured, gradients = result.measured, stages.combine(groups)
    elif micro.per_loss:
        groups = [[stages.scale_gradient(g, w) for g in group] for group, w in zip(groups, weights, strict=True)]
        if combiner.gradients_every:
            factors = tf.math.divide_no_nan(tf.stack(weights), divisors)
            measured = _measure(minimizer, groups, result.products, factors)
        coefficients = combiner.coefficients(losses, present, measured)
        shared = micro.shared if owner.head_gradients == "own" else None
        gradients = stages.combine(groups, tf.unstack(coefficients), shared)
    else:
        gradients = stages.combine(groups)
    used = tf.ones([len(weights)]) if isinstance(coefficients, tuple) else coefficients
    total = combiner.total(losses, used, tf.stack(weights), present)
    return Combined(gradients, total, coefficients, (losses, present, measured))


def _measure(minimizer, groups, products, factors):
    """What the combiner measures: on all variables, on the shared ones, or by products of shared features."""
    if not isinstance(products, tuple):
        return products * factors[:, tf.newaxis] * factors[tf.newaxis, :]
    if minimizer.owner.shared_variables is not None:
        groups = [[g for g, shared in zip(group, minimizer.micro.shared, strict=True) if shared] for group in groups]
    return minimizer.combiner.measure(groups)
