"""The weight of each loss: numbers in variables, or schedules of the step."""

import math

import numpy as np
import tensorflow as tf

from looptape.trainer.recurrent import internals

REGULARIZATION = "regularization"
RESERVED = ("loss", "total", "sum")  # what sums of several losses are called in logs and TensorBoard
_NAMES = "Every loss needs exactly one weight. Losses without a weight: {}; weights without a loss: {}."


def refuse_metrics_named_like_losses(names, metrics):
    """Raises an error if a metric has the name of a loss: logs and results would show only one of them."""
    for name, metric in metrics.items():
        if name in names:
            raise ValueError(
                f"{name!r} is the name of a loss and of a metric; one would hide the other. Give the metric "
                f"another name, e.g. metrics={{'{name}_{metric.name}': …}}."
            )


class WrongLossNames(ValueError):
    """Weights that are not those of the losses.

    Args:
        missing: losses without a weight.
        unknown: weights without a loss.
        losses: the names of all losses.
    """

    def __init__(self, missing, unknown, losses):
        super().__init__(_NAMES.format(missing, unknown))
        self.unknown, self.losses = list(unknown), list(losses)


class LossWeights:
    """The weight of each loss: a number in a variable, so that it changes without a retrace, or a schedule.

    Behaves like a dict: `trainer.loss_weights["penalty"] = 0.1` takes effect at the next update.
    """

    def __init__(self, weights, make_variable):
        self._make_variable = make_variable
        if weights is not None and not hasattr(weights, "keys"):
            raise TypeError(
                f"`loss_weights` is {weights!r}; it must be a dict {{name of the loss: number or schedule}}. Use e.g. "
                "loss_weights={'error': 1.0}."
            )
        weights = dict(weights or {})
        for name, weight in weights.items():
            self._check(name, weight)
        self._given = weights
        self._schedules = {name: weight for name, weight in weights.items() if callable(weight)}
        self._variables = {}
        self.names = None

    @staticmethod
    def _check(name, weight):
        if callable(weight):
            weight = getattr(weight, "final", 0.0)  # the other values of a schedule are checked at each step
        try:
            number = float(weight)
        except (TypeError, ValueError):
            raise TypeError(
                f"The weight of loss {name!r} is {weight!r}; it must be a number or a schedule: a callable that "
                "takes the step and returns a number."
            ) from None
        if not math.isfinite(number) or number < 0:
            raise ValueError(
                f"The weight of loss {name!r} is {number}; it must be finite and not negative. "
                "To maximise a quantity, return its negative from the loss."
            )

    def build(self, names):
        """Fixes the order of the losses. If any weight was given, every loss but the regularization needs one."""
        if self.names is not None:
            if list(names) != self.names:
                raise ValueError(
                    f"The losses were {self.names} and are now {list(names)}; a trainer's losses cannot change "
                    "their names. Return the same names from `compute_losses` every time."
                )
            return
        unknown = [name for name in self._given if name not in names]
        missing = [name for name in names if name not in self._given and name != REGULARIZATION]
        if unknown or (self._given and missing):
            raise WrongLossNames(missing, unknown, names)
        self._refuse_reserved(names)
        self.names = list(names)
        for name in names:
            if name not in self._schedules:
                number = np.float32(self._given.get(name, 1.0))
                self._variables[name] = self._make_variable(number, f"loss_weight_{len(self._variables)}")

    def _refuse_reserved(self, names):
        """The names of sums, unless the only loss is the sum: it has the weight 1."""
        plain = len(names) == 1 and self._given.get(names[0], 1.0) == 1.0
        taken = [name for name in names if name in RESERVED]
        if taken and not plain:
            raise ValueError(
                f"A loss is named {taken[0]!r}, the name under which a sum of the losses {list(names)} is logged; one "
                f"would hide the other. Give it another name than {', '.join(RESERVED)}."
            )

    def check_names(self, losses):
        """Raises unless the weights given are those of the losses; the regularization may have one."""
        missing = [name for name in losses if name not in self._given]
        unknown = [name for name in self._given if name not in losses and name != REGULARIZATION]
        if missing or unknown:
            raise WrongLossNames(missing, unknown, losses)

    @property
    def variables(self):
        return list(self._variables.values())

    def named_variables(self):
        """[(name of the loss, variable)] of the weights that are numbers."""
        return list(self._variables.items())

    def at(self, step):
        """The weights at a step, a list of K scalars in the order of the names. Traced or eager."""
        return [
            self._scheduled(name, self._schedules[name], step)
            if name in self._schedules
            else tf.convert_to_tensor(self._variables[name])
            for name in self.names
        ]

    def scalars(self, names, step):
        """As `at`, for losses whose order is not fixed yet."""
        if self.names is not None:
            return self.at(tf.convert_to_tensor(step))
        given = [self._given.get(name, 1.0) for name in names]
        step, pairs = tf.convert_to_tensor(step), zip(names, given, strict=True)
        return [self._scheduled(name, w, step) if callable(w) else tf.cast(w, tf.float32) for name, w in pairs]

    @staticmethod
    def _scheduled(name, schedule, step):
        """The weight by a schedule. One below 0 is an error when the update runs, or NaN under XLA, which skips it."""
        weight = tf.cast(tf.reshape(schedule(step), []), tf.float32)
        if internals.in_xla():
            return tf.where(weight < 0, math.nan, weight)
        message = tf.strings.format(
            f"The weight of loss {name!r} is {{}} at step {{}} by its schedule; it must not be negative. Correct the "
            "schedule; to maximise a quantity, return its negative from the loss.",
            (weight, step),
        )
        if tf.executing_eagerly() and weight < 0:
            raise ValueError(message.numpy().decode())
        with tf.control_dependencies([tf.debugging.Assert(~(weight < 0), [message])]):
            return tf.identity(weight)

    def static(self):
        """{name: number} that never changes with the step: a schedule counts with the value it settles at."""
        values = {}
        for name in self.names or self._given:
            if name in self._schedules:
                schedule = self._schedules[name]
                final = getattr(schedule, "final", None)
                values[name] = float(schedule(tf.constant(10**9, tf.int64)) if final is None else final)
            else:
                values[name] = self[name]
        return values

    def replaced(self):
        """{name: (number as given, number now)} of the weights that a checkpoint or an assignment has replaced."""
        present = {name: float(variable.numpy()) for name, variable in self._variables.items()}
        given = {name: float(np.float32(self._given.get(name, 1.0))) for name in present}
        return {name: (given[name], present[name]) for name in present if given[name] != present[name]}

    def __getitem__(self, name):
        if name in self._schedules:
            return self._schedules[name]
        if self.names is None:
            return float(self._given[name]) if self._given else 1.0
        if name not in self.names:
            raise KeyError(f"There is no loss {name!r}; the losses are {self.names}.")
        return float(self._variables[name].numpy())

    def __setitem__(self, name, weight):
        self._check(name, weight)
        if callable(weight) or name in self._schedules:
            raise ValueError(
                f"The weight of loss {name!r} would change between a number and a schedule; that needs a new trace. "
                "Make a new trainer, or use a schedule that reads a variable."
            )
        if self.names is None:
            self._given[name] = float(weight)
            return
        if name not in self.names:
            raise KeyError(f"There is no loss {name!r}; the losses are {self.names}.")
        self._variables[name].assign(float(weight))

    def __iter__(self):
        return iter(self.names or self._given)

    def __len__(self):
        return len(self.names or self._given)

    def keys(self):
        return list(self)

    def __repr__(self):
        return f"LossWeights({ {name: self[name] for name in self} })"
