"""Losses of a batch without gradients: for evaluation, and for those who look at a batch."""

import contextlib

from looptape.trainer.data import batches
from looptape.trainer.step.forward import loss_terms
from looptape.trainer.step.forward.forward_state import ForwardScope


def forward_only(hook, owner, batch, session=None):
    """Losses of a batch without gradients: {name: Term}, logs, number of examples, and what moved with new values.

    Args:
        hook: `batch -> {name: loss}`.
        owner: the trainer.
        batch: of tensors.
        session: a `ProbeSession` to run the hook in, or None.
    """
    regularized = [
        v for v in getattr(owner.model, "trainable_variables", ()) if getattr(v, "regularizer", None) is not None
    ]
    mapped = [*regularized, *owner.forward_state.variables()]
    scope = ForwardScope(mapped, [owner.read(variable) for variable in mapped])
    with scope, owner.collecting_logs() as logged:
        with contextlib.nullcontext() if session is None else session:
            losses = hook(batch)
        model_losses = list(getattr(owner.model, "losses", ()))
    examples = batches.count_examples(batch)
    terms = loss_terms.make_terms(loss_terms.with_regularization(losses, model_losses), examples, not owner.jit_compile)
    moved = list(scope.assigned.values())
    return terms, logged, examples, moved, [scope.get_current_value(v) for v in moved]


def probed_terms(owner, batch, session):
    """{name: Term} of a batch in training mode, in a probe session. Nothing moves."""
    hook = owner.hook("compute_losses")
    with owner.steering.paused(), owner.recurrent_core.running():
        return forward_only(lambda batch: hook(batch, True), owner, batch, session)[0]
