"""State that an update uses beside the trainer's model: a discriminator, a target network, variables of a subclass."""

import collections
import sys
import types
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from looptape.trainer.checkpoints.contents.descriptions import from_library
from looptape.trainer.variables import path_of, raw, whole

_DEPTH = 3  # of objects in objects
_LONGEST = 1000  # members of a container that are all looked at; longer ones are data if the first holds nothing
_HOLDERS = (keras.layers.Layer, tf.Module, keras.metrics.Metric, keras.optimizers.Optimizer)


class OutsideState(NamedTuple):
    """Variables that are neither in the model nor in anything else that a checkpoint holds by itself."""

    roots: list  # layers and modules that are attributes of the trainer
    pieces: list  # (name of an attribute or "", variable)
    trainable: dict  # {id: path} of what was trainable in the roots


def find(trainer, captured, skip=()):
    """An `OutsideState`: the variables in a trainer's attributes, and those that its traced update reads or assigns.

    Variables that belong to the model or to an optimizer are among them; `state_names.unique` leaves these out.

    Args:
        trainer: the `Trainer`.
        captured: [tf.Variable] of the traced update, see `TrainCalls.captured`.
        skip: variables that are not state, such as sums that the host takes after each call.
    """
    roots, pieces = [], []
    for name, value in _attributes(trainer).items():
        for holder in _held(value):
            if isinstance(holder, keras.layers.Layer | tf.Module):
                roots.append(holder)
            pieces += [(name, variable) for variable in _variables(holder)]
    pieces += [("", whole(variable)) for variable in sorted(captured, key=_number)]
    left_out = {id(variable) for variable in skip}
    return OutsideState(roots, [(name, v) for name, v in pieces if id(raw(v)) not in left_out], _trainable(roots))


def _attributes(trainer):
    """{name: value} of a trainer, with what its class has as attributes, except the library's own."""
    classes = [cls for cls in reversed(type(trainer).__mro__) if not from_library(cls) and cls is not object]
    shared = {name: value for cls in classes for name, value in vars(cls).items() if not name.startswith("__")}
    return {**shared, **vars(trainer)}


def refrozen(outside, model):
    """[path] of variables beside the model that were frozen or unfrozen since `outside` was found; it may be None."""
    if outside is None:
        return []
    now, own = _trainable(outside.roots), {id(variable) for variable in getattr(model, "variables", ())}
    either = {**outside.trainable, **now}
    return [path for key, path in either.items() if (key in now) != (key in outside.trainable) and key not in own]


def _trainable(roots):
    return {id(v): path_of(v) for root in roots for v in getattr(root, "trainable_variables", ())}


def _held(value: Any, depth=_DEPTH, seen=()) -> list:
    """The holders of variables in an attribute: itself, or members of containers and of custom objects."""
    if isinstance(value, (*_HOLDERS, tf.Variable, keras.Variable, tf.random.Generator, keras.random.SeedGenerator)):
        return [value]
    if isinstance(value, Mapping):
        members: Collection = value.values()
    elif isinstance(value, list | tuple | collections.deque):  # not sets, which have another order in each process
        members = value
    elif depth and _is_own(value) and id(value) not in seen:
        seen, depth = (*seen, id(value)), depth - 1
        members = vars(value).values()
    else:
        return []
    if len(members) > _LONGEST and not _held(next(iter(members)), depth, seen):
        return []
    return [holder for member in members for holder in _held(member, depth, seen)]


def _is_own(value):
    """Whether a value is an object of a class outside the libraries."""
    if isinstance(value, types.SimpleNamespace):
        return True
    cls = type(value)
    known = str(cls.__module__).split(".")[0] in sys.stdlib_module_names or any(map(from_library, cls.__mro__))
    return hasattr(value, "__dict__") and not known


def _variables(holder):
    if isinstance(holder, tf.Variable | keras.Variable):
        return [holder]
    if isinstance(holder, tf.random.Generator | keras.random.SeedGenerator):
        return [holder.state]
    return list(holder.variables)


def _number(variable):
    """A number that grows with the order in which the process made its variables.

    A graph lists them in no order, and most have no name of their own: of two of one shape a resumed run could read
    either into the other. TensorFlow has no public function for it.
    """
    return int(variable._unique_id.rsplit("_", 1)[1])
