"""`LoopRNN`: runs any Keras cell on Looptape's own loop, whose cost is linear in time and which XLA compiles well."""

import keras

from looptape.trainer.recurrent import active
from looptape.trainer.recurrent.loops.cells import run_cell
from looptape.trainer.recurrent.loops.recurrent_loop import Layout, Options


@keras.saving.register_keras_serializable(package="looptape")
class LoopRNN(keras.layers.RNN):
    """Runs a cell over time. Takes the arguments of `keras.layers.RNN` and computes the same results.

    With the cell and the weights of an `LSTM`, `GRU` or `SimpleRNN` layer it gives the layer's results. Masks,
    unknown batch sizes and lengths, `go_backwards`, `stateful`, `unroll`, nested states and XLA work as in Keras. Time
    steps can be probed as in a Keras layer.

    >>> layer = LoopRNN(keras.layers.LSTMCell(4), return_sequences=True)
    >>> tuple(layer(keras.ops.zeros((2, 7, 3))).shape)
    (2, 7, 4)

    Args:
        cell: a Keras cell, `keras.layers.StackedRNNCells`, or a list of cells to stack.
        return_sequences: return all outputs [batch, time, units] instead of the last one [batch, units].
        return_state: return the final states as well.
        go_backwards: start at the end; outputs keep the order in which they were computed.
        stateful: start from the state in which the last batch ended.
        unroll: use a Python loop; the length must be known.
        zero_output_for_mask: output zeros at masked time steps instead of repeating the last output.
    """

    # Tells a probe session that replacing `inner_loop` by the recurrent loop changes nothing.
    runs_recurrent_loop = True

    def inner_loop(self, sequences, initial_state, mask, training=False):
        """Called by `keras.layers.RNN.call`; returns (last output, outputs, states)."""
        mask = keras.tree.flatten(mask)[0] if keras.tree.is_nested(mask) else mask
        layout = Layout(self.go_backwards, self.unroll, self.return_sequences, self.zero_output_for_mask)
        # Inference outside a trainer: the graph may be exported, and a SavedModel cannot hold the backward loop.
        taped = training in (None, False) and active.session() is None and not active.runners()
        return run_cell(self.cell, sequences, initial_state, mask, training, layout, options=Options(taped=taped))
