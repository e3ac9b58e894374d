"""Immutable values: the settings that an update is traced with, and the plan that its trace yields."""

import enum
from typing import Any, NamedTuple

import tensorflow as tf


class Backward(enum.Enum):
    """How the losses of a micro-batch are differentiated."""

    FOLDED = "one pass over the weighted mean: the micro-batch is the whole update"
    GROUPED = "one pass for each group of losses with proportional divisors"
    PER_LOSS = "one pass for each loss"
    CUT = "one pass for each loss down to the shared features, if there are any, then one through what made them"

    @property
    def per_loss(self):
        return self in (Backward.PER_LOSS, Backward.CUT)


class Mode(NamedTuple):
    """Which form of the update is being traced. The plain one ends its call by an assertion that fails."""

    probing: bool = False  # it reports the gradients of every time step
    examining: bool = False  # it reports the health of every variable
    aborting: bool = True  # a failed check ends the call; else it makes the update do nothing


class Asked(NamedTuple):
    """The arguments of a call of `minimize`: one name stands for one set of them."""

    variables: Any  # [id of a variable], or None for the model's trainable ones
    optimizer: Any  # None for the trainer's
    compute_losses: Any
    loss_weights: Any

    def check(self, before, name, repeated):
        """Raises an error if these are not the arguments of the call `before` of the same name.

        Functions and schedules written in `train_step` are new objects in every trace: they are compared only if the
        call is `repeated` within one trace.
        """
        compared = self._fields if repeated else ("variables", "optimizer")
        changed = [each for each in compared if getattr(self, each) != getattr(before, each)]
        if not changed:
            return
        known = (
            f"`minimize` was called with name={name!r} before, and now with the same name and other "
            f"{' and '.join(f'`{argument}`' for argument in changed)}; one name stands for one set of losses, "
            "variables and optimizer. "
        )
        again = [each for each in changed if _written_again(getattr(before, each), getattr(self, each))]
        if again == changed:
            raise ValueError(
                f"{known}A function that is written inside a loop is another one in each pass. Write it before the "
                "loop, and pass the batch as its argument."
            )
        raise ValueError(f"{known}Give each of them a name of its own: `self.minimize(batch, …, name='generator')`.")


def _written_again(old, new):
    """Whether two functions, or the functions of two dicts, come from the same lines of a program."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(old[key], new[key]) for key in old if key in new and old[key] != new[key]]
        return list(old) == list(new) and all(_written_again(*pair) for pair in pairs)
    code = getattr(old, "__code__", None)
    return code is not None and code is getattr(new, "__code__", None)


class LossPlan(NamedTuple):
    """Findings of a forward pass about its losses. Lists are in the order of the losses."""

    names: list  # of the losses
    logged: list  # names of the `log` calls
    groups: list  # [groups][indices of losses]: one gradient each
    ratios: list  # of each loss's divisor to that of its group
    moved: list  # variables that the forward pass assigns
    summed: list  # [bool]: it is a sum over the whole update, not a mean

    def whole(self, divisors):
        """Divisors of a whole update from sums over its parts: a sum has 1, however many parts there are."""
        pairs = zip(divisors, self.summed, strict=True)
        return [tf.minimum(divisor, 1.0) if is_sum else divisor for divisor, is_sum in pairs]


class Plan(NamedTuple):
    """Findings of the trace of a micro-batch about its result."""

    losses: LossPlan
    live: list  # [bool] of the trainable variables: does some loss reach it?
    shared: list | None  # [bool] of the live variables: the combiner's coefficients are for these; None for all
    combined: bool  # the gradients are combined already, by one pass through shared features
    shapes: dict  # {probe: shape} of `probe` calls in nested loops; of a probed update
    reversed: frozenset  # probed layers that read their sequence from its end
    cells: dict  # {probed layer: class of its cell}


class MicroResult(NamedTuple):
    """Contributions of a micro-batch to the update. Fields that do not apply are None; `ADDITIVE` add up."""

    gradients: Any  # [groups][variables]
    sums: Any  # K scalars
    divisors: Any  # K scalars
    examples: Any  # scalar
    logged: Any  # M scalars: value · examples of each `log` call
    products: Any  # [K, K] of the shared features' gradients, where they are summed up
    total: Any  # what was differentiated, where that is the whole update
    coefficients: Any  # [K] from the combiner; None where all are 1
    measured: Any  # by the combiner, where that is the whole update
    state: Any  # new values of the variables that the forward pass moved
    report: Any  # `probe_report.Report` of a probed or examined update


ADDITIVE = ("gradients", "sums", "divisors", "examples", "logged", "products")
