"""Checks of what a user passes, each answered in three parts: what was received, what is needed, what to do."""

import difflib
import functools
import inspect
import math
import numbers
import re
import reprlib
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import keras
import numpy as np
import tensorflow as tf

from looptape import losses as losses_package
from looptape.trainer.counters import Phases
from looptape.trainer.optim.optimizer_groups import OptimizerGroup
from looptape.trainer.variables import path_of, raw

# attribute of the optimizer → what to use instead
_REFUSED = {
    "clipnorm": "Use the trainer's `clip_norm`, or override `transform_gradients` to clip each gradient by itself",
    "clipvalue": "Override `transform_gradients`, or use the trainer's `clip_norm`",
    "global_clipnorm": "Use the trainer's `clip_norm`, which clips after the gradients of all replicas are summed",
    "use_ema": "Use the trainer's `ema_decay`, which averages once per update",
    "gradient_accumulation_steps": "Use the trainer's `accumulation_steps`, which equals the large batch exactly",
    "loss_scale_factor": "Leave it out: the trainer scales the loss of float16 models by itself",
}


def check_optimizer(optimizer):
    """A Keras optimizer that leaves clipping, averaging, accumulation and loss scaling to the trainer."""
    if isinstance(optimizer, dict):
        for pattern in optimizer:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"`optimizer` has the pattern {pattern!r}, which is not a regular expression ({error}). Use e.g. "
                    "{'.*/kernel': Adam(1e-3), '.*': Adam(1e-4)}."
                ) from None
        return OptimizerGroup({pattern: check_optimizer(each) for pattern, each in optimizer.items()})
    if isinstance(optimizer, OptimizerGroup):
        return optimizer
    if isinstance(optimizer, str):
        optimizer = _by_name("`optimizer`", optimizer, keras.optimizers, "'adam', or an optimizer")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "`optimizer` is a LossScaleOptimizer; the trainer scales the loss of float16 models by itself. "
            "Pass the inner optimizer."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"`optimizer` is {optimizer!r}; it must be a Keras optimizer or the name of one. "
            "Use e.g. keras.optimizers.Adam(1e-3)."
        )
    for attribute, remedy in _REFUSED.items():
        value = getattr(optimizer, attribute, None)
        if value:
            raise ValueError(
                f"The optimizer has {attribute}={value}; the trainer does this itself, at the right place in the "
                f"update. {remedy}."
            )
    return optimizer


def check_accumulation(value, strategy):
    """A number of micro-batches, numbers by step as `Phases`, or "auto" on one device."""
    if isinstance(value, dict):
        steps = [check_integer("accumulation_steps", step, 0, "Its keys are steps.") for step in value]
        if 0 not in steps:
            raise ValueError(
                f"`accumulation_steps` is {value}; a schedule is {{first step: number}} and must begin at step 0. "
                "Use e.g. {0: 1, 1000: 4}."
            )
        remedy = "A schedule holds numbers of micro-batches by step. Use e.g. {0: 1, 1000: 4}."
        return Phases({step: check_integer("accumulation_steps", value[step], 1, remedy) for step in sorted(steps)})
    if not isinstance(value, str):
        return check_integer("accumulation_steps", value, 1, 'Use 1 for no accumulation, "auto" to fit into memory.')
    if value != "auto":
        raise ValueError(
            f"`accumulation_steps` is {value!r}; it must be an integer of at least 1, or 'auto', which divides a batch "
            "that does not fit into memory. Use 1 for no accumulation."
        )
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            f"`accumulation_steps` is 'auto' with {strategy.num_replicas_in_sync} replicas; an update can be repeated "
            "on one device only, because the others wait for its part. Give a number."
        )
    return value


def check_integer(name, value, least, remedy):
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` is {reprlib.repr(value)}; it must be an integer of at least {least}. {remedy}")
    if value < least:
        raise ValueError(f"`{name}` is {value}; it must be at least {least}. {remedy}")
    return int(value)


def check_batch_count(name, steps):
    if steps is not None:
        check_integer(name, steps, 1, "It is the largest number of batches; use None for all of them.")


def check_positive(name, value, remedy):
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"`{name}` is {value!r}; it must be a positive number or None. {remedy}")
    return float(value)


def check_decay(value):
    if value is None:
        return None
    if not isinstance(value, numbers.Real) or not 0 < value < 1:
        raise ValueError(f"`ema_decay` is {value!r}; it must lie between 0 and 1. Use None for no averaging.")
    return float(value)


def check_combiner(combiner):
    """A combiner, from one, its name, or None for the plain sum."""
    if combiner is None:
        return losses_package.WeightedSum()
    if isinstance(combiner, str):
        return losses_package.combiner_from_name(combiner)
    if not isinstance(combiner, losses_package.Combiner):
        called = f"the class {combiner.__name__}" if isinstance(combiner, type) else f"a {type(combiner).__name__}"
        raise TypeError(
            f"`combiner` is {called}; it must be a combiner, such as losses.PCGrad(), or the name of one, such as "
            "'pcgrad'. Make one by calling its class."
        )
    return combiner


def check_losses(losses):
    """{name: callable}, from a dict or a single loss."""
    if losses is None:
        return {}
    if isinstance(losses, str | keras.losses.Loss) or callable(losses):
        losses = {"loss": losses}
    if not isinstance(losses, dict):
        raise TypeError(
            f"`losses` is a {type(losses).__name__}; it must be a dict of names to losses, so that each is logged "
            "under its name. Use e.g. losses={'error': keras.losses.MeanSquaredError()}."
        )
    checked = {}
    for name, loss in losses.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"A loss is named {name!r}; names must be non-empty strings.")
        if isinstance(loss, str):
            loss = _by_name(f"Loss {name!r}", loss, keras.losses, "'mse', a keras.losses.Loss, or a function")
        if isinstance(loss, type):
            raise TypeError(
                f"Loss {name!r} is the class {loss.__name__}; it must be a loss. Make one by calling its class: "
                f"keras.losses.{loss.__name__}()."
            )
        _check_parameters(f"Loss {name!r}", loss, 2, "(targets, outputs)")
        if not callable(loss):
            raise TypeError(
                f"Loss {name!r} is {loss!r}; it must be a keras.losses.Loss or a callable(targets, outputs) that "
                "returns one value per example or element."
            )
        checked[name] = loss
    return checked


def _check_parameters(what, function, count, meaning):
    """Refuses a function that cannot be called with so many arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except ValueError:  # it does not tell
        return
    except TypeError as error:
        if callable(function):
            raise TypeError(
                f"{what} is called with {meaning}, but takes {inspect.signature(function)}: {error}. Give it these "
                "arguments."
            ) from None


# What people who come from Keras write, and what to write here.
_KERAS_WORDS = {
    "y": "pass the targets with the inputs, as (x, y)",
    "x": "the first argument is the dataset, e.g. (x, y)",
    "validation_data": "it is called `eval_dataset`",
    "validation_split": "split the data, and pass a part as `eval_dataset`",
    "validation_freq": "it is called `eval_every` and counts updates",
    "validation_steps": "it is called `eval_steps`",
    "verbose": "it is called `progress`: True or False",
    "shuffle": "arrays are shuffled; pass a tf.data.Dataset to decide for yourself",
    "sample_weight": "pass it with the data, as (x, y, sample_weight)",
    "class_weight": "pass a weight for each example, as (x, y, sample_weight)",
    "steps_per_epoch": "train by `steps` and evaluate by `eval_every`",
    "initial_epoch": "`epochs` is the total over a trainer's lifetime; a second `fit` continues by itself",
    "learning_rate": "it belongs to the optimizer",
}
_SECOND = dict.fromkeys(("fit", "evaluate", "train_on_batch"), _KERAS_WORDS["y"])
_SECOND["predict"] = "targets are not needed; two inputs are one dataset, ((first, second),)"

_Owner = TypeVar("_Owner")
_Returned = TypeVar("_Returned")
_Parameters = ParamSpec("_Parameters")


def explained(
    method: Callable[Concatenate[_Owner, _Parameters], _Returned],
) -> Callable[Concatenate[_Owner, _Parameters], _Returned]:
    """Explains wrong arguments of a method, above all the words of `keras.Model.fit`. Keeps the method's types."""
    signature = inspect.signature(method)
    words = _KERAS_WORDS if {"dataset", "batch", "optimizer"} & set(signature.parameters) else {}

    @functools.wraps(method)
    def checked(self: _Owner, /, *arguments: _Parameters.args, **options: _Parameters.kwargs) -> _Returned:
        try:
            signature.bind(self, *arguments, **options)
        except TypeError as error:
            hints = [f"`{name}`: {words[name]}." for name in options if name in words]
            positional = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            if 1 + len(arguments) > len(positional):
                hints += [f"Second argument: {_SECOND[method.__name__]}."] if method.__name__ in _SECOND else []
            unknown = [name for name in options if name not in signature.parameters and name not in words]
            for name in unknown:
                near = difflib.get_close_matches(name, list(signature.parameters), 1)
                hints += [f"`{name}`: did you mean `{near[0]}`?"] if near else []
            known = list(signature.parameters)[1:]
            hints = hints or [f"Its arguments are {', '.join(known)}." if known else "It takes no arguments."]
            called = type(self).__name__ if method.__name__ == "__init__" else method.__name__
            raise TypeError(" ".join([f"`{called}`: {error}.", *hints])) from None
        if method.__name__ != "__init__" and not hasattr(self, "_engine"):
            raise RuntimeError(
                f"{type(self).__name__} has an `__init__` that does not call that of `Trainer`. Begin it with "
                "super().__init__(model, optimizer, …)."
            )
        return method(self, *arguments, **options)

    return checked


def explained_methods(of: type[_Owner]) -> type[_Owner]:
    """Makes all public methods of a class, and its constructor, explain wrong arguments."""
    for name, method in list(vars(of).items()):
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
            setattr(of, name, explained(method))
    return of


_BY_SHAPE = ("accuracy", "acc", "crossentropy", "ce")


def _several(metrics):
    return list(metrics) if isinstance(metrics, list | tuple) else [metrics]


def _by_name(what, name, module, instead):
    """The Keras object of a given name."""
    try:
        found = module.get(name)
    except (ValueError, TypeError):
        found = None
    if found is None:
        near = difflib.get_close_matches(name, dir(module), 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{what} is {name!r}, which Keras does not know; use a name such as {instead}.{hint}")
    return found


def _measuring(name, metric):
    """A metric, from one or from a function of (targets, outputs), of which it is the mean, as in Keras."""
    if isinstance(metric, keras.metrics.Metric):
        return metric
    if isinstance(metric, type) or not callable(metric):
        given = f"the class {metric.__name__}" if isinstance(metric, type) else repr(metric)
        raise TypeError(
            f"{f'The metric {name!r}' if name else 'A metric'} is {given}; it must be a keras.metrics.Metric, or a "
            "function of (targets, outputs). Make one by calling its class, as in metrics={'mae': "
            "keras.metrics.MeanAbsoluteError()}."
        )
    function = getattr(metric, "func", metric)  # of a functools.partial
    called = getattr(function, "__name__", type(function).__name__.lower())
    return keras.metrics.MeanMetricWrapper(metric, name=name or called)


def check_metrics(metrics, losses=()):
    """{name: metric}, from a list or a dict.

    A metric with the name of a loss (that of the output it takes) gets its own name behind it, as in Keras:
    `label_sparse_categorical_accuracy`. A list of metrics under one name gives several of them.
    """
    if metrics is None:
        return {}
    if isinstance(metrics, keras.metrics.Metric | str) or callable(metrics):
        metrics = [metrics]
    listed = metrics.items() if isinstance(metrics, dict) else [(None, metric) for metric in metrics]
    items = [(name, one, len(m) > 1) for name, given in listed for m in [_several(given)] for one in m]
    checked = {}
    for name, metric, one_of_many in items:
        if isinstance(metric, str) and metric.lower() in _BY_SHAPE:
            raise ValueError(
                f"The metric {name or metric!r} is {metric!r}, for which Keras chooses a class by the shapes of the "
                "data; here it must be a class. Use keras.metrics.SparseCategoricalAccuracy() for labels that are "
                "integers, CategoricalAccuracy() for one-hot labels, BinaryAccuracy() for yes and no; or the "
                "cross-entropy of the same kind."
            )
        if isinstance(metric, str):
            metric = _by_name("A metric", metric, keras.metrics, "'mae', a keras.metrics.Metric, or a function")
        metric = _measuring(name, metric)
        if name is not None and (name in losses or one_of_many):
            name = f"{name}_{metric.name}"
        if (name or metric.name) in checked:
            raise ValueError(
                f"Two metrics are named {name or metric.name!r}; one would hide the other. Name them: "
                "metrics={'one': …, 'other': …}."
            )
        checked[name or metric.name] = metric
    if "loss" in checked:
        raise ValueError("A metric is named 'loss', which is the name of the weighted total. Give it another name.")
    return checked


def check_flag(name, value):
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` is {value!r}; it must be True or False.")
    return bool(value)


def check_steps_per_call(value):
    if value == "auto":
        return value
    return check_integer("steps_per_call", value, 1, 'Use "auto" to let the trainer choose.')


def check_model(model):
    """A Keras model, a `tf.Module`, or a pair of a function and its variables, which becomes a module."""
    if isinstance(model, type):
        raise TypeError(f"`model` is the class {model.__name__}; it must be a model. Make one by calling its class.")
    if isinstance(model, tuple) and len(model) == 2 and callable(model[0]):
        return FunctionModel(*model)
    if isinstance(model, keras.Model | tf.Module) or (callable(model) and hasattr(model, "trainable_variables")):
        return model
    raise TypeError(
        f"`model` is {model!r}; it must be a keras.Model, a tf.Module with __call__, or a pair "
        "(function, [variables]). Use e.g. keras.Sequential([...])."
    )


class FunctionModel(tf.Module):
    """A function and the variables it trains, as a model."""

    def __init__(self, function, variables):
        super().__init__(name="function")
        self._function = function
        self._listed = list(variables)

    def __call__(self, inputs):
        return self._function(inputs)


def check_strategy(strategy):
    if strategy is None:
        return tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(
            f"`strategy` is {strategy!r}; it must be a tf.distribute.Strategy or None. "
            "Use e.g. tf.distribute.MirroredStrategy()."
        )
    return strategy


def check_scope(strategy, model, optimizer, metrics):
    """Variables belong to the strategy in whose scope they were made, and cannot join another one later."""
    owners = {
        "model": getattr(model, "variables", ()),
        "optimizer": optimizer.variables,
        **{f"metric {name!r}": metric.variables for name, metric in metrics.items()},
    }
    for owner, variables in owners.items():
        strangers = [v for v in variables if not strategy.extended.variable_created_in_scope(raw(v))]
        if strangers:
            name = path_of(strangers[0])
            raise ValueError(
                f"{len(strangers)} variables of the {owner} (e.g. {name!r}) were not made in the scope of the "
                f"trainer's strategy, {type(strategy).__name__}; a strategy shares only variables that were. Make the "
                "strategy first, then `with strategy.scope():` the model, the optimizer and the metrics, and pass the "
                "same strategy to the Trainer."
            )


def require_losses(losses, overridden):
    """Refuses a trainer without losses whose hooks return none either."""
    if not losses and not overridden:
        raise ValueError(
            "There are no losses: `losses` is empty and `compute_losses` is not overridden. Pass "
            "losses={'name': loss}, or subclass `Trainer` and return named losses from `compute_losses`."
        )
