"""`Omega` among the losses of a trainer: which of them it is, and the error whose gradient it is about."""

import tensorflow as tf

from looptape.trainer.recurrent.omega import Omega, omega
from looptape.trainer.step.forward import loss_terms


def divide(losses):
    """({name: loss} of targets and outputs, {name: `Omega`})."""
    penalties = {name: loss for name, loss in losses.items() if isinstance(loss, Omega)}
    if penalties and len(penalties) == len(losses):
        raise ValueError(
            f"The losses {list(losses)} contain nothing but `Omega`, a penalty on the gradient of another loss. Add "
            "the loss that the model should minimise."
        )
    return {name: loss for name, loss in losses.items() if name not in penalties}, penalties


def add(owner, penalties, compute, examples):
    """Calls `compute` and returns its {name: loss} together with the penalties. Traced or eager.

    The error is the weighted sum of the means of the other losses in this micro-batch.

    Args:
        owner: the engine.
        penalties: {name: `Omega`}.
        compute: function that calls the model.
        examples: their number.
    """
    names = owner.loss_weights.names or list(owner.losses)
    weights = dict(zip(names, owner.loss_weights.scalars(names, owner.step.value()), strict=True))

    def measured():
        losses = compute()
        terms = loss_terms.make_terms(losses, examples, not owner.jit_compile)
        means = {name: tf.math.divide_no_nan(term.sum, term.divisor) for name, term in terms.items()}
        return losses, tf.add_n([weights[name] * mean for name, mean in means.items()])

    for name, penalty in penalties.items():
        measured = _penalized(owner, measured, name, penalty)
    return measured()[0]


def _penalized(owner, inner, name, penalty):
    """`inner`, which returns (losses, error), with one loss more."""
    scale = owner.loss_scale.value() if penalty.form == "immediate" else None

    def measured():
        def compute():
            found = inner()
            # Ω depends on the direction of λ only, and a small λ would be 0 in float16.
            return found, found[1] if scale is None else scale * found[1]

        (losses, error), values, weights = omega(owner.model, compute, penalty.layer, penalty.form)
        return {**losses, name: (values, weights)}, error

    return measured
