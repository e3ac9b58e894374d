"""Descriptions of functions, hooks and objects that change with what they do: to compare with a checkpoint's."""

import dataclasses
import dis
import functools
import inspect
import re
import types
import zlib

import keras
import numpy as np
import tensorflow as tf

from looptape.losses.convention import LossFunction
from looptape.losses.schedules import Schedule
from looptape.trainer.data.pipeline import checksum

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function among the options: another one in each process
_PLAIN = (bool, int, float, str, type(None))
_DEPTH = 4  # of functions in functions
_DESCRIBED = (functools.partial, list, tuple, dict, np.ndarray, tf.Tensor, keras.losses.Loss, LossFunction, Schedule)
_LIBRARIES = ("keras", "tensorflow", "numpy", "looptape")


def describe(value, depth=_DEPTH):
    """A text that changes with a loss function, a schedule or an action: its name, its options, its code."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, list | tuple) and depth:
        return f"[{', '.join(describe(member, depth - 1) for member in value)}]"
    if isinstance(value, dict) and depth:
        return f"{{{', '.join(f'{key!r}: {describe(member, depth - 1)}' for key, member in value.items())}}}"
    if isinstance(value, functools.partial) and depth:
        options = {**dict(enumerate(value.args)), **value.keywords}
        return f"{describe(value.func, depth - 1)} {describe(options, depth - 1)}"
    value = getattr(value, "python_function", value)  # of a `tf.function`
    if isinstance(value, types.MethodType):
        return describe(value.__func__, depth)
    if isinstance(value, types.FunctionType):
        return _describe_function(value, depth)
    if isinstance(value, np.ndarray | tf.Tensor):
        return f"array (contents {checksum(value):08x})"
    name = getattr(value, "__qualname__", type(value).__qualname__).replace(".<locals>", "")
    if isinstance(value, LossFunction) or dataclasses.is_dataclass(value):
        return _ADDRESS.sub("", repr(value))  # has all options
    return name + _options(value, depth) + _own_code(value)


def _own_code(value):
    """The code of an object of one's own class that is called, with the values that it reads."""
    methods = {name: getattr(type(value), name, None) for name in ("call", "__call__")}
    own = [
        name for name, method in methods.items() if isinstance(method, types.FunctionType) and not from_library(method)
    ]
    values = {name: member for name, member in getattr(value, "__dict__", {}).items() if isinstance(member, _PLAIN)}
    return "".join(f", {describe_hook(type(value), name, values)}" for name in own)


def _options(value, depth):
    """The options of an object: Keras keeps those of its losses in a dict, others mostly in attributes."""
    found = {**getattr(value, "_fn_kwargs", {}), **getattr(value, "__dict__", {})}
    left_out = ("name", "reduction", "fn")
    kept = {k: v for k, v in found.items() if not k.startswith("_") and k not in left_out}
    own = {k: v for k, v in kept.items() if isinstance(v, _PLAIN) or (depth and _has_code(v))}
    wrapped = getattr(value, "fn", None)
    inner = f" of {describe(wrapped, depth - 1)}" if depth and wrapped is not None and not from_library(wrapped) else ""
    return inner + (f" {_plain_or_described(own, depth)}" if own else "")


def _plain_or_described(values, depth):
    return {k: v if isinstance(v, _PLAIN) else describe(v, depth - 1) for k, v in values.items()}


def _has_code(value):
    return isinstance(value, types.FunctionType | types.MethodType | functools.partial | list | tuple | np.ndarray)


def from_library(function):
    """Whether a function or a class is one of Keras, TensorFlow, NumPy or Looptape."""
    return str(getattr(function, "__module__", "")).split(".")[0] in _LIBRARIES


def _describe_function(function, depth):
    name = function.__qualname__.replace(".<locals>", "")
    digest, values = _Code(depth).of(function)
    return f"{name} (code {digest:08x})" + (f" {_plain_or_described(values, depth)}" if values else "")


def describe_hook(cls, name, attributes):
    """A text that changes with a hook: its code, that of the methods and functions it calls, the values it reads.

    Args:
        cls: the subclass.
        name: of the hook.
        attributes: {name: value} of the trainer, without those that every trainer has.
    """
    code = getattr(inspect.unwrap(getattr(cls, name)), "__code__", None)
    notes = _written(code) if code else ()
    attributes = {key: value for key, value in attributes.items() if key not in notes}  # what it writes is no option
    digest, values = _Code(_DEPTH, cls, attributes).of(getattr(cls, name))
    return f"{getattr(cls, name).__qualname__.replace('.<locals>', '')} (code {digest:08x})" + (
        f" {values}" if values else ""
    )


def _written(code):
    """Names of the attributes that a function, or one inside it, writes."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}
    return own.union(*map(_written, inner))


class _Code:
    """Digests a function together with what it calls by name in its own module or class.

    Args:
        depth: of calls that are followed.
        cls: class whose methods are followed, or None.
        attributes: {name: value} of its object.
    """

    def __init__(self, depth, cls=None, attributes=None):
        self._depth, self._cls, self._attributes = depth, cls, attributes or {}
        self._seen, self.values = set(), {}

    def of(self, function):
        """(digest of the code, {name: plain value that it reads})."""
        return self._digest(inspect.unwrap(function), self._depth), self.values

    def _digest(self, function, depth):
        code = getattr(function, "__code__", None)
        if code is None or code in self._seen:
            return 0
        self._seen.add(code)
        digest = _digest_code(code, function.__doc__)
        if not depth:
            return digest
        for called in self._read(function, () if from_library(function) else _names(code)):
            digest = zlib.crc32(str(self._digest(called, depth - 1)).encode(), digest)
        return digest

    def _read(self, function, names):
        """The functions among the values that a function reads; notes the plain ones."""
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        found = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
        parameters = inspect.signature(function).parameters.values()
        found |= {p.name: p.default for p in parameters if p.default is not p.empty}
        found |= {name: function.__globals__[name] for name in names if name in function.__globals__}
        found |= {name: self._attributes[name] for name in names if name in self._attributes}
        if self._cls is not None:
            found |= {name: getattr(self._cls, name) for name in names if _is_method(self._cls, name)}
        functions = []
        for name, value in found.items():
            if isinstance(value, _PLAIN) and value is not None:
                self.values[name] = value
            elif isinstance(value, types.FunctionType | types.MethodType):
                functions.append(getattr(value, "__func__", value))
            elif isinstance(value, _DESCRIBED) or dataclasses.is_dataclass(value):
                self.values[name] = describe(value, 2)
            elif read := _plain_members(value, names):
                self.values[name] = read
        return functions + [method for name in names for method in self._overridden(name)]

    def _overridden(self, name):
        """The methods of this name that `super()` may call: those of every class that is not the library's."""
        classes = [] if self._cls is None else [each for each in self._cls.__mro__ if not from_library(each)]
        methods = [vars(each).get(name) for each in classes]
        return [method for method in methods if isinstance(method, types.FunctionType)]


def _plain_members(holder, names):
    """{name: plain value} of an object or a module of one's own, for those of the names that it has."""
    if from_library(type(holder)) or not hasattr(holder, "__dict__"):
        return {}
    found = {name: getattr(holder, name) for name in names if name in {**vars(type(holder)), **vars(holder)}}
    return {name: value for name, value in found.items() if isinstance(value, _PLAIN) and not name.startswith("__")}


def _is_filled(cell):
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_method(cls, name):
    return isinstance(inspect.getattr_static(cls, name, None), types.FunctionType)


def _names(code):
    """Names that a function and the functions inside it read."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for one in inner for name in _names(one))]))


def _digest_code(code, doc=None):
    """A number that changes with what a function does, not with its place in the file or its docstring."""
    digest = zlib.crc32(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            digest = zlib.crc32(str(_digest_code(constant)).encode(), digest)
        elif isinstance(constant, (*_PLAIN, tuple)) and (doc is None or constant != doc):
            digest = zlib.crc32(repr(constant).encode(), digest)
    return digest
