"""Counts non-finite updates, in total and in a row, and stops the run when there are too many."""

import math

import tensorflow as tf

from looptape.trainer.variables import path_of, raw


class NonFiniteUpdates(FloatingPointError):
    """Too many updates were not finite. Nothing was applied since the first of them.

    Args:
        message: what happened and what to do.
        parts: the micro-batches of the latest such update, or None if they were not kept.
        policy: what to do about it: "raise" or "restore"; None for the trainer's `on_nonfinite`.
        spike: the `Spike`, if it was one.
    """

    def __init__(self, message, parts=None, policy=None, spike=None):
        super().__init__(message)
        self.parts, self.policy, self.spike = parts, policy, spike


class Skips:
    """Counts the updates of a trainer that were not finite. On the host."""

    def __init__(self, owner):
        self._owner = owner
        self.total = 0
        self.in_a_row = 0
        self._last = self._first = self._reason = None

    @property
    def follow(self):
        """Whether the last update was skipped for good: not for a loss scale that was too large."""
        return self.in_a_row > 0 and self._last == self._owner.counters.step - 1

    def count(self, step, parts=None):
        """Notes that the update after `step` updates was skipped; raises if it is one too many."""
        owner = self._owner
        self.total += 1
        follows = self._last is not None and step == self._last + 1
        self._last = step
        if owner.loss_scale.shrink():
            return
        self.in_a_row = self.in_a_row + 1 if follows else 1
        if self.in_a_row == 1:
            self._first, self._reason = step, broken(owner)
        if owner.on_nonfinite == "raise":
            raise NonFiniteUpdates(
                f"The update of step {step} is not finite: {self._reason}. It was not applied. Lower the learning "
                "rate, set `clip_norm`, check the data of this step, or set `on_nonfinite` to 'skip' to skip it.",
                parts,
            )
        if self.in_a_row >= owner.max_skipped:
            raise NonFiniteUpdates(
                f"{self.in_a_row} updates in a row were not finite, from step {self._first} on: {self._reason}. "
                "None of them was applied. Lower the learning rate, set `clip_norm`, or check the data of these "
                "steps.",
                parts,
            )

    def count_spike(self):
        """Notes that an update was skipped as a spike, which is finite."""
        self.total += 1

    def state(self):
        """As JSON can hold it, for a checkpoint."""
        row = self.in_a_row if self.follow else 0
        return {
            "total": self.total,
            "in_a_row": row,
            "last": self._last,
            "first": self._first,
            "reason": self._reason,
        }

    def restore(self, state):
        self.total, self.in_a_row = state["total"], state["in_a_row"]
        self._last, self._first, self._reason = state["last"], state["first"], state["reason"]


def broken(owner):
    """Which losses of the latest update were not finite, in words."""
    for minimizer in owner.minimizers.values():
        if minimizer.last is None:
            continue
        values = owner.ledger.last(minimizer)
        bad = {name: value for name, value in values["loss"].items() if not math.isfinite(value)}
        if bad:
            return ", ".join(f"loss/{name} became {value}" for name, value in bad.items())
        if not math.isfinite(values["norm"]):
            return f"the gradient norm became {values['norm']} while every loss was finite"
    moved = [path_of(v) for minimizer in owner.minimizers.values() for v in checked_state(owner, minimizer.moved)]
    if moved:
        return f"one of {moved}, which the forward pass moves, became non-finite while losses and gradients were finite"
    return "a value became non-finite"


def checked_state(owner, moved):
    """Those of the variables that a forward pass moved that must stay finite: statistics and states, not metrics."""
    metrics = owner.forward_state.are_metrics(moved)
    return [v for v, metric in zip(moved, metrics, strict=True) if not metric and raw(v).dtype.is_floating]


def state_number(owner, moved, values):
    """A scalar that is 0 if the new values of `checked_state` are finite, else NaN. Traced or eager.

    A variance that overflows makes BatchNorm's outputs 0 in training, so that no loss shows it, and its moving average
    infinite from then on.
    """
    checked = {id(variable) for variable in checked_state(owner, moved)}
    found = [value for variable, value in zip(moved, values, strict=True) if id(variable) in checked]
    return tf.add_n([tf.reduce_sum(tf.cast(value, tf.float32) * 0.0) for value in found]) if found else 0.0
