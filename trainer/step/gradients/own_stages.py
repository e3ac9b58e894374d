"""Stages of a user's own in the update: between clipping and `transform_gradients`, once per update."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from looptape.trainer.step.gradients.stage_state import StageState
from looptape.trainer.step.gradients.stages import to_dense
from looptape.trainer.step.gradients.transformation import UpdateStage
from looptape.trainer.variables import path_of, raw


class Stage(NamedTuple):
    """A stage of the update, as in Optax: a name and two pure functions.

    Args:
        name: shown by `Trainer.summary()`.
        init: `(variables) -> state`: the initial state, a structure of arrays or tensors; `()` for none. The trainer
            keeps it in variables, and checkpoints hold it. Where layers are frozen or unfrozen, entries of lists and
            rows of tensors that stand for a variable follow it; those of a frozen one wait, and the rest stays.
        apply: `(gradients, state, variables, step) -> (gradients, state)`. Traced, outside the replicas, after
            accumulation, the finite check and clipping. Gradients are dense, one for each variable; `step` is the
            number of updates made so far, an int64 tensor. Derive seeds from it, and random numbers resume exactly.

    >>> halve = Stage("halve", lambda variables: (), lambda g, state, variables, step: ([0.5 * x for x in g], state))
    >>> halve.name
    'halve'
    """

    name: str
    init: Callable
    apply: Callable


def check_stages(stages: Sequence) -> tuple[Stage, ...]:
    """The stages as a tuple of `Stage`; plain triples are accepted."""
    checked = []
    for stage in stages:
        if not isinstance(stage, tuple | list) or len(stage) != 3:
            raise TypeError(
                f"`stages` has {stage!r}; each must be a `looptape.Stage` or a triple (name, init, apply). Use e.g. "
                "Stage('noise', lambda variables: (), apply)."
            )
        name, init, apply = stage
        if not isinstance(name, str) or not name or not callable(init) or not callable(apply):
            raise TypeError(
                f"`stages` has ({name!r}, {init!r}, {apply!r}); a stage is a name and two functions: init(variables) "
                "and apply(gradients, state, variables, step)."
            )
        checked.append(Stage(name, init, apply))
    names = [stage.name for stage in checked]
    if len(set(names)) < len(names):
        raise ValueError(f"`stages` has the names {names}; they must differ. Rename one.")
    return tuple(checked)


class OwnStages:
    """The user's stages of one minimizer, with their state in variables.

    Args:
        stages: checked.
        make_variable: `(value, name) -> tf.Variable` of the trainer.
    """

    def __init__(self, stages, make_variable):
        self._stages = stages
        self._states = [StageState(stage.name, stage.init, make_variable) for stage in stages]

    def named_variables(self):
        """[(path, variable)] of all states, in a fixed order."""
        return [named for state in self._states for named in state.named_variables()]

    def build(self, variables, joining):
        """Makes the states, and what is new of them where others are trained; see `StageState.build`."""
        for state in self._states:
            state.build(variables, joining)

    def as_list(self, owner):
        """The stages for the list of an update."""

        def runner(index):
            return lambda gradients, variables: self._run(index, gradients, variables, owner.step.value())

        return [UpdateStage(stage.name, "transform", runner(index)) for index, stage in enumerate(self._stages)]

    def _run(self, index, gradients, variables, step):
        """(the gradients after a stage, [(variable of its state, new value)]). Traced or eager."""
        stage, state = self._stages[index], self._states[index]
        gradients = [to_dense(gradient) for gradient in gradients]
        values = [raw(variable) for variable in variables]
        gradients, new = _checked(stage, stage.apply(gradients, state.values(), values, step), gradients, variables)
        return gradients, state.writes(new)


def _checked(stage, result, gradients, variables):
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], tuple | list):
        raise TypeError(
            f"Stage {stage.name!r} returned a {type(result).__name__}; `apply` must return (gradients, state). Return "
            "the state as it came where there is none."
        )
    found, new = list(result[0]), result[1]
    if len(found) != len(gradients):
        raise ValueError(
            f"Stage {stage.name!r} returned {len(found)} gradients for {len(gradients)} variables; it must return one "
            "for each, in their order."
        )
    for before, after, variable in zip(gradients, found, variables, strict=True):
        if not before.shape.is_compatible_with(after.shape) or before.dtype != after.dtype:
            raise ValueError(
                f"Stage {stage.name!r} returned a gradient of shape {after.shape} and type {after.dtype.name} for "
                f"{path_of(variable)}, which has {before.shape} and {before.dtype.name}. Keep shape and type."
            )
    return found, new
