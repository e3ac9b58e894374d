"""Several optimizers as one, each for its own variables; and an optimizer that learns of more variables."""

import re

import keras

from looptape.trainer.variables import path_of, raw


class OptimizerGroup:
    """Optimizers by the paths of the variables they train: per-layer learning rates, parts without weight decay.

    `Trainer(model, {"encoder/.*": Adam(1e-4), ".*": Adam(1e-3)})` makes one. A variable goes to the first pattern that
    its path matches from the beginning.

    Args:
        optimizers: {regular expression: Keras optimizer}.
    """

    def __init__(self, optimizers):
        self._optimizers = dict(optimizers)
        self.built = False
        self._assigned = {}

    def build(self, variables, frozen=()):
        """Builds each optimizer for its variables. One whose variables are all among the `frozen` waits for them."""
        for pattern, part in self._parts(variables, frozen).items():
            if part:
                self._optimizers[pattern].build(part)
        self.built = True

    def extended(self, variables):
        """A group for more variables, see the function `extended`."""
        group = OptimizerGroup(self._optimizers)
        for pattern, part in group._parts(variables, trained_by(self)).items():
            group._optimizers[pattern] = extended(self._optimizers[pattern], part)
        group._assigned = {**self._assigned, **group._assigned}
        group.built = True
        return group

    def _parts(self, variables, frozen):
        """{pattern: its variables}; refuses variables without a pattern, and patterns without a variable."""
        parts = {pattern: [] for pattern in self._optimizers}
        for variable in variables:
            pattern = next((p for p in self._optimizers if re.match(p, variable.path)), None)
            if pattern is None:
                raise ValueError(
                    f"No optimizer is given for {variable.path!r}: it matches none of {list(self._optimizers)}. "
                    'Add a last pattern ".*" for all others.'
                )
            parts[pattern].append(variable)
            self._assigned[id(raw(variable))] = pattern
        waiting = {next((p for p in self._optimizers if re.match(p, v.path)), None) for v in frozen}
        unused = [pattern for pattern, part in parts.items() if not part and pattern not in waiting]
        if unused:
            paths = [variable.path for variable in variables]
            raise ValueError(
                f"The patterns {unused} match no variable, or only variables that an earlier pattern takes. The "
                f"variables are {paths}. A pattern must match the path from its beginning; start it with `.*` to match "
                "anywhere."
            )
        return parts

    def apply(self, gradients, variables):
        pairs = list(zip(gradients, variables, strict=True))
        for pattern, optimizer in self._optimizers.items():
            own = [(g, v) for g, v in pairs if self._assigned[id(raw(v))] == pattern]
            if own:  # all of them may be frozen
                optimizer.apply([g for g, _ in own], [v for _, v in own])

    @property
    def variables(self):
        return [variable for optimizer in self._optimizers.values() for variable in optimizer.variables]

    @property
    def iterations(self):
        return next(iter(self._optimizers.values())).iterations

    @property
    def learning_rate(self):
        """That of the last pattern, the general one."""
        return list(self._optimizers.values())[-1].learning_rate

    @learning_rate.setter
    def learning_rate(self, value):
        self.refuse_one_rate(f"One learning rate, {value}, was set")

    def refuse_one_rate(self, what):
        """Raises an error about what sets a learning rate for all."""
        raise ValueError(
            f"{what} for several optimizers, {list(self._optimizers)}; each has its own. "
            "Set them in a callback of your own, `trainer.optimizer.learning_rates[pattern].assign(…)`, or give each "
            "optimizer a schedule."
        )

    @property
    def learning_rates(self):
        """{pattern: learning rate}."""
        return {pattern: optimizer.learning_rate for pattern, optimizer in self._optimizers.items()}

    def values(self):
        return list(self._optimizers.values())


def build(optimizer, variables, known):
    """Builds an optimizer or a group; `known` are all variables of the model, those that are frozen included."""
    optimizer.build(variables, **({"frozen": known} if isinstance(optimizer, OptimizerGroup) else {}))


def trained_by(optimizer):
    """The variables an optimizer was built for. (Keras keeps the list in a private attribute only.)"""
    members = optimizer.values() if isinstance(optimizer, OptimizerGroup) else [optimizer]
    return [variable for member in members for variable in member._trainable_variables]


def takes_any_size(optimizer):
    """Whether the optimizer is known not to square gradients: their squares may overflow, and moments remember it."""
    members = optimizer.values() if isinstance(optimizer, OptimizerGroup) else [optimizer]
    return all(type(member) in (keras.optimizers.SGD, keras.optimizers.Lion) for member in members)


def check_built_for(optimizer, variables):
    """Complains about an optimizer that was used with another model."""
    if isinstance(optimizer, OptimizerGroup) or not optimizer.built:
        return
    known = {id(raw(variable)) for variable in trained_by(optimizer)}
    foreign = [path_of(v) for v in variables if id(raw(v)) not in known]
    if foreign:
        raise ValueError(
            f"The optimizer was built for other variables; it does not know {foreign}. Make a new optimizer for each "
            "model: type(optimizer).from_config(optimizer.get_config())."
        )


def extended(optimizer, variables):
    """An optimizer for more variables. For those that the given one knows, it continues with the given one's state.

    A Keras optimizer cannot learn of variables after it was built: a new one is made and the moments are copied.
    """
    known = {id(raw(variable)): index for index, variable in enumerate(trained_by(optimizer))}
    if all(id(raw(variable)) in known for variable in variables):
        return optimizer
    if isinstance(optimizer, OptimizerGroup):
        return optimizer.extended(variables)
    everything = [*trained_by(optimizer), *(v for v in variables if id(raw(v)) not in known)]
    new = type(optimizer).from_config(optimizer.get_config())
    new.build(everything)
    new.iterations.assign(optimizer.iterations)
    if isinstance(getattr(optimizer, "_learning_rate", None), keras.Variable):
        new.learning_rate.assign(optimizer.learning_rate)
    for name, slots in vars(optimizer).items():
        if isinstance(slots, list) and len(slots) == len(known) and name != "_trainable_variables":
            for old, copy in zip(slots, getattr(new, name), strict=False):
                if isinstance(old, keras.Variable):
                    copy.assign(old)
    return new


def extend(optimizer, variables):
    """As `extended`, but the given optimizer itself learns of the variables: someone else keeps it, too."""
    new = extended(optimizer, variables)
    if new is not optimizer:
        vars(optimizer).update(vars(new))
