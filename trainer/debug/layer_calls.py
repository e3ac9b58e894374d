"""Tracks which layer is called, and at which time step of a loop. For the eager re-run of a broken update only."""

from typing import Any, NamedTuple

import keras


class _Call(NamedTuple):
    layer: Any
    number: int  # among the calls of this layer by the layer around it
    time_steps: int | None  # of its input, if that has time
    counts: dict  # {id of a layer: calls of it in here}


class LayerCalls:
    """A context that knows at any moment which layer is being called. One thread, eager."""

    def __init__(self):
        self._stack = []
        self._original = None

    def __enter__(self):
        original = self._original = keras.layers.Layer.__call__
        stack = self._stack

        def call(layer, *arguments, **options):
            counts = stack[-1].counts if stack else {}
            index = counts[id(layer)] = counts.get(id(layer), -1) + 1
            shape = getattr(arguments[0], "shape", ()) if arguments else ()
            stack.append(_Call(layer, index, shape[1] if len(shape) > 2 else None, {}))
            try:
                return original(layer, *arguments, **options)
            finally:
                stack.pop()

        keras.layers.Layer.__call__ = call
        return self

    def __exit__(self, *_):
        keras.layers.Layer.__call__ = self._original

    def place(self):
        """(path of the innermost layer, time step or None), or None outside all layers."""
        return (self._stack[-1].layer.path, self._time_step()) if self._stack else None

    def _time_step(self):
        """A cell is called once per time step by the layer that it belongs to."""
        for outer, inner in zip(self._stack[-2::-1], self._stack[:0:-1], strict=True):
            if inner.layer is not getattr(outer.layer, "cell", None):
                continue
            index = inner.number
            if isinstance(outer.layer, keras.layers.RNN) and not outer.layer.unroll:
                index = max(index - 1, 0)  # Keras calls the cell once before its loop, to learn its output's shape
            backwards = getattr(outer.layer, "go_backwards", False) and outer.time_steps is not None
            return outer.time_steps - 1 - index if backwards else index
        return None
