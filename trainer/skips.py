"""Updates that were not finite: how many, how many in a row, and when that is too much."""

import math


class NonFiniteUpdates(FloatingPointError):
    """Too many updates were not finite. Nothing was applied since the first of them.

    Args:
        message: what happened and what to do.
        parts: the micro-batches of the latest such update, or None if they are not at hand.
    """

    def __init__(self, message, parts=None):
        super().__init__(message)
        self.parts = parts


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
        return self.in_a_row > 0 and self._last == self._owner.host_step - 1

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
                "rate, set `clip_norm`, check the data of this step, or set `on_nonfinite` to 'skip' to pass over it.",
                parts,
            )
        if self.in_a_row >= owner.max_skipped:
            raise NonFiniteUpdates(
                f"{self.in_a_row} updates in a row were not finite, from step {self._first} on: {self._reason}. "
                "Nothing was applied since. Lower the learning rate, set `clip_norm`, or check the data "
                "of these steps.",
                parts,
            )

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
    return "a value became non-finite"
