"""A recurrence over a long sequence that keeps few states. The backward pass runs the loops of each stretch once more.

Forwards and backwards are one loop each over stretches of equal length, so that the program does not grow with their
number. Time steps that are left over run by themselves at the end.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from looptape.trainer.recurrent.hoisted.adjoint_pass import AdjointPass


class _Given(NamedTuple):
    """The arguments of a pass."""

    inputs: Any  # (inputs,), or () if a function gives them
    states: Any
    weights: Any
    taps: Any


class _Kept(NamedTuple):
    """The states that a forward pass keeps."""

    starts: Any  # the states that the stretches begin with: a tuple of [stretches, batch, units]
    before_rest: Any  # those that the time steps left over begin with
    after: Any  # (all outputs,), or () if nobody needs them
    final: Any


class RecomputedPass(AdjointPass):
    """As `AdjointPass`, without a mask; keeps the states of every `stride`-th time step.

    Args:
        given: as for `AdjointPass`.
        length: number of time steps.
        stride: number of time steps of a stretch.
        view: function `(begin, size)` that gives inputs whose gradient nobody wants, or None: they are an argument.
        sequences: whether the results begin with all outputs.
    """

    def __init__(self, *given, length, stride, view, sequences):
        super().__init__(*given)
        self._length, self._stride, self._view = length, stride, view
        self._count, self._rest = divmod(length, stride)
        self.view = None if view is None else lambda: view(0, length)
        self.sequences = sequences
        self._stretch = AdjointPass(*given)
        self._stretch.sequences = sequences
        self._stretch.total = _total

    def forwards(self, arguments):
        given = self._named(arguments)
        before_rest, starts, outputs = given.states, (), []

        def body(place, states, starts, outputs):
            ran = self._forwards(given, place * self._stride, self._stride, states)
            starts = tuple(items.write(place, state) for items, state in zip(starts, states, strict=True))
            return place + 1, ran.final, starts, tuple(items.write(place, ran.after[0]) for items in outputs)

        if self._count:
            starts = tuple(self._list(state.shape, state.dtype) for state in given.states)
            first = given.states[0]
            lists = (self._list([self._stride, *first.shape], first.dtype),) if self.sequences else ()
            _, before_rest, starts, lists = self._loop(body, (tf.constant(0), given.states, starts, lists))
            starts, outputs = tuple(items.stack() for items in starts), [self._joined(items) for items in lists]
        final = before_rest
        if self._rest:
            ran = self._forwards(given, self._length - self._rest, self._rest, before_rest)
            final, outputs = ran.final, [*outputs, ran.after[0]]
        return _Kept(starts, before_rest, (tf.concat(outputs, 0),) if self.sequences else (), final)

    def backwards(self, arguments, ran, upstream):
        given = self._named(arguments)
        found, of_states = [], upstream[self.sequences :]
        of_weights = tuple(tf.zeros_like(weight) for weight in given.weights)
        if self._rest:
            # Not before its turn, and not merged with the run of the forward pass.
            with tf.control_dependencies(upstream):
                start = tuple(tf.identity(state) for state in ran.before_rest)
            place = self._length - self._rest, self._rest, False
            found, of_states, of_weights = self._stretch_backwards(given, place, start, upstream, of_states)

        def body(done, of_states, sums, lists):
            stretch = self._count - 1 - done
            place = stretch * self._stride, self._stride, tf.logical_or(done > 0, self._rest > 0)
            start = tuple(kept[stretch] for kept in ran.starts)
            found, of_states, added = self._stretch_backwards(given, place, start, upstream, of_states)
            sums = tuple(_total(both) for both in zip(sums, added, strict=True))
            lists = tuple(items.write(stretch, piece) for items, piece in zip(lists, found, strict=True))
            return done + 1, of_states, sums, lists

        if self._count:
            lists = tuple(self._list([self._stride, *x.shape[1:]], x.dtype) for x in (*given.inputs, *given.taps))
            _, of_states, of_weights, lists = self._loop(body, (tf.constant(0), of_states, of_weights, lists))
            ends, found = found, [self._joined(items) for items in lists]
            found = [tf.concat(both, 0) for both in zip(found, ends, strict=True)] if self._rest else found
        number = len(given.inputs)
        return *found[:number], *of_states, *of_weights, *found[number:]

    def _forwards(self, given, begin, size, states):
        stretch, own = self._at(given, begin, size, states)
        return stretch.forwards(own)

    def _stretch_backwards(self, given, place, start, upstream, of_states):
        """(gradients of the inputs and taps of a stretch, of the states before it, of the weights)."""
        begin, size, later = place
        stretch, own = self._at(given, begin, size, start, later)
        external = [_piece(upstream[0], begin, size)] if self.sequences else []
        found = stretch.backwards(own, stretch.forwards(own), (*external, *of_states))
        inputs = len(given.inputs)
        states = inputs + len(given.states)
        weights = states + len(given.weights)
        return [*found[:inputs], *found[weights:]], found[inputs:states], found[states:weights]

    def _at(self, given, begin, size, states, later=False):
        """(the pass of a stretch, its arguments)."""
        view = None if self._view is None else lambda: self._view(begin, size)
        inputs = [_piece(tensor, begin, size) for tensor in given.inputs]
        return self._stretch.at(begin, later, view), (*inputs, *states, *given.weights)

    def _named(self, arguments):
        inputs = 0 if self._view is not None else 1
        states = inputs + self.recurrence.states
        weights = states + (3 if self.has_bias else 2)
        return _Given(arguments[:inputs], arguments[inputs:states], arguments[states:weights], arguments[weights:])

    def _loop(self, body, carried):
        number = self._count
        return tf.while_loop(
            lambda place, *_: place < number, body, carried, maximum_iterations=number, parallel_iterations=1
        )

    def _list(self, shape, dtype):
        return tf.TensorArray(dtype, self._count, element_shape=shape)

    def _joined(self, items):
        """[time, …] of a list of stretches."""
        whole = items.stack()
        shape = [self._count * self._stride, *whole.shape[2:]]
        return tf.ensure_shape(tf.reshape(whole, tf.concat([shape[:1], tf.shape(whole)[2:]], 0)), shape)


def _total(tensors):
    """The sum of a list of tensors.

    TensorFlow's graph optimizer merges additions of more than two tensors into one with a temporary variable, which the
    last iteration of a loop does not free: the next update would fail.
    """
    return tf.reduce_sum(tf.stack(tensors), 0) if len(tensors) > 1 else tensors[0]


def _piece(tensor, begin, size):
    """`size` time steps of a tensor [time, …]."""
    rank = tensor.shape.rank
    sizes = tf.concat([[size], tf.shape(tensor)[1:]], 0)  # XLA takes no -1 where it does not know where to begin
    return tf.ensure_shape(tf.slice(tensor, [begin] + [0] * (rank - 1), sizes), [size, *tensor.shape[1:]])
