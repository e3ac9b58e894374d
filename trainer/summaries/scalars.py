"""Turns a window of sums into TensorBoard's scalars and the callbacks' logs."""

import numpy as np
import tensorflow as tf

from looptape.trainer.evaluation.results import metric_results, own_tag, static_sum
from looptape.trainer.optim.optimizer_groups import OptimizerGroup
from looptape.trainer.step.gradients.combination import is_plain_sum

ROW = "optimizer/skipped_updates"  # a tag that every row of the training has


def train_scalars(trainer, window, seconds):
    """{tag: number} of a window of updates for the run `train`.

    TensorBoard sorts tags by name: everything but the losses is below `metrics/`, `optimizer/` or a later name, so
    that it opens with the losses. Of one loss nothing is written twice; see `_loss_scalars`.
    """
    values, own = {}, {}
    for minimizer, part in window.parts():
        own.update({own_tag(name): value for name, value in part["logged"].items()})
        if minimizer is None:
            continue
        prefix = f"{minimizer.name}/" if minimizer.name else ""
        values.update(_loss_scalars(trainer, minimizer, part, prefix))
        values[f"optimizer/gradient_norm/{prefix}global"] = part["norm"]
        if trainer.clip_norm is not None:
            # 1 where the mean norm of the logged updates is above the limit: some of them were clipped for sure.
            tag = "optimizer/clipped" + (f"/{minimizer.name}" if prefix else "")
            values[tag] = float(part["norm"] > trainer.clip_norm)
        rate = "optimizer/learning_rate" + (f"/{minimizer.name}" if prefix else "")
        values[rate] = float(tf.convert_to_tensor(minimizer.optimizer.learning_rate))
        if isinstance(minimizer.optimizer, OptimizerGroup):
            for pattern, each in minimizer.optimizer.learning_rates.items():
                values[f"optimizer/learning_rate/{prefix}{pattern}"] = float(tf.convert_to_tensor(each))
    values.update({f"metrics/{name}": value for name, value in _metrics(trainer).items()})
    if window.updates and seconds > 0:
        values["throughput/examples_per_second"] = window.examples / seconds
        values["throughput/data_wait"] = min(window.seconds_waited / seconds, 1.0)
    values[ROW] = trainer.counters.skips.total
    return {**own, **values}  # what a hook logs as `loss/error` does not replace the loss


def _loss_scalars(trainer, minimizer, part, prefix):
    """The losses, their weights and shares, the total and the static sum.

    With one loss its share is 1 and the sum says the same as the loss. Its weight and the total are written only if
    the weight is scheduled, learned, or other than 1.
    """
    weights = _effective_weights(trainer, minimizer)
    values = {f"loss/{prefix}{name}": loss for name, loss in part["loss"].items()}
    several = len(minimizer.names) > 1
    if several or not _is_plain(minimizer):
        values.update({f"loss_weight/{prefix}{name}": weights[name] for name in part["loss"]})
        values[f"loss/{prefix}total"] = part["total"]
    if several:
        values.update(_shares(prefix, part["loss"], weights))
        values[f"loss/{prefix}sum"] = static_sum(part["loss"], minimizer.weights)
    return values


def _is_plain(minimizer):
    """Whether the only loss counts as it is: its weight is 1 at every step."""
    fixed = all(minimizer.weights[name] == 1.0 for name in minimizer.names)
    return fixed and is_plain_sum(minimizer.combiner)


def _effective_weights(trainer, minimizer):
    """{name: static or scheduled weight × the combiner's coefficient} of the latest update."""
    weights = minimizer.weights.at(tf.constant(trainer.counters.step - 1, tf.int64))
    weights = {name: float(weight) for name, weight in zip(minimizer.names, weights, strict=True)}
    if is_plain_sum(minimizer.combiner):
        return weights
    coefficients = trainer.ledger.last(minimizer)["coefficient"]
    return {name: weight * coefficients[name] for name, weight in weights.items()}


def _shares(prefix, losses, weights):
    weighted = {name: weights[name] * loss for name, loss in losses.items()}
    total = sum(weighted.values())
    if not total:
        return {}
    return {f"loss_share/{prefix}{name}": value / total for name, value in weighted.items()}


def callback_logs(trainer, window):
    """Logs for Keras callbacks: `loss`, each loss by name, what was logged, the metrics."""
    logs = {}
    parts = window.parts()
    totals = [part["total"] for minimizer, part in parts if minimizer is not None]
    if totals:
        logs["loss"] = float(sum(totals))
    for minimizer, part in parts:
        prefix = f"{minimizer.name}/" if minimizer is not None and minimizer.name else ""
        for name, value in {**part["logged"], **part["loss"]}.items():
            logs.setdefault(prefix + name, float(value))
    return {**logs, **_metrics(trainer)}


def _metrics(trainer):
    """{name: number} of the metrics that training updates. One that only `eval_step` updates has nothing to show."""
    moved = {id(variable) for minimizer in trainer.minimizers.values() for variable in minimizer.moved}
    found = {}
    for name, metric in trainer.metrics.items():
        # An overridden `train_step` may update it outside `minimize`: then its variables are no longer 0.
        if any(id(v) in moved for v in metric.variables) or any(np.any(trainer.read(v)) for v in metric.variables):
            found.update(metric_results(trainer, name, metric))
    return found
