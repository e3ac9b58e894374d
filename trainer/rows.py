"""From a window of sums to what is written: TensorBoard's tags and the callbacks' logs."""

import tensorflow as tf

from trainer.evaluation import metric_results, static_sum
from trainer.microstep import is_plain_sum


def train_scalars(trainer, window, seconds):
    """{tag: number} of a window of updates for the run `train`."""
    values = {}
    for minimizer, part in window.parts():
        values.update(part["logged"])
        if minimizer is None:
            continue
        prefix = f"{minimizer.name}/" if minimizer.name else ""
        weights = _effective_weights(trainer, minimizer)
        for name, loss in part["loss"].items():
            values[f"loss/{prefix}{name}"] = loss
            values[f"loss_weight/{prefix}{name}"] = weights[name]
        values.update(_shares(prefix, part["loss"], weights))
        values[f"loss/{prefix}total"] = part["total"]
        values[f"loss/{prefix}sum"] = static_sum(part["loss"], minimizer.weights)
        values[f"gradient_norm/{prefix}global"] = part["norm"]
        values[f"learning_rate/{minimizer.name}" if prefix else "learning_rate"] = float(
            tf.convert_to_tensor(minimizer.optimizer.learning_rate)
        )
    for name, metric in trainer.metrics.items():
        values.update(metric_results(trainer, name, metric))
    if window.updates and seconds > 0:
        values["throughput/examples_per_second"] = window.examples / seconds
        values["throughput/data_wait"] = min(window.seconds_waited / seconds, 1.0)
    values["skipped_updates"] = trainer.calls.skipped
    return values


def _effective_weights(trainer, minimizer):
    """{name: static or scheduled weight × the combiner's coefficient} of the latest update."""
    weights = minimizer.weights.at(tf.constant(trainer.host_step - 1, tf.int64))
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


def eval_scalars(trainer, results):
    """{tag: number} of an evaluation for the run `eval`."""
    values = {}
    for name, value in results.items():
        if name == "loss":
            values["loss/sum"] = value
        elif name in trainer.evaluation.names:
            values[f"loss/{name}"] = value
        else:
            values[name] = value
    return values


def callback_logs(trainer, window):
    """What a Keras callback sees: `loss`, each loss by name, what was logged, the metrics."""
    logs = {}
    parts = window.parts()
    totals = [part["total"] for minimizer, part in parts if minimizer is not None]
    if totals:
        logs["loss"] = float(sum(totals))
    for minimizer, part in parts:
        prefix = f"{minimizer.name}/" if minimizer is not None and minimizer.name else ""
        for name, value in {**part["loss"], **part["logged"]}.items():
            logs.setdefault(prefix + name, float(value))
    for name, metric in trainer.metrics.items():
        logs.update(metric_results(trainer, name, metric))
    return logs
