"""`Trainer.summary()`: what is trained, by which losses, in which pipeline, and what is logged where."""

import keras
import numpy as np

from looptape.trainer.step.pipeline import Pipeline


def summarize(trainer):
    """The summary as text."""
    lines = [
        *_model(trainer),
        *_losses(trainer),
        *_recurrent(trainer),
        *_update(trainer),
        "Logged",
        *(f"  {line}" for line in _logged(trainer)),
    ]
    return "\n".join(lines)


def _count(variables):
    return sum(int(np.prod(variable.shape)) for variable in variables)


def _model(trainer):
    model = trainer.model
    built = getattr(model, "built", True)
    trainable = _count(trainer.trainable_variables) if built else 0
    size = f"{trainable:,} trainable parameters" if built else "not built yet"
    if built and isinstance(model, keras.Model):
        size += f", {_count(model.non_trainable_variables):,} others"
    return [f"Model      {model.name} ({type(model).__name__}): {size}"]


def _losses(trainer):
    names = trainer.loss_weights.names or list(trainer.losses) or ["as `compute_losses` returns them"]
    lines = ["Losses"]
    for name in names:
        weight = trainer.loss_weights[name] if name in list(trainer.loss_weights) else 1.0
        kind = trainer.losses.get(name)
        what = "" if kind is None else f" {getattr(kind, '__name__', type(kind).__name__)}"
        lines.append(f"  {name}:{what}, weight {weight if not callable(weight) else f'by schedule {weight}'}")
    lines.append(f"  combined by {type(trainer.combiner).__name__}")
    if trainer.metrics:
        lines.append(f"Metrics    {', '.join(trainer.metrics)}")
    return lines


def _recurrent(trainer):
    layers = trainer.recurrent_core.describe()
    if not layers:
        return []
    memory = "" if trainer.recurrent_memory is None else f", memory {trainer.recurrent_memory}"
    ways = {name: f"Looptape's{memory}" if reason is None else f"Keras's: {reason}" for name, reason in layers.items()}
    return ["Loops", *(f"  {name}: {way}" for name, way in ways.items())]


def _update(trainer):
    """The list of stages that each minimizer runs; before there is one, that which the first will run."""
    known = {name: minimizer.pipeline for name, minimizer in trainer.minimizers.items()}
    for name, pipeline in (known or {"": Pipeline(trainer, trainer.optimizer, trainer.combiner)}).items():
        yield f"Update {name}".rstrip()
        yield from (f"  {number}. {stage.name}" for number, stage in enumerate(pipeline.stages, 1))


def _logged(trainer):
    lines = [
        "train: loss/<name>; with several losses loss/total, loss/sum, loss_weight/<name>, loss_share/<name>;",
        "       metrics/…, optimizer/gradient_norm/global, optimizer/learning_rate, optimizer/skipped_updates,",
        "       throughput/… (every `log_every` steps)",
        "eval:  loss/<name>, with several loss/sum, metrics/…",
    ]
    if trainer.probe_every:
        lines.append(
            f"train: timestep/<layer>/<quantity>, optimizer/gradient_cosine/… (every {trainer.probe_every} steps)"
        )
    if trainer.health_every:
        parts = "".join(f", {part}" for part in trainer.health_parts)
        lines.append(f"train: health/<quantity>, optimizer/update_ratio/…{parts} (every {trainer.health_every} steps)")
        several = trainer.accumulation_steps > 1 or trainer.replicas > 1
        needs = "" if several else " (needs `accumulation_steps` or replicas)"
        lines.append(f"       optimizer/noise_scale/…{needs}")
    return lines
