"""The memory of Keras callbacks, for checkpoints: counters, lists, arrays, objects; not their constructors' options."""

import collections
import contextlib
import csv
import dataclasses
import enum
import hashlib
import inspect
import operator
import os
import random
import sys
import types
import warnings
import weakref
from collections.abc import Sized

import keras
import numpy as np
import tensorflow as tf

from looptape.trainer.checkpoints.contents.descriptions import from_library

# Set by Keras for each `fit`, or kept elsewhere (`best_weights`).
_NOT_MEMORY = {"params", "model", "_model", "validation_data", "best_weights"}
_LARGEST_IN_JSON = 1000  # elements of an array; larger ones are stored as arrays
_DEPTH = 10  # of containers and objects in each other
_MISSING = object()

# {callback: {attribute: value}} after its first `on_train_begin`: what is still the same is not memory.
_made: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet = weakref.WeakSet()


def note(callback):
    """Notes what a callback begins with. After `on_train_begin`; only the first time counts."""
    _made.setdefault(callback, _encoded(callback, Encoder(callback)))


def remembered(callback, arrays):
    """{attribute: encoded value} of everything that has changed since `note`; puts large arrays into `arrays`."""
    encoder = Encoder(callback)
    made, now = _made.get(callback, {}), _encoded(callback, encoder)
    changed = {name: value for name, value in now.items() if name not in made or made[name] != value}
    lost = [name for name, value in changed.items() if isinstance(value, _Unknown)]
    if lost and callback not in _warned and not type(callback).__module__.startswith("keras."):
        _warned.add(callback)
        kinds = ", ".join(f"`{name}` ({type(vars(callback)[name]).__name__})" for name in lost)
        what = f"changes {kinds}, which a checkpoint cannot hold: after a resume it has what the constructor made"
        _warn(callback, what)
    kept = {name: _changes(value, made.get(name)) for name, value in changed.items() if name not in lost}
    arrays |= {key: encoder.large[key] for key in _stored(kept)}
    return kept


def _changes(now, before):
    """An encoded value; of an object only the members that have changed, for the others are options."""
    if not isinstance(now, dict) or "object" not in now or not isinstance(before, dict) or "object" not in before:
        return now
    old = dict(before["object"])
    members = [
        [name, _changes(value, old.get(name))] for name, value in now["object"] if old.get(name, _MISSING) != value
    ]
    return {**now, "object": members}


def _stored(encoded):
    """The keys of the large arrays in an encoded value."""
    if isinstance(encoded, dict):
        own = [encoded["stored"]] if "stored" in encoded else []
        return own + [key for member in encoded.values() for key in _stored(member)]
    return [key for member in encoded for key in _stored(member)] if isinstance(encoded, list) else []


def restore(callback, values, arrays=None):
    """Gives a callback what `remembered` gave. What it was made with says of which types its containers are."""
    for name, value in values.items():
        try:
            vars(callback)[name] = decode(value, vars(callback).get(name), arrays)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            _warn(callback, f"does not get back `{name}`, as the checkpoint does not fit: {error!r}")


def _warn(callback, what):
    warnings.warn(
        f"The callback {type(callback).__name__} {what}. Keep numbers, texts, arrays, variables, lists and dicts of "
        "them, or objects of a class at the top of a module.",
        stacklevel=3,
    )


class _Foreign(TypeError):
    """Objects of Keras, TensorFlow or Looptape, such as a model or an optimizer: no memory of the callback."""


class _Unknown:
    """Stands for an object that no checkpoint can hold (a file, a lock). Equal to the same object of that length."""

    def __init__(self, value):
        self._same = id(value), len(value) if isinstance(value, Sized) else None

    def __eq__(self, other):
        return isinstance(other, _Unknown) and self._same == other._same

    __hash__ = None  # type: ignore[assignment]


def _encoded(callback, encoder):
    found, left_out = {}, _NOT_MEMORY | _options(callback)
    for name, value in vars(callback).items():
        if name not in left_out:
            try:
                found[name] = encoder.encode(value)
            except _Foreign:
                continue
            except TypeError:
                found[name] = _Unknown(value)
    return found


def _package(cls):
    return str(cls.__module__).partition(".")[0]


def _options(callback):
    """Names of what Keras's own callbacks were made with: not memory, and `min_delta` changes its sign in use."""
    classes = [cls for cls in type(callback).__mro__ if cls.__module__.startswith("keras.") and "__init__" in vars(cls)]
    return {name for cls in classes for name in inspect.signature(cls.__init__).parameters}


class Encoder:
    """Encodes values as JSON can hold them. Large arrays are represented by a key, and collected in `large`.

    Args:
        callback: whose memory it is. Objects of classes in its package are encoded by their attributes, as dataclasses
            are; variables of its model are left out.
    """

    def __init__(self, callback=None):
        self.large = {}
        self._own = None if callback is None else _package(type(callback))
        self._kept = {id(variable) for variable in getattr(getattr(callback, "model", None), "variables", ())}
        self._path = []  # ids of the containers and objects around what is being encoded

    def encode(self, value):
        """A value as JSON can hold it. Raises `TypeError` for what cannot be kept."""
        if isinstance(value, enum.Enum):
            return {"enum": value.name, "class": _place(value)}
        if isinstance(value, np.generic) and value.dtype.kind in "biufcU":
            value = value.item()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if id(value) in self._path or len(self._path) == _DEPTH:
            self._refuse(value)
        self._path.append(id(value))
        try:
            return self._encode(value)
        finally:
            self._path.pop()

    def _encode(self, value):
        for kinds, kind, take in _LEAVES:
            if isinstance(value, kinds):
                return {kind: self.encode(take(value))}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return self._encode_array(value)
        if isinstance(value, keras.layers.Layer | keras.metrics.Metric):
            variables = [v for v in value.variables if id(v) not in self._kept]
            return {"variables": [self.encode(np.asarray(v)) for v in variables]} if variables else self._refuse(value)
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(member)] for key, member in value.items()]}
        if isinstance(value, collections.deque):
            return {"deque": [self.encode(member) for member in value], "length": value.maxlen}
        if type(value) in _SEQUENCES:
            return {_SEQUENCES[type(value)]: [self.encode(member) for member in value]}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {"tuple": [self.encode(member) for member in value], "class": _place(value)}
        return {"object": self._members(value), "class": _place(value)} if self._is_own(value) else self._refuse(value)

    def _is_own(self, value):
        if isinstance(value, type) or not hasattr(value, "__dict__") or any(map(from_library, type(value).__mro__)):
            return False
        known = isinstance(value, types.SimpleNamespace) or dataclasses.is_dataclass(value)
        return known or _package(type(value)) == self._own

    def _members(self, value):
        found = []
        for name, member in vars(value).items():
            with contextlib.suppress(TypeError):
                found.append([name, self.encode(member)])
        return found or self._refuse(value)

    def _encode_array(self, value):
        if value.size <= _LARGEST_IN_JSON:
            return {"array": value.tolist(), "type": value.dtype.str}
        digest = hashlib.sha1(np.ascontiguousarray(value)).hexdigest()
        key = f"memory:{digest} {value.dtype.str} {value.shape}"
        self.large[key] = value
        return {"stored": key}

    @staticmethod
    def _refuse(value):
        kind = _Foreign if any(map(from_library, type(value).__mro__)) else TypeError
        raise kind(f"{type(value).__name__} cannot be kept")


def encode(value):
    """A value as JSON can hold it: numbers, texts, arrays, and lists, tuples, sets, deques and dicts of them."""
    return Encoder().encode(value)


# (types, kind, what is encoded in their place); `decode` has the way back.
_LEAVES = (
    (bytes, "bytes", lambda value: value.hex()),
    (complex, "complex", lambda value: [value.real, value.imag]),
    ((tf.Variable, keras.Variable), "variable", np.asarray),
    (tf.Tensor, "tensor", np.asarray),
    (random.Random, "random", lambda value: value.getstate()),
    (np.random.Generator, "generator", lambda value: value.bit_generator.state),
    (np.random.RandomState, "random_state", lambda value: value.get_state()),
)
_SEQUENCES = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAKERS = {kind: maker for maker, kind in _SEQUENCES.items()}


def decode(value, like=None, arrays=None):
    """The value that was encoded. `like` is what stands in its place now, of the type that it is to have."""
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()))
    if kind == "array":
        return np.array(content, np.dtype(value["type"]))
    if kind == "stored":
        return arrays[content]
    if kind == "dict":
        present = like if isinstance(like, dict) else {}
        keys = [decode(key) for key, _ in content]
        members = [decode(member, present.get(key), arrays) for key, (_, member) in zip(keys, content, strict=True)]
        return _as_dict(dict(zip(keys, members, strict=True)), like)
    if kind == "deque":
        return collections.deque((decode(member, None, arrays) for member in content), value["length"])
    if kind in _MAKERS:
        present = list(like) if isinstance(like, list | tuple) else []
        present += [None] * (len(content) - len(present))
        members = [decode(member, each, arrays) for member, each in zip(content, present, strict=False)]
        return _class_at(value["class"])(*members) if "class" in value else _MAKERS[kind](members)
    if kind == "enum":
        return _class_at(value["class"])[content]
    if kind == "object" and like is None:
        cls = _class_at(value["class"])
        like = cls.__new__(cls)
    return _into(kind, content, like, arrays)


def _place(value):
    return [type(value).__module__, type(value).__qualname__]


def _class_at(place):
    """The class of this module and name, if the module has been imported; nothing is imported here."""
    module, name = place
    if module not in sys.modules:
        raise LookupError(f"{module}.{name} is not known")
    return operator.attrgetter(name)(sys.modules[module])


def _as_dict(members, like):
    """Members as a dict of the type of another one, such as a `defaultdict` with its factory."""
    if not isinstance(like, dict) or type(like) is dict:
        return members
    like.clear()
    like.update(members)
    return like


def _into(kind, content, like, arrays):
    """Puts what was encoded into the object that stands in its place, and returns that."""
    if kind == "object":
        for name, member in content:
            vars(like)[name] = decode(member, vars(like).get(name), arrays)
        return like
    if kind == "variables":
        for variable, member in zip(like.variables, content, strict=True):
            variable.assign(decode(member, None, arrays))
        return like
    content = decode(content, None, arrays)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "tensor":
        return tf.constant(content)
    put = {
        "variable": lambda: like.assign(content),
        "random": lambda: like.setstate(content),
        "generator": lambda: setattr(like.bit_generator, "state", content),
        "random_state": lambda: like.set_state(content),
    }
    put[kind]()
    return like


def continue_csv(callback, epoch):
    """Makes a `CSVLogger` continue its file after a resume: rows from this epoch on, which come again, are removed."""
    if not os.path.exists(callback.filename):
        return
    with open(callback.filename, newline="") as file:
        rows = list(csv.reader(file, delimiter=callback.sep))
    kept = rows[:1] + [row for row in rows[1:] if row and row[0].isdigit() and int(row[0]) < epoch]
    with open(callback.filename, "w", newline="") as file:
        csv.writer(file, delimiter=callback.sep, lineterminator="\n").writerows(kept)


class Appending:
    """A context in which the `CSVLogger`s of a resumed run open their files to append, whatever they were made with."""

    def __init__(self, callbacks, epoch):
        self._loggers = [c for c in callbacks if isinstance(c, keras.callbacks.CSVLogger)] if epoch is not None else []
        self._epoch, self._append = epoch, [logger.append for logger in self._loggers]

    def __enter__(self):
        for logger in self._loggers:
            continue_csv(logger, self._epoch)
            logger.append = True

    def __exit__(self, *_):
        for logger, append in zip(self._loggers, self._append, strict=True):
            logger.append = append
