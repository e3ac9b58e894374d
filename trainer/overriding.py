"""Methods that a subclass of `Trainer` has in place of the hooks' defaults."""

import functools
import inspect
import sys

import tensorflow as tf


def overrides(trainer, base, method):
    """Whether a subclass of `base` has a method of its own in place of the base's."""
    return getattr(type(trainer), method) is not getattr(base, method)


HOOKS = ("compute_losses", "train_step", "eval_step", "transform_gradients", "transform_timestep_gradient")


@tf.autograph.experimental.do_not_convert
def check_place(trainer, method):
    """Refuses a method outside the hooks, where what it logs would belong to no update.

    Allowed inside a hook that its author called by hand, to look at what it returns.
    """
    frame = sys._getframe(1)
    while frame is not None:
        # AutoGraph names what it converted `tf__compute_losses`.
        if frame.f_code.co_name.removeprefix("tf__") in HOOKS and frame.f_locals.get("self") is trainer:
            return
        frame = frame.f_back
    raise RuntimeError(
        f"`{method}` was called outside the hooks of {type(trainer).__name__}; what it logs must belong to an "
        f"update or an evaluation. Call it in {', '.join(HOOKS[:-1])} or {HOOKS[-1]}, or in what they call."
    )


def converted(bound):
    """A bound method with its Python control flow converted by AutoGraph, or as it is if it has no source.

    Called eagerly (`run_eagerly`) it runs as it is written, where a debugger can stop.
    """

    def run(*arguments, **options):
        _check(bound, arguments, options)
        hook = bound if tf.executing_eagerly() else _in_graphs(bound)
        return hook(*arguments, **options)

    return run


def _check(bound, arguments, options):
    """Refuses a hook that cannot take its arguments, by the name that its author knows."""
    try:
        inspect.signature(bound).bind(*arguments, **options)
    except TypeError as error:
        first = [c for c in type(bound.__self__).__mro__ if hasattr(c, bound.__name__)][-1:]  # none for a lambda
        wanted = [f"({', '.join(inspect.signature(getattr(c, bound.__name__)).parameters)})" for c in first]
        raise TypeError(
            f"`{bound.__name__}` of {type(bound.__self__).__name__} takes {inspect.signature(bound)}, which does not "
            f"fit: {error}. {f'Define it as {bound.__name__}{wanted[0]}.' if wanted else 'See the guide on hooks.'}"
        ) from None


def _in_graphs(bound):
    try:
        return functools.partial(tf.autograph.to_graph(bound.__func__), bound.__self__)
    except Exception:  # source not available (an interactive session): the hook runs as it is written
        return bound
