"""`Trainer.summary()`: what is trained, by which losses, in which pipeline, and what is logged where."""

import keras
import numpy as np

from trainer.optimizers import OptimizerGroup


def summarize(trainer):
    """The summary as text."""
    lines = [
        *_model(trainer),
        *_losses(trainer),
        "Update",
        *(f"  {number}. {stage}" for number, stage in enumerate(_stages(trainer), 1)),
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


def _stages(trainer):
    optimizer = trainer.optimizer
    kinds = [type(o).__name__ for o in optimizer.values()] if isinstance(optimizer, OptimizerGroup) else None
    compiled = "eager" if trainer.run_eagerly else "XLA" if trainer.jit_compile else "traced"
    stages = [f"{trainer.accumulation_steps} micro-batch(es), {compiled}: forward, losses, {_passes(trainer)}"]
    if trainer.loss_scale is not None and trainer.loss_scale.active:
        stages.append("loss scaling for float16")
    if trainer.replicas > 1:
        stages.append(f"sum over {trainer.replicas} replicas")
    stages.append(f"finite check (an update that fails is skipped; {trainer.max_skipped} in a row stop the run)")
    if trainer.clip_norm is not None:
        stages.append(f"clip to a global norm of {trainer.clip_norm:g}")
    if trainer.overrides("transform_gradients"):
        stages.append("transform_gradients")
    stages.append(f"{' and '.join(kinds) if kinds else type(optimizer).__name__}.apply")
    if trainer.ema_decay is not None:
        stages.append(f"average the weights with decay {trainer.ema_decay:g}")
    return stages


def _passes(trainer):
    every = trainer.combiner.gradients_every
    parts = trainer.accumulation_steps > 1 or trainer.replicas > 1
    if every == 1 or (trainer.combiner.needs == "losses" and parts):
        return "one backward pass for each loss"
    return "one backward pass" + (f", one for each loss in every {every}. update" if every else "")


def _logged(trainer):
    lines = [
        "train: loss/<name>, loss/total, loss/sum, loss_weight/<name>, loss_share/<name>, gradient_norm/global,",
        "       learning_rate, throughput/…, skipped_updates, metrics (every `log_every` steps)",
        "eval:  loss/<name>, loss/sum, metrics",
    ]
    if trainer.probe_every:
        lines.append(f"train: timestep/<layer>/<quantity>, gradient_cosine/… (every {trainer.probe_every} steps)")
    return lines
