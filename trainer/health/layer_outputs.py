"""The outputs of a model's layers in one forward pass: gradients at each position, units that are dead. Traced.

While a `LayerOutputs` is active, every layer reports what it puts out, and the tape takes the gradient of these tensors
in the backward pass that it makes anyway. Layers are left as they are; values and gradients are the same bits.
"""

import contextlib
import threading

import keras
import tensorflow as tf

from looptape.trainer.probing import taps
from looptape.trainer.recurrent import internals

_LOCK = threading.Lock()
_LOCAL = threading.local()
_WATCHED: dict = {}  # id(layer) -> number of threads that watch its calls


class LayerOutputs:
    """Collects the outputs of layers from entering to leaving it. One for each trace; replicas have their own.

    Args:
        model: every layer in it is watched; those inside Keras's own layers are not.
        tape: watches outputs for whose gradients nothing else asks.
        positions: note outputs [batch, positions, features].
        activations: note outputs of layers with an activation function that may be 0.
    """

    def __init__(self, model, tape, positions, activations):
        self._tape, self._positions, self._activations = tape, positions, activations
        self._layers = named_layers(model) if positions or activations else {}
        self._names = {id(layer): name for name, layer in self._layers.items()}
        self._graph = self._stack = None
        self.outputs = {}  # {name: tensor [batch, positions, features]}, in the order of the calls
        self._masks = {}  # {name: mask [batch, positions]}
        self._units = {}  # {name: 1.0 where a unit was not 0, [units]}

    def __enter__(self):
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_watched_calls(self._layers.values(), self._note))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception):
        self._stack.__exit__(*exception)
        self._look_at_masks()

    def _look_at_masks(self):
        """Keras attaches a mask to an output after the call, and later layers take it off again."""
        for name, output in self.outputs.items():
            mask = getattr(output, "_keras_mask", None)
            if name not in self._masks and mask is not None and mask.shape.rank == 2:
                self._masks[name] = mask

    @property
    def sources(self):
        """Tensors to differentiate with respect to."""
        return list(self.outputs.values())

    def _note(self, layer, output):
        if output is None:
            self._look_at_masks()
        if not isinstance(output, tf.Tensor) or not output.dtype.is_floating or internals.is_symbolic():
            return
        if self._graph is not None and output.graph is not self._graph:
            return  # inside a loop or a branch
        name = self._names[id(layer)]
        if self._positions and output.shape.rank == 3 and name not in self.outputs:
            self._tape.watch(output)
            self.outputs[name] = output
        if self._activations and output.shape.rank and output.shape.rank >= 2 and _may_die(layer):
            axes = list(range(output.shape.rank - 1))
            alive = tf.cast(tf.reduce_any(tf.not_equal(tf.stop_gradient(output), 0), axis=axes), tf.float32)
            if alive.shape.is_fully_defined():
                known = self._units.get(name)
                self._units[name] = alive if known is None else known + alive

    def totals(self, gradients, factor, examples):
        """{"positions": {layer: [2, positions]}, "units": {layer: [units]}}, which add up over micro-batches.

        Args:
            gradients: of `sources`, or None where no loss reaches one.
            factor: what they must be multiplied by to be those of this micro-batch's mean loss.
            examples: of this micro-batch.

        Of a position the first row is the sum over examples of the gradient's norm times the number of examples, the
        second the number of examples that are valid there.
        """
        positions = {}
        for name, gradient in zip(self.outputs, gradients, strict=True):
            if gradient is None:
                continue
            norms = tf.cast(tf.sqrt(taps.row_squares(gradient, 2)), tf.float32)  # [batch, positions]
            norms *= tf.cast(factor * examples, tf.float32)
            mask = self._masks.get(name)
            valid = tf.ones_like(norms) if mask is None else tf.cast(mask, tf.float32)
            positions[name] = tf.stack([tf.reduce_sum(norms, axis=0), tf.reduce_sum(valid, axis=0)])
        return {"positions": positions, "units": self._units}


def add(first, second):
    """Two micro-batches together; the shorter one is padded."""
    positions = {name: _add_padded(first["positions"][name], second["positions"][name]) for name in second["positions"]}
    return {"positions": positions, "units": tf.nest.map_structure(tf.add, first["units"], second["units"])}


def _add_padded(first, second):
    length = tf.maximum(tf.shape(first)[1], tf.shape(second)[1])
    return sum(tf.pad(x, [[0, 0], [0, length - tf.shape(x)[1]]]) for x in (first, second))


def named_layers(model):
    """{name: layer} of the layers to watch: a model's own, those of models in it, and those of layers of one's own.

    The insides of Keras's layers, such as the projections of an attention, are theirs.
    """
    found, queue = [], list(_children(model))
    while queue:
        layer = queue.pop(0)
        if any(layer is known for known in found) or isinstance(layer, keras.layers.InputLayer):
            continue
        found.append(layer)
        if isinstance(layer, keras.Model) or not type(layer).__module__.startswith("keras."):
            queue += _children(layer)
    names = [layer.name for layer in found]
    return {layer.name if names.count(layer.name) == 1 else layer.path: layer for layer in found}


def _children(layer):
    if not isinstance(layer, keras.layers.Layer):
        return []
    return list(getattr(layer, "layers", None) or internals.sublayers(layer))


def _may_die(layer):
    """Whether a unit of this layer can be stuck at 0."""
    if isinstance(layer, keras.layers.ReLU):
        return not layer.negative_slope
    activation = getattr(layer, "activation", None)
    return activation is not None and activation is not keras.activations.linear


@contextlib.contextmanager
def _watched_calls(layers, note):
    """Calls `note(layer, output)` after each call of these layers in this thread, while the context lasts.

    Before each call it is `note(layer, None)`.
    """
    installed = []
    before = getattr(_LOCAL, "note", None)
    _LOCAL.note = note
    try:
        for layer in layers:
            with _LOCK:
                if not _WATCHED.get(id(layer), 0):
                    # Not by assignment: Keras would start to track the function.
                    object.__setattr__(layer, "call", _noting(layer, layer.call))
                _WATCHED[id(layer)] = _WATCHED.get(id(layer), 0) + 1
            installed.append(layer)
        yield
    finally:
        _LOCAL.note = before
        for layer in installed:
            with _LOCK:
                _WATCHED[id(layer)] -= 1
                if not _WATCHED[id(layer)]:
                    del _WATCHED[id(layer)]
                    object.__delattr__(layer, "call")


def _noting(layer, call):
    def noted(*arguments, **options):
        note = getattr(_LOCAL, "note", None)
        if note is None:
            return call(*arguments, **options)
        note(layer, None)
        output = call(*arguments, **options)
        note(layer, output)
        return output

    return noted
