"""`Recorder`: runs the recurrent layers of a model on loops that store their states."""

import tensorflow as tf

from looptape.trainer.analysis.adjoints import Loop
from looptape.trainer.recurrent import active
from looptape.trainer.recurrent.layers import find_layers, run_by


class Recorder:
    """Context manager in which the recurrent Keras layers of a model run on loops that store their states.

    Use it in a traced function, under a persistent tape. Layers that cannot be recorded (a cell that draws random
    numbers, a loop inside a loop) run unchanged, and the tape differentiates them.

    Args:
        model: the model whose layers to record.
        tape: persistent; it sees a recorded loop as a source (its outputs) and a target (its inputs).
        left_out: names of layers that run unchanged.
    """

    def __init__(self, model, tape, left_out=()):
        layers = find_layers(model)
        self._names = {id(layer): name for name, layer in layers.items() if name not in left_out}
        self._layers = [layer for layer in layers.values() if id(layer) in self._names]
        self._tape = tape
        self._graph = self._running = None
        self.loops = []  # in the order in which they ran
        self.skipped = {name for name in layers if name in left_out}  # layers that ran as ever

    def __enter__(self):
        self._graph = tf.compat.v1.get_default_graph()
        self._running = run_by(self, self._layers)
        self._running.__enter__()
        return self

    def __exit__(self, *exception):
        self._running.__exit__(*exception)

    def run_layer(self, call):
        """Runs and records a recurrent layer, or notes that Keras runs it; see `layers.run_by`."""
        layer = call.layer
        if id(layer) not in self._names or active.session() is not None:
            return None
        loop = Loop(self._names[id(layer)], self._free_name(layer), *call[:5])
        if call.anew is None and tf.compat.v1.get_default_graph() is self._graph and loop.can_be_recorded():
            self.loops.append(loop)
            return loop.run(self._tape)
        self.skipped.add(loop.label)
        return None

    def _free_name(self, layer):
        name = self._names[id(layer)]
        count = sum(loop.layer is layer for loop in self.loops) + 1
        return name if count == 1 else f"{name}_call_{count}"
