"""The forward half of a recurrent loop: a `tf.while_loop` that keeps the states of its time steps.

Beside the states it keeps what is costly to compute again, matrix products and activations; with a stride only the
states of every so many time steps.
"""

import contextlib
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from looptape.trainer.recurrent import internals
from looptape.trainer.recurrent.loops.python_steps import index_of, pack, select


class First(NamedTuple):
    """Findings of a trial run of the step."""

    output: Any
    states: Any  # nested
    moving: Any  # tensors that the loop carries along for the step's own use
    costly: Any  # {position: result} of its matrix products and the like that are kept rather than computed again


class StateLoop:
    """Runs the time steps of `AdjointLoop`, whose arguments it takes."""

    def __init__(self, step, first, inputs, states, mask, layout, stride, record, steered=False):
        self._step, self._first, self._layout = step, first, layout
        self._structure = states
        self._inputs, self._initial, self._moving = inputs, keras.tree.flatten(states), list(first.moving)
        self._length = tf.shape(inputs)[0] if inputs.shape[0] is None else inputs.shape[0]
        self._given_mask = mask
        self._mask = tf.reverse(mask, [0]) if mask is not None and layout.go_backwards else mask
        self._stride = stride
        self._record = record
        self._real = [j for j, state in enumerate(self._initial) if state.dtype.is_floating]
        new = keras.tree.flatten(first.states)
        self._alias = index_of(first.output, new)
        self._output = first.output
        self._taps = {}
        if record is not None:
            self._taps = record.start(step, self._length, self._initial, first, mask is not None, steered)
        # The output is carried where masked time steps repeat it, and where only the last one is wanted.
        self._repeats = mask is not None and not layout.zero_output_for_mask
        self._keeps = self._repeats or not layout.return_sequences
        # An output that is a state, and no mask between them: what arrives there is simply added to λ.
        self._merged = self._alias is not None and mask is None
        self._pends = self._repeats or not (layout.return_sequences or self._merged)
        self._saved = None

    def _forward(self):
        """(outputs and real-valued final states, {j: other final states}, moving, tensors that the loop captured)."""
        with self._repeating():
            carried = (self._initial, self._moving, tf.zeros_like(self._output) if self._keeps else ())
            outputs = self._array(self._output) if self._layout.return_sequences else ()
            if self._stride is None:
                saved = [self._array(x) for x in (*self._initial, *self._moving, *self._first.costly.values())]
                t, carried, outputs, self._saved = self._advance(0, self._length, carried, outputs, saved, None)
            else:
                chunks = -(-self._length // self._stride)
                saved = [self._array(x, chunks) for x in (*self._initial, *self._moving)]

                def chunk(c, carried, outputs, saved):
                    saved = [a.write(c, x) for a, x in zip(saved, (*carried[0], *carried[1]), strict=True)]
                    start = c * self._stride
                    end = tf.minimum(start + self._stride, self._length)
                    _, carried, outputs, _ = self._advance(start, end, carried, outputs, [], start)
                    return c + 1, carried, outputs, saved

                t, carried, outputs, self._saved = tf.while_loop(
                    lambda c, *_: c < chunks, chunk, (tf.constant(0), carried, outputs, saved), parallel_iterations=1
                )
        flat, moving, last = carried
        results = [outputs.stack() if self._layout.return_sequences else last, *(flat[j] for j in self._real)]
        if self._layout.return_sequences:
            results[0] = tf.ensure_shape(results[0], [self._inputs.shape[0], *self._output.shape])
        integers = {j: state for j, state in enumerate(flat) if j not in self._real}
        return results, integers, [tf.stop_gradient(x) for x in moving], internals.captured_by_loop(t)

    def _advance(self, start, end, carried, outputs, saved, offset):
        """Runs the time steps from `start` to `end`. Entering states go to `saved` at their index less `offset`."""

        def body(t, carried, outputs, saved):
            flat, moving, previous = carried
            entering, begin = (*flat, *moving), internals.operations_since()
            _, output, new, moving = self._at(t, flat, moving)
            if saved:
                kept = (*entering, *self._costly_since(begin))
                place = t if offset is None else t - offset
                saved = [a.write(place, x) for a, x in zip(saved, kept, strict=True)]
            if self._mask is not None:
                valid = tf.gather(self._mask, t)
                output = select(valid, output, previous if self._repeats else tf.zeros_like(output))
                new = [select(valid, after, before) for after, before in zip(new, flat, strict=True)]
            if self._layout.return_sequences and outputs != ():
                outputs = outputs.write(t, output)
            return t + 1, (new, moving, output if self._keeps else ()), outputs, saved

        return tf.while_loop(lambda t, *_: t < end, body, (tf.convert_to_tensor(start), carried, outputs, saved))

    def _at(self, t, flat, moving, marks=None):
        """(inputs, output, flat new states, moving) of iteration t."""
        index = self._length - 1 - t if self._layout.go_backwards else t
        now = tf.gather(self._inputs, index)
        marks = {} if marks is None else marks
        output, new, moving = self._step(t, now, pack(self._structure, flat), marks, moving, self._record)
        # A state that is handed on as it is gets a tensor of its own, so that the two can be told apart.
        new = [tf.identity(x) if index_of(x, flat) is not None else x for x in keras.tree.flatten(new)]
        return now, output, [shaped(x, like) for x, like in zip(new, flat, strict=True)], moving

    def _costly_since(self, begin):
        """The results of a step that are kept: the same operations as in the trial run."""
        found = internals.costly_results(internals.operations_since(begin))
        expected = [(x.dtype, x.shape.rank) for x in self._first.costly.values()]
        kept = [found[position] for position in self._first.costly if position < len(found)]
        if [(x.dtype, x.shape.rank) for x in kept] != expected:
            raise RuntimeError(
                f"A time step computes {[x.op.type for x in found]}, which is not what it computed when it was first "
                "called. Let it make the same operations at every call, or use recurrent='keras'."
            )
        return kept

    def _array(self, like, size=None):
        size = self._length if size is None else size
        return tf.TensorArray(like.dtype, size, element_shape=like.shape, clear_after_read=False)

    @contextlib.contextmanager
    def _repeating(self):
        with self._step.repeatable(), contextlib.nullcontext() if self._record is None else self._record.repeating():
            yield


def shaped(tensor, like):
    """`tensor`, which has the shape of `like` as far as that is known."""
    tensor = tf.convert_to_tensor(tensor)
    return tensor if tensor.shape == like.shape else tf.ensure_shape(tensor, like.shape)
