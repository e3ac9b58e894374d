"""Runs the stages that change an update's gradients: checks their results and passes logs out of a conditional."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from looptape.trainer.step.gradients.stages import global_norm
from looptape.trainer.variables import path_of


class UpdateStage(NamedTuple):
    """A stage of an update, in the list that `Trainer.summary` prints.

    Args:
        name: as it is printed.
        kind: "sum" (the minimizer's, up to the gradient), "check", "limit", "transform" or "write".
        run: what it does, by kind: "limit" `(gradients, norm) -> gradients`; "transform" `(gradients, variables) ->
            (gradients, [(variable of its state, new value)])`; "write" `(gradients, variables)`.
    """

    name: str
    kind: str
    run: Callable | None = None


def hook_stage(owner):
    """The hook `transform_gradients` as a stage; None where it is not overridden."""
    if not owner.overrides("transform_gradients"):
        return None

    def run(gradients, variables):
        transformed = owner.hook("transform_gradients")(gradients, variables)
        if not isinstance(transformed, list | tuple) or len(transformed) != len(variables):
            count = len(transformed) if isinstance(transformed, list | tuple) else type(transformed).__name__
            raise ValueError(
                f"`transform_gradients` got {len(variables)} gradients and returned {count}; it must return a list "
                "with one for each variable, in the same order. Return those that do not change as they are."
            )
        for gradient, variable in zip(transformed, variables, strict=True):
            shape = getattr(gradient, "shape", None)
            if shape is None or not tf.TensorShape(variable.shape).is_compatible_with(shape):
                given = f"a gradient of shape {shape}" if shape is not None else type(gradient).__name__
                raise ValueError(
                    f"`transform_gradients` returned {given} for {path_of(variable)!r}, of shape {variable.shape}; it "
                    "must have the variable's shape. Use tf.zeros_like(gradient) for no change, and the given order."
                )
        return list(transformed), []

    return UpdateStage("transform_gradients", "transform", run)


def write_finite(owner, transforms, number, gradients, variables, apply, message):
    """Transforms the gradients and calls `apply` with them, unless `number` or what comes out is not finite.

    Traced or eager. Where the trainer aborts, an assertion with `message` ends the call; else nothing is applied.

    Returns:
        An operation that fails, or a boolean tensor that is False, if the update is not finite.
    """
    if not owner.mode.aborting:
        return _conditionally(owner, transforms, number, gradients, variables, apply)
    check = tf.debugging.check_numerics(number, message)
    states = []
    if transforms:
        with tf.control_dependencies([check]):
            gradients, states, norm = _transformed(transforms, gradients, variables)
            check = tf.debugging.check_numerics(norm, message)
    with tf.control_dependencies([check]), owner.division.write():
        _assign(states)
        apply(gradients)
    return check


def _conditionally(owner, transforms, number, gradients, variables, apply):
    names = []

    def run():
        if not transforms:
            with owner.division.write():
                return apply(gradients), []
        with owner.collecting_logs() as logged:
            transformed, states, norm = _transformed(transforms, gradients, variables)
        names[:] = logged

        def commit():
            with owner.division.write():
                _assign(states)
                return apply(transformed)

        done = tf.cond(tf.math.is_finite(norm), commit, lambda: tf.constant(False))
        return done, list(logged.values())

    skip = lambda: (tf.constant(False), [tf.zeros([]) for _ in names])  # noqa: E731
    done, values = tf.cond(tf.math.is_finite(number), run, skip)
    owner.tracing.logs[-1].update(zip(names, values, strict=True))
    return done


def _transformed(transforms, gradients, variables):
    """(the gradients after all stages, [(variable, new value)] of their state, the global norm of both)."""
    states = []
    for stage in transforms:
        gradients, moved = stage.run(gradients, variables)
        states += moved
    floats = [value for _, value in states if value.dtype.is_floating]
    return gradients, states, global_norm([*gradients, *floats])


def _assign(states):
    for variable, value in states:
        variable.assign(value)
