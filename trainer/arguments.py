"""Checks of what a user passes, each answered in three parts: what was received, what is needed, what to do."""

import difflib
import functools
import inspect
import math
import numbers

import keras
import tensorflow as tf

import losses as losses_package
from trainer.optimizers import OptimizerGroup
from trainer.state import path_of, raw

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
        return OptimizerGroup({pattern: check_optimizer(each) for pattern, each in optimizer.items()})
    if isinstance(optimizer, OptimizerGroup):
        return optimizer
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
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


def check_integer(name, value, least, remedy):
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{name}` is {value!r}; it must be an integer of at least {least}. {remedy}")
    if value < least:
        raise ValueError(f"`{name}` is {value}; it must be at least {least}. {remedy}")
    return int(value)


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
        loss = keras.losses.get(loss) if isinstance(loss, str) else loss
        if not callable(loss):
            raise TypeError(
                f"Loss {name!r} is {loss!r}; it must be a keras.losses.Loss or a callable(targets, outputs) that "
                "returns one value per example or element."
            )
        checked[name] = loss
    return checked


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
    "initial_epoch": "`epochs` is the total over a trainer's lifetime; a second `fit` goes on by itself",
    "learning_rate": "it belongs to the optimizer",
}


def explained(method):
    """A method whose callers are told what to write where they use the words of `keras.Model.fit`."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def checked(self, *arguments, **options):
        try:
            signature.bind(self, *arguments, **options)
        except TypeError as error:
            hints = [f"`{name}`: {_KERAS_WORDS[name]}." for name in options if name in _KERAS_WORDS]
            positional = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            if method.__name__ == "fit" and 1 + len(arguments) > len(positional):
                hints.append(f"Second argument: {_KERAS_WORDS['y']}.")
            unknown = [name for name in options if name not in signature.parameters and name not in _KERAS_WORDS]
            for name in unknown:
                near = difflib.get_close_matches(name, list(signature.parameters), 1)
                hints += [f"`{name}`: did you mean `{near[0]}`?"] if near else []
            called = type(self).__name__ if method.__name__ == "__init__" else method.__name__
            raise TypeError(" ".join([f"`{called}`: {error}.", *hints])) from None
        return method(self, *arguments, **options)

    return checked


_BY_SHAPE = ("accuracy", "acc", "crossentropy", "ce")


def _several(metrics):
    return list(metrics) if isinstance(metrics, list | tuple) else [metrics]


def check_metrics(metrics, losses=()):
    """{name: metric}, from a list or a dict.

    A metric with the name of a loss (that of the output it takes) gets its own name behind it, as in Keras:
    `label_sparse_categorical_accuracy`. A list of metrics under one name gives several of them.
    """
    if metrics is None:
        return {}
    if isinstance(metrics, keras.metrics.Metric):
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
        metric = keras.metrics.get(metric) if isinstance(metric, str) else metric
        if not isinstance(metric, keras.metrics.Metric):
            raise TypeError(
                f"The metric {name or metric!r} is {metric!r}; it must be a keras.metrics.Metric. "
                "Use e.g. metrics={'accuracy': keras.metrics.SparseCategoricalAccuracy()}."
            )
        if name is not None and (name in losses or one_of_many):
            name = f"{name}_{metric.name}"
        checked[name or metric.name] = metric
    if "loss" in checked:
        raise ValueError("A metric is named 'loss', which is the name of the weighted total. Give it another name.")
    return checked


def check_steps_per_call(value):
    if value == "auto":
        return value
    return check_integer("steps_per_call", value, 1, 'Use "auto" to let the trainer choose.')


def check_model(model):
    """A Keras model, a `tf.Module`, or a pair of a function and its variables, which becomes a module."""
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
