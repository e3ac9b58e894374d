"""States that recurrent layers carry from one update to the next, row by row.

Where sequences are cut into windows, the trainer keeps the states of every layer. A stateful layer keeps its own; on
several replicas each of them has some of the rows.
"""

import contextlib
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from looptape.trainer.recurrent import active
from looptape.trainer.recurrent.layers import find_layers, run_by


class Anew(NamedTuple):
    """Sequences that begin inside a window."""

    flags: Any  # [batch, time], true where one begins
    states: Any  # nested: what it begins with


class Carrying:
    """Keeps the final states of every recurrent layer, as Keras variables that the forward pass assigns.

    Args:
        replicas: among which the rows of a batch are divided, in equal parts.
    """

    def __init__(self, replicas=1):
        self._begins = None
        self._replicas = replicas
        self._kept: dict = {}  # {id(layer): (the layer, [variable per state])}
        self.wanted: dict = {}  # {id(layer): (the layer, [specification per state])}, for `make`

    def begin(self, begins):
        """Says where sequences begin in the batch being traced, see `data.windows.Window`; None: nothing is carried."""
        self._begins = begins

    @contextlib.contextmanager
    def beginning(self, begins):
        """As `begin`, while this lasts."""
        kept, self._begins = self._begins, begins
        try:
            yield
        finally:
            self._begins = kept

    @contextlib.contextmanager
    def running(self, replica=None):
        """Layers that run while this lasts begin with the states they ended with, unless the sequence begins.

        Args:
            replica: the number of the replica whose rows these are, or None for all rows.
        """
        idle = self._begins is None and replica is None
        keeper = _Keeper(self, self._begins, replica, self._replicas)
        with contextlib.nullcontext() if idle else active.keeping(keeper):
            yield

    @contextlib.contextmanager
    def sharing(self, replica, model):
        """Stateful layers of a model that Keras runs while this lasts have the states of one replica's rows."""
        layers = find_layers(model).values() if isinstance(model, keras.Layer) else ()
        with run_by(_Nobody(), layers), active.keeping(_Keeper(self, None, replica, self._replicas)):
            yield

    def kept(self, layer):
        """[variable per state] of a layer, or None if there are none yet."""
        found = self._kept.get(id(layer))
        return None if found is None else found[1]

    def want(self, layer, states):
        """Notes that a layer needs variables for states like these."""
        self.wanted[id(layer)] = layer, [_checked(layer, state) for state in states]

    def make(self):
        """Makes the variables that layers met in a trace want, outside of it. Returns them."""
        made = []
        for key, (layer, specs) in self.wanted.items():
            number = len(self._kept)  # not the layer's name, which Keras may have numbered
            own = [_variable(f"carried_{number}_{index}", spec) for index, spec in enumerate(specs)]
            self._kept[key] = layer, own
            made += own
        self.wanted.clear()
        return made

    def are_rows(self, variables, stateful):
        """[bool]: which of the variables hold a state for each row. `stateful`: those of stateful layers."""
        rows = {id(variable) for variable in stateful}
        rows |= {id(variable) for _, own in self._kept.values() for variable in own}
        return [id(variable) in rows for variable in variables]


class _Keeper:
    """Answers the layers of one replica; see `layers.run_by`."""

    def __init__(self, carrying, begins, replica, replicas):
        self._carrying, self._begins, self._replica, self._replicas = carrying, begins, replica, replicas
        self._on_rows = set()  # ids of stateful layers inside `on_its_rows`
        self._entered = set()  # ids of the layers that have begun with carried states

    @property
    def has_some_rows(self):
        """Whether these are not all rows of a batch."""
        return self._replica is not None

    @contextlib.contextmanager
    def on_its_rows(self, layer, sequences, initial):
        """A context in which a stateful layer is called as one that is not. Gives the states to begin with."""
        if initial is None:
            full = [tf.convert_to_tensor(state) for state in keras.tree.flatten(layer.states)]
            own = self._own_rows(layer, sequences, full)
            initial = keras.tree.pack_sequence_as(layer.states, own)
        self._on_rows.add(id(layer))
        layer.stateful = False  # else Keras wants all rows
        try:
            yield initial
        finally:
            layer.stateful = True
            self._on_rows.discard(id(layer))

    def carries(self, layer):
        """Whether a layer begins a window with what it ended the one before with."""
        return self._is_stateful(layer) or (self._begins is not None and not layer.go_backwards)

    def enter(self, layer, sequences, initial):
        """(the states that a layer begins with, from those that it would begin with; `Anew` or None)."""
        begins, flat = self._begins, keras.tree.flatten(initial)
        if begins is None:
            return initial, None
        if self._is_stateful(layer):
            own, new = flat, [tf.zeros_like(state) for state in flat]
        elif layer.go_backwards:
            if begins.shape.rank == 2:
                _refuse_backwards(layer)
            return initial, None  # a layer that comes from the end of a window begins anew in each
        elif (variables := self._kept_once(layer)) is None:
            self._carrying.want(layer, flat)
            return initial, None
        else:
            kept = [variable.value for variable in variables]
            own = [tf.cast(x, s.dtype) for x, s in zip(self._own_rows(layer, sequences, kept), flat, strict=True)]
            _check_rows(layer, own, flat)
            new = flat
        nested = lambda states: keras.tree.pack_sequence_as(initial, states)  # noqa: E731
        if begins.shape.rank:
            begins = self._own_rows(layer, sequences, [begins])[0]
        if begins.shape.rank == 2:
            return nested(own), Anew(begins, nested(new))
        return nested([tf.where(_spread(begins, b), a, b) for a, b in zip(new, own, strict=True)]), None

    def _kept_once(self, layer):
        """[variable per state] of a layer, or None if there are none yet. A second call has no states of its own."""
        if id(layer) in self._entered:
            raise ValueError(
                f"The layer {layer.name!r} is called twice in one update; `bptt_updates` carries one state for each "
                "layer, and the second call would begin where the first one ends. Make a layer for each call, or join "
                "their batches into one call."
            )
        self._entered.add(id(layer))
        return self._carrying.kept(layer)

    def leave(self, layer, final):
        """Keeps the states that a layer ended with."""
        if id(layer) in self._on_rows:
            variables = keras.tree.flatten(layer.states)
        elif self._begins is None or layer.stateful:
            return
        else:
            variables = self._carrying.kept(layer) or ()
        for variable, state in zip(variables, keras.tree.flatten(final) if variables else (), strict=True):
            variable.assign(tf.stop_gradient(tf.cast(self._among_all(state), variable.dtype)))

    def _is_stateful(self, layer):
        return layer.stateful or id(layer) in self._on_rows

    def _own_rows(self, layer, sequences, tensors):
        """The rows of this replica of tensors that have those of all."""
        if self._replica is None:
            return tensors
        rows = sequences.shape[0]
        total = None if rows is None else rows * self._replicas
        if any(tensor.shape[0] != total for tensor in tensors):
            raise ValueError(
                f"The layer {layer.name!r} keeps a state for each of {tensors[0].shape[0]} rows, and each of "
                f"{self._replicas} replicas has {rows} rows of a batch. Make the batch size of the model that of a "
                "whole batch, a multiple of the number of replicas; batch with drop_remainder=True; and use "
                "accumulation_steps=1."
            )
        parts = [tf.reshape(x, tf.concat([[self._replicas, rows], tf.shape(x)[1:]], 0)) for x in tensors]
        return [
            tf.ensure_shape(part[self._replica], [rows, *x.shape[1:]]) for part, x in zip(parts, tensors, strict=True)
        ]

    def _among_all(self, state):
        """The states of all rows, those of other replicas 0."""
        if self._replica is None:
            return state
        own = tf.equal(tf.range(self._replicas), self._replica)
        each = tf.where(_spread(own, state[tf.newaxis]), state[tf.newaxis], tf.zeros_like(state)[tf.newaxis])
        return tf.reshape(each, [self._replicas * state.shape[0], *state.shape[1:]])


class _Nobody:
    """Leaves every layer to Keras."""

    def run_layer(self, call):
        return None


def _spread(flags, like):
    """Flags [batch] or of no shape, with as many axes as `like`."""
    return tf.reshape(flags, [-1, *[1] * (like.shape.rank - 1)]) if flags.shape.rank else flags


def _refuse_backwards(layer):
    raise ValueError(
        f"`bptt_begins` says that sequences begin inside a window, and the layer {layer.name!r} reads a window from "
        "its end, where another sequence may be. Let sequences begin with a batch, or leave out `go_backwards`."
    )


def _check_rows(layer, kept, states):
    for one, state in zip(kept, states, strict=True):
        if not one.shape.is_compatible_with(state.shape):
            raise ValueError(
                f"The layer {layer.name!r} carries states of the shape {one.shape}, and a batch now needs the shape "
                f"{state.shape}. Give every `fit` batches of the same number of rows, or make a new Trainer."
            )


def _checked(layer, state):
    if not state.shape.is_fully_defined():
        raise ValueError(
            f"`bptt_updates` carries the state of layer {layer.name!r} from window to window, and the number of rows "
            f"is not known: the state has shape {state.shape}. Batch with drop_remainder=True, arrays as a "
            "tf.data.Dataset."
        )
    return tf.TensorSpec(state.shape, state.dtype)


def _variable(name, spec):
    return keras.Variable(tf.zeros(spec.shape, spec.dtype), trainable=False, dtype=spec.dtype.name, name=name)
