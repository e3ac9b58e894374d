"""Which layer is being called, and at which time step of a loop. For the eager re-run of a broken update only."""

import keras


class LayerCalls:
    """A context that knows at any moment which layer is being called. One thread, eager."""

    def __init__(self):
        self._stack = []  # of [layer, {sub-layer: calls of it so far}]
        self._original = None

    def __enter__(self):
        original = self._original = keras.layers.Layer.__call__
        stack = self._stack

        def call(layer, *arguments, **options):
            index = 0
            if stack:
                counts = stack[-1][1]
                index = counts[id(layer)] = counts.get(id(layer), -1) + 1
            stack.append((layer, {}, index))
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
        if not self._stack:
            return None
        return self._stack[-1][0].path, self._time_step()

    def _time_step(self):
        """A cell is called once per time step by the layer that it belongs to."""
        for (outer, _, _), (inner, _, index) in zip(self._stack[-2::-1], self._stack[:0:-1], strict=True):
            if inner is not getattr(outer, "cell", None):
                continue
            if isinstance(outer, keras.layers.RNN) and not outer.unroll:
                index = max(index - 1, 0)  # Keras calls the cell once before its loop, to learn its output's shape
            return index
        return None
