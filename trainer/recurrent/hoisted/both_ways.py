"""A recurrent layer with known equations: what need not wait for the time step before is taken out of the loop.

    before the loop     inputs times kernel, for all time steps in one matrix product
    in the loop         hidden state times recurrent kernel; backwards δ times its transpose
    after the loop      gradients of weights and inputs, a few matrix products over all time steps

Long sequences run in stretches, so that these products need less memory. With a bound on memory a stretch keeps nothing
but the states that it begins with, and runs once more in the backward pass.

`cells.lstm.run`, `cells.gru.run`, `cells.gru.run_reset_before` and `cells.simple_rnn.run` are `run` for one cell each.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from looptape.trainer.recurrent import internals
from looptape.trainer.recurrent.hoisted import compilation
from looptape.trainer.recurrent.hoisted.adjoint_pass import Action, AdjointPass, Keys
from looptape.trainer.recurrent.hoisted.recomputed_pass import RecomputedPass

STRETCH = 2**20  # numbers in one state of a stretch
MOST_STRETCHES = 16


def run(
    recurrence,
    inputs,
    initial_states,
    weights,
    mask=None,
    *,
    go_backwards=False,
    zero_output_for_mask=False,
    taps=None,
    reported=(0, 1, 2),
    act=None,
    compiled="auto",
    name=None,
    sequences=True,
):
    """Runs a cell over time, as `keras.layers.LSTM` and its like do. Eager or traced.

    Args:
        inputs: [time, batch, features]; or `Recomputed`, whose stretches the backward pass computes again. Then there
            is no mask.
        initial_states: one tensor per state, [batch, units].
        weights: (kernel, recurrent kernel, bias or None) of the Keras cell, as tensors of the dtype of `inputs`.
        mask: [time, batch], False where a time step is skipped: the states stay; the output is that of the time step
            before (zero if there was none), or zero if `zero_output_for_mask`.
        go_backwards: start at the last time step; outputs come in the order in which they were computed.
        taps: {key: zeros} of a probed run, or None. Their gradients are the report; the keys, and what comes with each,
            are in `report.read`.
        reported: positions in `weights` of those that the keys `weights` and `weight/<k>` are about.
        act: None, or `act(t, adjoints, valid) -> adjoints`, called in the backward loop with the time step (an int32
            tensor, in the order of the inputs), a tuple with λ_t of each state, [batch, units], and the mask at t,
            [batch, 1], or None. λ_t of a masked example stays as it is. If it has an attribute `carried`, a function
            `(t, adjoints, sender) -> adjoints`, that is called first, with what comes from time step `sender`, a scalar
            or with a mask [batch, 1], where there is one. If `compiled`, XLA must know its operations.
        compiled: whether XLA compiles the two loops: True, False, "auto" (by measured sizes), or a `CompiledShapes`,
            which decides like "auto" up to its number of shapes. `taps` have no say in it.
        name: of the layer, for warnings.
        sequences: False if nobody needs the outputs of all time steps. Only `Recomputed` inputs heed it.

    Returns:
        The outputs, [time, batch, units], or without `sequences` None; a tuple of the final states; the last output,
        which needs none of the others.
    """
    again = isinstance(inputs, Recomputed)
    inputs = inputs if again else tf.convert_to_tensor(inputs)
    if mask is not None:
        mask = tf.cast(mask, tf.bool)[..., tf.newaxis]
    if go_backwards:
        inputs = inputs.reversed() if again else tf.reverse(inputs, [0])
        mask = None if mask is None else tf.reverse(mask, [0])
    initial = tuple(tf.convert_to_tensor(state) for state in initial_states)
    weights = tuple(None if weight is None else tf.convert_to_tensor(weight) for weight in weights)
    shown = None if mask is None else mask if zero_output_for_mask else _begun(mask)
    length = inputs.length if again else _length(inputs)
    act = None if act is None else Action(act, go_backwards, length)
    keys = Keys(tuple(taps or ()), tuple(reported), name)
    choose = _choice(compiled, length, initial[0])
    given = recurrence, weights[2] is not None, mask, shown, act, choose, keys
    weights, taps = (weights if weights[2] is not None else weights[:2]), list((taps or {}).values())
    if again:
        return _recomputed(given, inputs, initial, weights, taps, sequences)
    both_ways = AdjointPass(*given)
    sizes = stretches(inputs.shape, initial[0].shape[-1]) if mask is None and act is None else None
    if sizes is not None:
        return _in_stretches(both_ways, inputs, sizes, initial, weights, taps)
    outputs, *final = both_ways(inputs, *initial, *weights, *taps)
    return outputs, tuple(final), outputs[-1]


class Recomputed(NamedTuple):
    """Inputs of a loop that keeps the states of every `stride`-th time step and computes the others again."""

    inputs: Any  # [time, batch, features]; or a function (begin, size) that gives some, whose gradient nobody wants
    length: int
    stride: int

    def reversed(self):
        """The same time steps, the last one first."""
        if not callable(self.inputs):
            return self._replace(inputs=tf.reverse(self.inputs, [0]))
        view = self.inputs
        return self._replace(inputs=lambda begin, size: tf.reverse(view(self.length - begin - size, size), [0]))


def stretches(shape, units):
    """The lengths of the stretches that a long sequence is cut into, or None to run it in one.

    Matrix products before and after the loops take a multiple of the memory that the loops keep. They are made for one
    stretch after the other.

    Args:
        shape: of the inputs, [time, batch, features]. An unknown batch counts as 32; an unknown time gives None.
    """
    length, batch = shape[0], shape[1] or 32
    wanted = min(-(-(length or 0) * batch * units // STRETCH), MOST_STRETCHES)
    if wanted <= 1:
        return None
    # Equal lengths, if they can be had: XLA compiles each by itself.
    number = next((n for n in range(wanted, 2 * wanted) if length % n == 0), wanted)
    return [(length + place) // number for place in range(number)]


def even_stride(length, stride):
    """`stride`, or a smaller one that leaves no time steps over, if there is one above half of it. All integers."""
    number = -(-length // stride)
    return next((length // n for n in range(number, 2 * number) if length % n == 0), min(stride, length))


def _in_stretches(both_ways, inputs, sizes, states, weights, taps):
    begin, outputs = 0, []
    for now, size, *own in zip(tf.split(inputs, sizes), sizes, *(tf.split(tap, sizes) for tap in taps), strict=True):
        # Not before it is its turn: its projection takes memory.
        with tf.control_dependencies(states if begin else None):
            stretch = both_ways.at(begin, begin + size < sum(sizes))
            found, *states = stretch(tf.identity(now), *states, *weights, *own)
        begin += size
        outputs.append(found)
    return tf.concat(outputs, 0), tuple(states), outputs[-1][-1]


def _recomputed(given, inputs, states, weights, taps, sequences):
    stride = even_stride(inputs.length, inputs.stride)
    view = inputs.inputs if callable(inputs.inputs) else None
    both_ways = RecomputedPass(*given, length=inputs.length, stride=stride, view=view, sequences=sequences)
    arguments = *states, *weights, *taps
    results = both_ways(*arguments) if view is not None else both_ways(inputs.inputs, *arguments)
    if not sequences:
        return None, tuple(results), results[0]
    outputs, *final = results
    return outputs, tuple(final), outputs[-1]


def _begun(mask):
    """True from the first valid time step of each example on."""
    return tf.cumsum(tf.cast(mask, tf.int32), 0) > 0


def _choice(compiled, length, state):
    """Whether the loops are compiled: a bool, or a bool tensor where the shape is known only when the program runs."""
    if compiled in (True, False):
        return compiled
    if internals.in_xla():
        return False  # compiled with all else
    if not compilation.is_compiled(state.dtype):
        return False
    if compiled == "auto":
        return True
    batch = state.shape[0]
    return compiled.admit(length, tf.shape(state)[0] if batch is None else batch)


def _length(tensor):
    return tf.shape(tensor)[0] if tensor.shape[0] is None else tensor.shape[0]
