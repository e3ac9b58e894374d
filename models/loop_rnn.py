"""`LoopRNN`: any Keras cell on Looptape's own loop, whose cost is linear in time and which XLA compiles well."""

import keras

from trainer.probing.cells import run_cell
from trainer.probing.loop import Layout


@keras.saving.register_keras_serializable(package="looptape")
class LoopRNN(keras.layers.RNN):
    """Runs a cell over time. Takes what `keras.layers.RNN` takes and computes the same.

    With the weights of an `LSTM`, `GRU` or `SimpleRNN` layer and the cell of that layer the results are
    equal. Masks, unknown batch sizes and lengths, `go_backwards`, `stateful`, `unroll`, nested states and XLA
    work as they do there. Every time step is probed like that of a Keras layer.

    >>> layer = LoopRNN(keras.layers.LSTMCell(4), return_sequences=True)
    >>> tuple(layer(keras.ops.zeros((2, 7, 3))).shape)
    (2, 7, 4)

    Args:
        cell: a Keras cell, `keras.layers.StackedRNNCells`, or a list of cells to be stacked.
        return_sequences: all outputs [batch, time, units], or the last one [batch, units].
        return_state: the final states as well.
        go_backwards: start at the end; outputs come in the order in which they were computed.
        stateful: begin where the batch before ended.
        unroll: a Python loop; the length must be known.
        zero_output_for_mask: zeros at masked time steps, instead of the output before.
    """

    # Tells a probe session that replacing `inner_loop` by the recurrent loop changes nothing.
    runs_recurrent_loop = True

    def inner_loop(self, sequences, initial_state, mask, training=False):
        """Called by `keras.layers.RNN.call`; returns (last output, outputs, states)."""
        mask = keras.tree.flatten(mask)[0] if keras.tree.is_nested(mask) else mask
        layout = Layout(self.go_backwards, self.unroll, self.return_sequences, self.zero_output_for_mask)
        return run_cell(self.cell, sequences, initial_state, mask, training, layout)
