"""Explains a spike: re-runs its update eagerly, before anything of it is written."""

import numpy as np
import tensorflow as tf

from looptape.trainer.debug import dry_run
from looptape.trainer.debug.nonfinite_report import named_losses
from looptape.trainer.variables import path_of

_MOST = 3  # of everything that is listed


def examine(trainer, minimizer, parts):
    """The examples, variables and time steps that carried an update, in lines. Nothing is changed."""
    lines = []
    with dry_run.undone(trainer):
        for index, part in enumerate(parts):
            place = f"micro-batch {index} of {len(parts)}: " if len(parts) > 1 else ""
            for look in (_examples, _variables, _time_steps):
                try:
                    lines += [f"  {place}{line}" for line in look(trainer, minimizer, part)]
                except Exception as error:  # a model that does not run eagerly, a `train_step` with batches of its own
                    lines.append(f"  {place}not known ({type(error).__name__}: {str(error).splitlines()[0]})")
    return "\n".join(lines)


def _examples(trainer, minimizer, part):
    lines = []
    for name, values in named_losses(trainer, part, minimizer.compute_losses).items():
        values = values.numpy()
        if not values.ndim or len(values) < 2:
            continue
        each = values.reshape(len(values), -1).mean(axis=1)
        order = np.argsort(each)[::-1][:_MOST]
        shown = ", ".join(f"{index} ({each[index]:.3g})" for index in order.tolist())
        lines.append(f"loss/{name}: largest for examples {shown}; median {np.median(each):.3g}")
    return lines


def _variables(trainer, minimizer, part):
    result = minimizer.run_micro(part, trainer.read_state(), trainer.step.value(), trainer.loss_scale.value())
    squares = np.zeros(len(minimizer.trained))
    for group in result.gradients:
        squares += [float(tf.reduce_sum(tf.square(tf.convert_to_tensor(gradient)))) for gradient in group]
    shares = squares / max(squares.sum(), np.finfo(float).tiny)
    order = np.argsort(shares)[::-1][:_MOST]
    names = [path_of(variable) for variable in minimizer.trained]
    shown = ", ".join(f"{names[index]} ({shares[index]:.0%})" for index in order.tolist())
    return [f"the squared gradient norm lies in {shown}"]


def _time_steps(trainer, minimizer, part):
    lines = []
    for layer, quantities in _timestep_gradients(trainer, part).items():
        state = quantities.get("state")
        if state is None or not np.isfinite(state).any():
            continue
        order = np.argsort(np.nan_to_num(state))[::-1][:_MOST]
        shown = ", ".join(f"{index} ({state[index]:.3g})" for index in order.tolist())
        lines.append(f"{layer}: the state gradient is largest at time steps {shown}; median {np.nanmedian(state):.3g}")
    return lines


def _timestep_gradients(trainer, part):
    try:
        return trainer.inspection.timestep_gradients(part, False, False)
    except ValueError:  # no loop in the model
        return {}
