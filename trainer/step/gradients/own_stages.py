"""Stages of a user's own in the update: between clipping and `transform_gradients`, once per update."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from looptape.trainer.step.gradients.stages import to_dense
from looptape.trainer.step.gradients.transformation import UpdateStage
from looptape.trainer.variables import path_of, raw


class Stage(NamedTuple):
    """A stage of the update, as in Optax: a name and two pure functions.

    Args:
        name: shown by `Trainer.summary()`.
        init: `(variables) -> state`: the initial state, a structure of arrays or tensors; `()` for none. The trainer
            keeps it in variables, and checkpoints hold it.
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
        self._stages, self._make_variable = stages, make_variable
        self._states: list[Any] | None = None

    @property
    def variables(self):
        """The variables of all states, in a fixed order."""
        return tf.nest.flatten(self._states or [])

    def named_variables(self):
        """[(path, variable)], in the same order: the stage's name, then keys and positions in its state."""
        pairs = zip(self._stages, self._states or [], strict=False)
        return [named for stage, state in pairs for named in _with_paths(stage.name, state)]

    def build(self, variables):
        """Makes the states. Traced or eager, before anything is written; once."""
        if self._states is not None:
            return
        self._states = []
        for stage in self._stages:
            with tf.init_scope():
                first = tf.nest.map_structure(tf.convert_to_tensor, stage.init([raw(v) for v in variables]))
            self._states.append(tf.nest.map_structure(lambda x: self._make_variable(x, "stage"), first))

    def forget(self):
        """Begins anew: other variables are trained."""
        self._states = None

    def as_list(self, owner):
        """The stages for the list of an update."""

        def runner(index):
            return lambda gradients, variables: self._run(index, gradients, variables, owner.step.value())

        return [UpdateStage(stage.name, "transform", runner(index)) for index, stage in enumerate(self._stages)]

    def _run(self, index, gradients, variables, step):
        """(the gradients after a stage, [(variable of its state, new value)]). Traced or eager."""
        stage, state = self._stages[index], self._states[index]
        gradients = [to_dense(gradient) for gradient in gradients]
        present = tf.nest.map_structure(tf.convert_to_tensor, state)
        values = [raw(variable) for variable in variables]
        gradients, new = _checked(stage, stage.apply(gradients, present, values, step), gradients, variables, state)
        values = [tf.convert_to_tensor(value) for value in tf.nest.flatten(new)]
        return gradients, list(zip(tf.nest.flatten(state), values, strict=True))


def _with_paths(path, state):
    """Yields (path, leaf) of a structure, in the order of `tf.nest.flatten`."""
    if isinstance(state, Mapping):
        parts = [(key, state[key]) for key in sorted(state)]
    elif isinstance(state, tuple | list):
        parts = zip(getattr(state, "_fields", range(len(state))), state, strict=True)
    else:
        yield path, state
        return
    for key, part in parts:
        yield from _with_paths(f"{path}/{key}", part)


def _checked(stage, result, gradients, variables, state):
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
    tf.nest.assert_same_structure(state, new)
    return found, new
