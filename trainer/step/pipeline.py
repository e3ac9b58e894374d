"""The stages of an update as a list: `Trainer.summary` prints it, and what comes after the backward passes runs it."""

import numpy as np
import tensorflow as tf

from looptape.trainer.optim import fused_kernels
from looptape.trainer.optim.loss_scale import needs_loss_scale
from looptape.trainer.optim.optimizer_groups import OptimizerGroup, takes_any_size
from looptape.trainer.step.forward.loss_weights import refuse_metrics_named_like_losses
from looptape.trainer.step.gradients import combination, stages
from looptape.trainer.step.gradients.own_stages import OwnStages
from looptape.trainer.step.gradients.transformation import UpdateStage, hook_stage, write_finite
from looptape.trainer.step.nonfinite import state_number
from looptape.trainer.step.reports.packed_row import pack
from looptape.trainer.step.reports.update_report import ExaminedUpdate
from looptape.trainer.variables import raw

NONFINITE = "looptape: non-finite update"
NOT_ALLOWED = "looptape: a loss that the combiner does not take"


class Pipeline:
    """The stages of one minimizer's updates, in the order in which they run, and the state that belongs to them.

    Micro-batches, replicas and the combiner make the gradient; those stages are the minimizer's. The others run here,
    once per update, outside replicas.

    Args:
        owner: the trainer.
        optimizer: of the minimizer.
        combiner: of the minimizer.
    """

    def __init__(self, owner, optimizer, combiner):
        self._owner, self.optimizer, self._combiner = owner, optimizer, combiner
        self.own_stages = OwnStages(owner.stages, owner.make_variable)
        self.averages = None  # of `averaged_variables`, with `ema_decay`
        self.averaged_variables = []
        self.last = None  # the numbers of the latest update, for the error if they are not finite

    @property
    def stages(self):
        """The list of stages of the next update: what the trainer asks for may change with the step."""
        return [stage for stage in self._list() if stage is not None]

    def _list(self):
        """Yields the stages, and None in the place of those that are not wanted."""
        owner, combiner = self._owner, self._combiner
        compiled = "eager" if owner.run_eagerly else "XLA" if owner.jit_compile else "traced"
        parts = f"{owner.micro_batches} micro-batch(es), {compiled}: forward, losses, {_passes(owner, combiner)}"
        yield UpdateStage(parts, "sum")
        if needs_loss_scale(owner.model):
            yield UpdateStage("loss scaling for float16", "sum")
        if owner.replicas > 1:
            yield UpdateStage(f"sum over {owner.replicas} replicas", "sum")
        yield UpdateStage(f"combination by {type(combiner).__name__}", "sum")
        yield UpdateStage(f"finite check ({_when_nonfinite(owner)})", "check")
        if owner.on_spike != "ignore":
            yield UpdateStage(f"spike guard ({_when_spiked(owner)})", "check")
        if owner.clip_norm is not None:
            clip = lambda gradients, norm: stages.clip(gradients, norm, owner.clip_norm)  # noqa: E731
            yield UpdateStage(f"clip to a global norm of {owner.clip_norm:g}", "limit", clip)
        yield from self.own_stages.as_list(owner)
        yield hook_stage(owner)
        yield UpdateStage(f"{_kinds(self.optimizer)}.apply", "write", self._apply)
        if owner.ema_decay is not None:
            yield UpdateStage(f"average the weights with decay {owner.ema_decay:g}", "write", self._average)

    def _of(self, kind):
        return [stage for stage in self.stages if stage.kind == kind]

    def _apply(self, gradients, variables):
        fused_kernels.apply(self.optimizer, gradients, variables)

    def _average(self, gradients, variables):
        # Also of variables that are frozen now: their averages approach the values at which they stand still.
        stages.average(self.averages, [raw(v) for v in self.averaged_variables], self._owner.ema_decay)

    def averaged(self):
        """[(variable, its average)]."""
        return list(zip(self.averaged_variables, self.averages or [], strict=True))

    def build(self, variables):
        """Makes the state of the stages. Traced or eager; once, and again for variables that join."""
        own = self.optimizer is self._owner.optimizer
        joining = self._owner.freezing.including(variables) if own else variables
        if self._owner.ema_decay is not None:
            known = {id(raw(v)) for v in self.averaged_variables}
            new = [v for v in joining if id(raw(v)) not in known]
            # A variable that was frozen so far equals its average.
            self.averages = [*(self.averages or []), *(self._owner.make_variable(raw(v), "average") for v in new)]
            self.averaged_variables += new
        self.own_stages.build(variables, joining)

    def run(self, minimizer, result, combined, losses_after=None):
        """Everything after the backward passes. Traced or eager. Returns {name: loss}.

        Args:
            minimizer: whose update it is.
            result: the `MicroResult` of the whole update.
            combined: what the combiner made of it.
            losses_after: function that gives the losses [K] after the update, for combiners that look at them.
        """
        owner, plan, variables = self._owner, minimizer.plan.losses, minimizer.trained
        gradients, total, coefficients = combined.gradients, combined.total, combined.coefficients
        if not minimizer.name:  # others log their losses below their names
            refuse_metrics_named_like_losses(plan.names, owner.metrics)
        # Where the optimizer squares gradients that are not clipped, those whose squares overflow are refused.
        norm = stages.global_norm(gradients, owner.clip_norm is not None or takes_any_size(self.optimizer))
        self.build(variables)
        examined = ExaminedUpdate(owner, variables, gradients) if owner.mode.examining else None
        limited = gradients
        for stage in self._of("limit"):
            limited = stage.run(limited, norm)

        def write(transformed):
            for stage in self._of("write"):
                stage.run(transformed, variables)
            for variable, value in zip(plan.moved, result.state, strict=True):
                raw(variable).assign(value)
            if minimizer.spikes is not None:
                minimizer.spikes.remember(total, norm)
            _advance(minimizer.combiner, combined, losses_after)
            return tf.constant(True)

        if owner.mode.probing:
            owner.tracing.reports[minimizer.name] = combination.probes(minimizer, result, coefficients, gradients)
        noted = self._note(minimizer, result, total, norm, coefficients)
        refusals = combination.refuse(minimizer.combiner, combined.seen, noted, NOT_ALLOWED)
        with tf.control_dependencies([noted, *refusals] if owner.mode.aborting else refusals):
            number = tf.identity(total + norm + state_number(owner, plan.moved, result.state))
        number = number if minimizer.spikes is None else minimizer.spikes.guard(number, total, norm)
        written = write_finite(owner, self._of("transform"), number, limited, variables, write, NONFINITE)
        owner.tracing.checks.append(written)
        if examined is not None:
            owner.tracing.health[minimizer.name] = examined.conclude(written, result, minimizer, coefficients)
        losses = [tf.math.divide_no_nan(s, d) for s, d in zip(result.sums, result.divisors, strict=True)]
        return dict(zip(plan.names, losses, strict=True))

    def _note(self, minimizer, result, total, norm, coefficients):
        """Keeps this update's numbers for the log, and for the error if they are not finite."""
        row = pack(result, total, norm, coefficients)
        self._owner.ledger.record(minimizer, row, minimizer.plan.losses.logged, coefficients is not None)
        if self.last is None:
            self.last = self._owner.make_variable(np.zeros(row.shape, np.float32), "last")
        return self.last.assign(row)


def _advance(combiner, combined, losses_after):
    """Moves the combiner's state, after the weights were written."""
    if combined.seen is not None:
        combiner.advance(*combined.seen, combined.coefficients)
    if combined.kept is not None:
        combiner.remember(combined.kept)
    if losses_after is not None:
        before, present, _ = combined.seen
        combiner.advance_after(before, losses_after(), present)


def _when_nonfinite(owner):
    if owner.on_nonfinite == "raise":
        return "an update that fails is not applied and stops the run"
    then = "stop the run" if owner.on_nonfinite == "skip" else "return the run to its last good checkpoint"
    return f"an update that fails is skipped; {owner.max_skipped} in a row {then}"


def _when_spiked(owner):
    limit = f"above {owner.spike_threshold:g} deviations from the median of {owner.spike_window} updates"
    then = {
        "record": "an update is recorded, then applied",
        "skip": "an update is skipped",
        "raise": "an update is not applied and stops the run",
        "restore": "the run returns to its last checkpoint",
    }
    return f"{limit} {then.get(owner.on_spike, owner.on_spike)}"


def _kinds(optimizer):
    each = optimizer.values() if isinstance(optimizer, OptimizerGroup) else [optimizer]
    return " and ".join(type(one).__name__ for one in each)


def _passes(owner, combiner):
    every = combiner.gradients_every
    parts = owner.micro_batches > 1 or owner.replicas > 1
    if every == 1 or (combiner.needs == "losses" and parts):
        return "one backward pass for each loss"
    return "one backward pass" + (f", one for each loss in every {every}. update" if every else "")
