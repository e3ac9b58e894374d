"""The Keras layers that run in the hoisted form: LSTM, GRU and SimpleRNN with their standard activations."""

import keras
import tensorflow as tf

from looptape.trainer.recurrent.hoisted import both_ways
from looptape.trainer.recurrent.hoisted.cells import gru, lstm, simple_rnn
from looptape.trainer.recurrent.loops import memory as memory_bound

_LAYERS = (keras.layers.RNN, keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN)
_CELLS = (keras.layers.LSTMCell, keras.layers.GRUCell, keras.layers.SimpleRNNCell)


def applies(layer):
    """None if `inner_loop` computes what the layer computes, else the reason why not, such as "recurrent dropout"."""
    cell = layer.cell
    if type(layer) not in _LAYERS:
        return f"a layer class of its own, {type(layer).__name__}"
    if type(cell) not in _CELLS:
        return f"a cell that is not LSTMCell, GRUCell or SimpleRNNCell: {type(cell).__name__}"
    if layer.unroll:
        return "unroll=True"
    if cell.activation is not keras.activations.tanh:
        return f"activation={_name(cell.activation)} instead of tanh"
    gate = getattr(cell, "recurrent_activation", keras.activations.sigmoid)
    if gate is not keras.activations.sigmoid:
        return f"recurrent_activation={_name(gate)} instead of sigmoid"
    if cell.recurrent_dropout:
        return "recurrent dropout"
    if cell.dropout and getattr(cell, "implementation", 2) == 1:
        return "dropout with implementation=1, which has a mask for each gate"
    if cell.compute_dtype != layer.compute_dtype:
        return f"a cell that computes in {cell.compute_dtype} in a layer that computes in {layer.compute_dtype}"
    if cell.activity_regularizer is not None:
        return "an activity regularizer of the cell"
    return None


def _name(activation):
    return getattr(activation, "__name__", str(activation))


def inner_loop(
    layer, sequences, initial_state, mask=None, training=False, *, record=None, stride=None, wanted=True, **options
):
    """Computes `layer.inner_loop` in the hoisted form, for a layer that `applies` accepts.

    Args:
        sequences, initial_state, mask, training: as for `keras.layers.RNN.inner_loop`, batch first.
        record: `LoopRecord` of a probed run, or None.
        stride: keep the states of every so many time steps and compute the others again, see `loops.memory`; None for
            all. Needs a known number of time steps and no mask.
        wanted: False if nobody wants the gradient of the inputs, which saves memory with a stride.
        options: for `both_ways.run`.

    Returns:
        (last output, outputs, final states). The outputs hold all time steps, whatever `layer.return_sequences`; with a
        stride only the last one where the layer does not return them.
    """
    cell = layer.cell
    states = initial_state if keras.tree.is_nested(initial_state) else [initial_state]
    mask = keras.tree.flatten(mask)[0] if keras.tree.is_nested(mask) else mask
    mask = None if mask is None else tf.transpose(_two_axes(tf.cast(mask, tf.bool)))
    weights = cell.kernel, cell.recurrent_kernel, cell.bias
    states = [tf.cast(state, cell.compute_dtype) for state in states]
    sequences = tf.convert_to_tensor(sequences)
    dropout = cell.get_dropout_mask(sequences[:, 0]) if _drops_inputs(cell, training) else None

    def prepared(inputs):
        return tf.cast(inputs if dropout is None else inputs * dropout, cell.compute_dtype)

    if record is not None or stride is None:
        inputs = tf.transpose(sequences, [1, 0, 2])
        inputs = inputs if record is None else record.tap_inputs(inputs)
        if record is not None:
            options |= _reporting(record, inputs, states, mask, weights, options.get("act"))
        inputs = prepared(inputs)
        inputs = inputs if stride is None else both_ways.Recomputed(inputs, inputs.shape[0], stride)
    else:
        inputs = _recomputed(sequences, stride, prepared, wanted)
    outputs, states, last = _run(cell)(
        inputs,
        states,
        [None if weight is None else tf.cast(weight, cell.compute_dtype) for weight in weights],
        mask,
        go_backwards=layer.go_backwards,
        zero_output_for_mask=layer.zero_output_for_mask,
        sequences=layer.return_sequences,
        **options,
    )
    if record is not None:
        if mask is None:
            record.note_outputs(outputs if layer.return_sequences else last)
        states = record.finish(states, None if mask is None else mask[..., tf.newaxis])
    outputs = last[tf.newaxis] if outputs is None else outputs
    return last, tf.transpose(outputs, [1, 0, 2]), list(states)


def stride_of(call, memory):
    """(whether `inner_loop` can keep a bound on memory, its `stride`).

    Args:
        call: `layers.Call`.
        memory: see `loops.memory.check_memory`.
    """
    if memory is None:
        return True, None
    length = call.sequences.shape[1]
    if call.mask is not None or length is None or tf.executing_eagerly():
        return False, None
    recurrence = _run(call.layer.cell).args[0]
    states = [tf.convert_to_tensor(state) for state in keras.tree.flatten(call.initial_state)]  # stateful: variables
    found = memory_bound.stride_of(memory, length, [*states, *[states[0]] * sum(recurrence.kept)])
    return not tf.is_tensor(found), found


def _recomputed(sequences, stride, prepared, wanted):
    """Inputs [batch, time, features] for a loop with a stride. None is copied before its turn if `wanted` is False."""
    length = sequences.shape[1]

    def view(begin, size):
        batch, features = tf.shape(sequences)[0], sequences.shape[2]
        piece = tf.slice(sequences, [0, begin, 0], [batch, size, features])
        return prepared(tf.transpose(tf.ensure_shape(piece, [sequences.shape[0], size, features]), [1, 0, 2]))

    return both_ways.Recomputed(view(0, length) if wanted else view, length, stride)


def _reporting(record, inputs, states, mask, weights, act):
    """The arguments of `both_ways.run` for what is to be reported."""
    length = tf.shape(inputs)[0] if inputs.shape[0] is None else inputs.shape[0]
    # Masked time steps hand on what arrives at them together with what they send back.
    taps = record.start_known(length, states, 0, states[0], mask is not None, act is not None, apart=mask is not None)
    reported = [next(place for place, weight in enumerate(weights) if weight is v) for v in record.variables]
    return {"taps": taps, "reported": reported, "name": record.name}


def _run(cell):
    if isinstance(cell, keras.layers.LSTMCell):
        return lstm.run
    if isinstance(cell, keras.layers.GRUCell):
        return gru.run if cell.reset_after else gru.run_reset_before
    return simple_rnn.run


def _drops_inputs(cell, training):
    """Whether Keras's cell drops inputs. A rate of 1 drops none in an LSTM or GRU."""
    return training and cell.dropout > 0 and (cell.dropout < 1 or isinstance(cell, keras.layers.SimpleRNNCell))


def _two_axes(mask):
    return mask[..., 0] if mask.shape.rank == 3 else mask
