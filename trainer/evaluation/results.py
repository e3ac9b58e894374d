"""Losses and metrics as numbers on the host."""

import numpy as np


def static_sum(losses, weights):
    """The statically weighted sum of {name: value}: comparable over time and across combiners. NaN of none."""
    if not losses:
        return float("nan")
    static = weights.static() if len(weights) else {}
    return float(sum(static.get(name, 1.0) * value for name, value in losses.items()))


def metric_results(trainer, name, metric):
    """{name: float} of a metric on the host; one with several results names each."""
    if trainer.replicas == 1:
        result = metric.result()
    else:
        result = metric.stateless_result([trainer.read(variable) for variable in metric.variables])
    if isinstance(result, dict):
        return {key: float(value) for key, value in result.items()}
    array = np.asarray(result)
    if array.ndim == 0:
        return {name: float(array)}
    return {f"{name}/{index}": float(value) for index, value in enumerate(array.ravel())}


def own_tag(name):
    """The tag of a scalar that a hook logs: below `metrics/`. TensorBoard sorts tags, and is to open with the loss.

    >>> own_tag("accuracy"), own_tag("reward/mean")
    ('metrics/accuracy', 'reward/mean')
    """
    return name if "/" in name else f"metrics/{name}"
