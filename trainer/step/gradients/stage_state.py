"""The state of a user's stage in variables: kept for every variable that was ever trained, shown for those of now."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from looptape.trainer.variables import raw


@dataclasses.dataclass(frozen=True)
class Part:
    """A leaf of a state: a variable, or those rows of it that belong to the variables trained now."""

    variable: Any
    rows: tuple[int, ...] | None = None

    def read(self):
        value = tf.convert_to_tensor(self.variable)
        return value if self.rows is None else tf.gather(value, self.rows)

    def write(self, value):
        """(the variable, its new value)."""
        if self.rows is not None:
            value = tf.tensor_scatter_nd_update(self.variable, [[row] for row in self.rows], value)
        return self.variable, tf.convert_to_tensor(value)


class StageState:
    """The state of one stage of one minimizer.

    `init` is asked for all variables that were ever trained, in the order in which they joined, and for those trained
    now. Lists with one entry for each variable, and tensors with one row for each, follow their variables; everything
    else stays as it is.

    Args:
        name: of the stage.
        init: `(variables) -> state`.
        make_variable: `(value, name) -> tf.Variable` of the trainer.
    """

    def __init__(self, name: str, init: Callable, make_variable: Callable):
        self._name, self._init, self._make_variable = name, init, make_variable
        self._known: list[Any] = []
        self._kept: dict[tuple, Any] = {}  # {path in the state of all known variables: variable}
        self._of_now: dict[tuple, Any] = {}  # {path in the state of the present ones: variable}, for no other phase
        self._places: list[int] | None = None  # of the present variables among the known ones
        self._parts: Any = None

    def build(self, variables, joining):
        """Makes what is new. Traced or eager, before anything is written; again whenever others are trained.

        Args:
            variables: that are trained now.
            joining: these, and others that will be.
        """
        known = {id(variable) for variable in self._known}
        new = {id(raw(v)): raw(v) for v in [*joining, *variables] if id(raw(v)) not in known}
        if new:
            self._extend(list(new.values()))
        position = {id(variable): place for place, variable in enumerate(self._known)}
        places = [position[id(raw(variable))] for variable in variables]
        if new or places != self._places:
            self._select(places)
        self._places = places

    def values(self):
        """The state as `apply` receives it."""
        return tf.nest.map_structure(Part.read, self._parts)

    def writes(self, new):
        """[(variable, new value)] of the state that `apply` returned. Refuses one of another structure."""
        tf.nest.assert_same_structure(self._parts, new)
        flat = zip(tf.nest.flatten(self._parts), tf.nest.flatten(new), strict=True)
        return [part.write(value) for part, value in flat]

    def named_variables(self):
        """[(path, variable)]: the stage's name, then keys and positions in the state of all known variables."""
        kept = [("/".join(map(str, (self._name, *path))), v) for path, v in self._kept.items()]
        return kept + [("/".join(map(str, (self._name, *path, "now"))), v) for path, v in self._of_now.items()]

    def _initial(self, variables):
        with tf.init_scope():
            return tf.nest.map_structure(tf.convert_to_tensor, self._init(list(variables)))

    def _extend(self, new):
        before, old = len(self._known), self._kept
        self._known = [*self._known, *new]
        leaves = _leaves(self._initial(self._known))
        self._kept = {path: self._extended(path, old.get(path), value, before) for path, value in leaves}

    def _extended(self, path, old, value, before):
        if old is not None and old.shape == value.shape:
            return old
        if old is not None and _has_rows(old, value, before, len(self._known)):
            with tf.init_scope():
                value = tf.concat([tf.convert_to_tensor(old), value[before:]], 0)
        elif old is not None:
            self._warn(path)
        return self._make_variable(value, "stage")

    def _select(self, places):
        """Makes the parts of the variables at these places."""
        known, changed, self._of_now = self._known, self._of_now, {}
        if places == list(range(len(known))):
            first = self._initial(known)
            self._parts = tf.nest.pack_sequence_as(first, [Part(v) for v in self._kept.values()])
            return
        first = self._initial(known[place] for place in places)
        # What has one entry or row for each variable has one fewer for one variable fewer.
        fewer, every, count = self._initial(known[:-1]), self._initial(known), len(known)
        shorter, longer = _lengths(fewer), _lengths(every)
        lists = {path for path, n in longer.items() if n == count and shorter.get(path) == count - 1}
        smaller = dict(_leaves(fewer))
        rows = {p for p, x in _leaves(every) if p in smaller and _has_rows(smaller[p], x, count - 1, count)}
        parts = []
        for path, value in _leaves(first):
            own = _moved(path, lists, places)
            kept = self._kept.get(own)
            if kept is not None and own in rows:
                parts.append(Part(kept, tuple(places)))
            elif kept is not None and kept.shape == value.shape:
                parts.append(Part(kept))
            else:
                if path in changed:
                    self._warn(path)
                self._of_now[path] = self._make_variable(value, "stage")
                parts.append(Part(self._of_now[path]))
        self._parts = tf.nest.pack_sequence_as(first, parts)

    def _warn(self, path):
        logging.warning(
            "The state %s of stage %r begins anew, because other variables are trained now and its shape depends on "
            "all of them together. Keep one entry for each variable to keep what it has.",
            "/".join(map(str, path)) or "()",
            self._name,
        )


def _leaves(state, path=()):
    """Yields (path, leaf) of a structure, in the order of `tf.nest.flatten`."""
    if isinstance(state, Mapping):
        parts = [(key, state[key]) for key in sorted(state)]
    elif isinstance(state, tuple | list):
        parts = list(zip(getattr(state, "_fields", range(len(state))), state, strict=True))
    else:
        yield path, state
        return
    for key, part in parts:
        yield from _leaves(part, (*path, key))


def _lengths(state, path=()):
    """{path: length} of the lists and plain tuples in a structure."""
    found = {}
    if isinstance(state, Mapping):
        parts = list(state.items())
    elif isinstance(state, tuple | list):
        parts = list(zip(getattr(state, "_fields", range(len(state))), state, strict=True))
        found = {} if hasattr(state, "_fields") else {path: len(state)}
    else:
        return found
    for key, part in parts:
        found |= _lengths(part, (*path, key))
    return found


def _moved(path, lists, places):
    """The path among all known variables of a path among those at the given places."""
    for depth, part in enumerate(path):
        if path[:depth] in lists:
            return (*path[:depth], places[part] if part < len(places) else part, *path[depth + 1 :])
    return path


def _has_rows(small, large, fewer, more):
    """Whether two tensors differ in one row for each of `more` - `fewer` variables."""
    few, many = list(small.shape), list(large.shape)
    return bool(few and many) and few[0] == fewer and many[0] == more and few[1:] == many[1:]
