"""`Recorder`: lets the recurrent layers of a model run on loops that remember their states."""

import keras
import tensorflow as tf

from trainer.adjoints import Loop
from trainer.probing import active, internals
from trainer.probing.layers import find_layers


class Recorder:
    """While it is entered, the recurrent Keras layers of a model run on loops that remember their states.

    In a traced function, below a persistent tape. Layers that cannot be run this way (a cell that draws random
    numbers, a loop inside a loop) run as ever, and the tape goes through them.

    Args:
        model: whose layers to record.
        tape: persistent; it sees a recorded loop as a source (its outputs) and a target (its inputs).
        left_out: names of layers that are to run as ever.
    """

    def __init__(self, model, tape, left_out=()):
        layers = find_layers(model)
        self._names = {id(layer): name for name, layer in layers.items() if name not in left_out}
        self._layers = [layer for layer in layers.values() if id(layer) in self._names]
        self._tape = tape
        self._graph = self._replaced = None
        self.loops = []  # in the order in which they ran
        self.skipped = {name for name in layers if name in left_out}  # layers that ran as ever

    def __enter__(self):
        self._graph = tf.compat.v1.get_default_graph()
        self._replaced = internals.replaced_loops(self._layers, self._make_loop)
        self._replaced.__enter__()
        return self

    def __exit__(self, *exception):
        self._replaced.__exit__(*exception)

    def _make_loop(self, layer, original):
        def inner_loop(sequences, initial_state, mask, training=False):
            if active.session() is not None or internals.is_symbolic():
                return original(sequences, initial_state, mask, training=training)
            flat = keras.tree.flatten(mask)[0] if keras.tree.is_nested(mask) else mask
            loop = Loop(self._names[id(layer)], self._free_name(layer), layer, sequences, initial_state, flat, training)
            if tf.compat.v1.get_default_graph() is self._graph and loop.can_be_recorded():
                self.loops.append(loop)
                return loop.run(self._tape)
            self.skipped.add(loop.label)
            return original(sequences, initial_state, mask, training=training)

        return inner_loop

    def _free_name(self, layer):
        name = self._names[id(layer)]
        count = sum(loop.layer is layer for loop in self.loops) + 1
        return name if count == 1 else f"{name}_call_{count}"
