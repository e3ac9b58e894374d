"""Python values that a trace took as constants: warns once they have other values."""

import contextlib
import dis
import inspect
import types
import warnings
import zlib

import keras
import numpy as np
import tensorflow as tf

from looptape.trainer.checkpoints.contents import compatibility

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = ("keras.", "tensorflow.", "looptape.")
_BY_IDENTITY = (types.FunctionType, types.ModuleType, type, tf.Module, keras.layers.Layer)
_DEPTH = 3  # of containers and objects in attributes
_LONGEST = 1_000  # members of a container, and kilobytes of an array, whose contents are looked at in every call
_TRAINING = ("compute_losses", "train_step", "transform_gradients", "transform_timestep_gradient", "call_model")
HOOKS = {"training": _TRAINING, "evaluation": ("eval_step", "compute_losses", "call_model"), "predict": ("call_model",)}


class TracedConstants:
    """Python values that a trainer's traced functions read: `self.beta` of a hook, options of optimizers and losses.

    A change of these has no effect, and nobody would notice: one warning names each. Values that change while a hook is
    traced are left out: they are its own notes. With `run_eagerly` nothing is kept.

    Args:
        trainer: the `Trainer`.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self._known, self._moving = {}, set()
        self._layers = None

    @contextlib.contextmanager
    def noting(self, moment):
        """A context in which hooks may be traced, a key of `HOOKS`. Checks what was noted; notes what they read."""
        self.check()
        before = self._present(moment)
        layers = self._check_layers() if moment == "training" else None
        yield
        if layers is not None and self._layers is None:
            after = _options_of_layers(self._trainer.model)
            self._layers = {name: option for name, option in layers.items() if after.get(name) == option}
        after = self._present(moment)
        self._moving |= {name for name in after if name not in before or before[name][0] != after[name][0]}
        for name, found in after.items():
            if name not in self._moving:
                self._known[name] = (moment, *found)

    def _check_layers(self):
        """{layer and option: value} of the model; a warning if one of those that were noted has changed."""
        now = _options_of_layers(self._trainer.model)
        known = self._layers or {}
        changed = [name for name, old in known.items() if now.get(name, old) != old]
        if changed and not self._trainer.run_eagerly:
            shown = "; ".join(f"{name}: {known[name]} → {now[name]}" for name in changed)
            self._layers = {name: old for name, old in known.items() if name not in changed}
            warnings.warn(
                f"Layers have other options than when the update was traced ({shown}), which has no effect. Make a new "
                "Trainer with the model; for an option that changes in training, write a layer that reads it from a "
                "variable.",
                stacklevel=2,
            )
        return now

    def check(self):
        """Warns, once for each, of values that a trace took as constants and that changed. Costs some microseconds."""
        if self._trainer.run_eagerly:
            return
        for name, (moment, text, value, read) in list(self._known.items()):
            now = read()
            if now is not value or not isinstance(value, _PLAIN):
                present = _text(now)
                if present != text:
                    del self._known[name]
                    self._moving.add(name)
                    warnings.warn(_message(name, moment, text, present), stacklevel=2)

    def _present(self, moment):
        """{name: (text that changes with the value, the value, function that reads it)}."""
        trainer, found = self._trainer, {}
        if trainer.run_eagerly:
            return found
        for name in sorted(attributes_read(type(trainer), HOOKS[moment], vars(trainer))):
            found[f"trainer.{name}"] = lambda name=name: getattr(trainer, name, None)
        found |= {f"trainer.{name}": lambda name=name: getattr(trainer, name) for name in HOOKS[moment]}
        if moment == "training":
            optimizer = trainer.optimizer
            each = optimizer.values() if hasattr(optimizer, "values") else [optimizer]
            for place, one in enumerate(each):
                prefix = "trainer.optimizer" + (f"[{place}]" if one is not optimizer else "")
                found |= {f"{prefix}.{name}": _reader(one, name) for name in _options(one)}
                found[f"{prefix}.learning_rate"] = _reader(one, "_learning_rate")
            found |= {
                f"trainer.combiner.{name}": _reader(trainer.combiner, name) for name in _options(trainer.combiner)
            }
        for name, loss in trainer.losses.items():
            if isinstance(loss, keras.losses.Loss):
                found |= {f"loss {name!r}: {option}": _reader(loss, option) for option in _options(loss)}
        values = {name: (read(), read) for name, read in found.items()}
        return {name: (_text(value), value, read) for name, (value, read) in values.items()}


def _options_of_layers(model):
    described = compatibility.describe_layers(model).items()
    return {f"{layer}.{option}": value for layer, (_, options) in described for option, value in options.items()}


def attributes_read(cls, hooks, own=()):
    """Names of the attributes that a trainer's hooks read from `self`, with those of the methods they call.

    Args:
        cls: the class.
        hooks: names of the hooks; methods of the library are left out.
        own: names of attributes of the object.

    >>> class Weighted:
    ...     def compute_losses(self, batch, training):
    ...         return {"error": self.beta * self.scaled(batch)}
    ...     def scaled(self, batch):
    ...         return self.scale * batch
    >>> sorted(attributes_read(Weighted, ["compute_losses"], ["beta", "scale"]))
    ['beta', 'scale']
    """
    ours = [each for each in cls.__mro__ if each.__module__.startswith("looptape.") or each is object]
    classes = [each for each in cls.__mro__ if each not in ours]
    library = {name for each in ours for name in (*vars(each), *inspect.signature(each.__init__).parameters)}
    library |= {"step", "health_parts", "_engine"}
    todo, seen, found = list(hooks), set(), set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for each in classes:
            member = vars(each).get(name)
            function = inspect.unwrap(member.fget if isinstance(member, property) else member) if member else None
            if isinstance(function, types.FunctionType):
                todo += _from_self(function.__code__, function.__code__.co_varnames[:1])
            elif member is not None and name not in library:
                found.add(name)
        if name in own and name not in library and name not in hooks:
            found.add(name)
    return found


def _from_self(code, first):
    """Names of attributes that a function, or one inside it, reads from its first argument."""
    names, before = [], None
    for instruction in dis.get_instructions(code):
        if before is not None and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and "LOAD" in before.opname:
            loaded = before.argval[-1:] if isinstance(before.argval, tuple) else (before.argval,)
            if loaded == first:
                names.append(instruction.argval)
        before = instruction
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and first and first[0] in constant.co_freevars:
            names += _from_self(constant, first)
    return names


def _reader(holder, name):
    return lambda: vars(holder).get(name)


def _options(holder):
    """Names of the attributes that are plain options of an optimizer, a combiner or a loss."""
    return [name for name, value in vars(holder).items() if _is_option(name, value)]


def _is_option(name, value):
    return name == "_fn_kwargs" or (not name.startswith("_") and name != "built" and isinstance(value, _PLAIN))


def _text(value, depth=_DEPTH):
    """A text that changes with what a trace reads from a value."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, types.MethodType):
        return value.__func__.__qualname__
    if isinstance(value, list | tuple | dict) and len(value) > _LONGEST:
        depth = 0
    if isinstance(value, np.generic | np.ndarray) and value.nbytes <= 1_000 * _LONGEST:
        array = np.asarray(value)
        return repr(array.item()) if array.ndim == 0 else f"array {array.shape} {zlib.crc32(array.tobytes()):08x}"
    if depth and isinstance(value, list | tuple):
        return f"[{', '.join(_text(member, depth - 1) for member in value)}]"
    if depth and isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_text(member, depth - 1)}' for key, member in value.items())}}}"
    identity = f"{type(value).__name__} at {id(value):#x}"
    if not depth or not hasattr(value, "__dict__") or type(value).__module__.startswith(_LIBRARIES):
        return identity
    plain = {name: member for name, member in vars(value).items() if isinstance(member, _PLAIN)}
    return f"{identity} {plain}" if plain and not isinstance(value, _BY_IDENTITY) else identity


def _message(name, moment, old, new):
    what = {"training": "the update", "evaluation": "the evaluation", "predict": "`predict`"}[moment]
    remedy = "Make a new Trainer with it."
    attribute = name.removeprefix("trainer.")
    if name.startswith("trainer.") and "." not in attribute and attribute not in sum(HOOKS.values(), ()):
        remedy = (
            f"To change it while it trains, make it a variable (`self.{attribute} = tf.Variable(…)`, then "
            f"`self.{attribute}.assign(…)`); or make a new Trainer."
        )
    return (
        f"`{name}` was {old[:80]} when {what} was traced, and is {new[:80]} now. A trace reads it once, so the change "
        f"has no effect. {remedy}"
    )
