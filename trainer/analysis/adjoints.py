"""Adjoints of a recurrent layer for many losses at once, for the loss Jacobian and the credit matrix.

An ordinary backward pass differentiates one scalar. Here C scalars go back through the loop together: the adjoints are
[C, batch, units], and each time step is linearised once for all C. The gradients of the weights follow afterwards, for
a block of time steps at a time: the cell is called once on all examples of all time steps in the block, as if time were
part of the batch, so that the matrix products sum over time. That is correct for every cell that treats all examples
and time steps alike; `fold_error` measures whether a cell does.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from looptape.trainer.recurrent import internals
from looptape.trainer.recurrent.loops.cells import CellStep, inner_cells
from looptape.trainer.recurrent.loops.python_steps import direct_gradients, index_of, pack, select, swap
from looptape.trainer.recurrent.loops.steps import StepScope

# Examples × time steps that a cell is called on at once: enough for the matrix products, little enough for the cache.
_ROWS = 2048


class Adjoints(NamedTuple):
    """The adjoints of C losses in a loop. Parts that were not requested are None or empty."""

    inputs: Any  # [C, time, batch, features] in the order of the iterations
    initial: Any  # [C, batch, units] of each initial state
    weights: Any  # [C, *shape] of each trainable variable of the cell
    state_norms: Any  # [C, time] in input time: mean over the valid examples of the whole state's norm
    input_norms: Any  # the same of the inputs


class Loop:
    """One run of a recurrent layer. Time is always in the order of the iterations."""

    def __init__(self, label, name, layer, sequences, initial_state, mask, training):
        self.label, self.name, self.layer, self.cell = label, name, layer, layer.cell
        self._training = training
        self._outer = internals.outer_scope()
        self.backwards = layer.go_backwards
        inputs = swap(tf.convert_to_tensor(sequences))
        self.inputs = tf.reverse(inputs, [0]) if self.backwards else inputs
        states = list(initial_state) if keras.tree.is_nested(initial_state) else [initial_state]
        self._states = keras.tree.map_structure(tf.convert_to_tensor, states)
        self.initial = keras.tree.flatten(self._states)
        self.variables = list(getattr(self.cell, "trainable_variables", ()))
        self.valid = None
        if mask is not None:
            valid = swap(tf.cast(mask, tf.bool))
            self.valid = tf.reverse(valid, [0]) if self.backwards else valid
        self.length, self.batch = self.inputs.shape[0], self.inputs.shape[1]

    def can_be_recorded(self):
        """Traces a time step. Returns False if the loop cannot be recorded and must run unchanged."""
        if None in (self.length, self.batch) or not self.inputs.dtype.is_floating:
            return False
        if self.layer.unroll and self.valid is not None and self.layer.zero_output_for_mask:
            return False  # Keras zeroes these outputs in another place
        if not all(state.dtype.is_floating for state in self.initial):
            return False
        if self._training and any(draws_masks(cell) for cell in (self.cell, *inner_cells(self.cell))):
            return False
        output, new, moving = CellStep(self.cell, self._training).first(self.inputs[0], self._states, None)
        self._output = (output.shape, output.dtype)
        self.alias = index_of(output, keras.tree.flatten(new))
        # With a mask, outputs of masked time steps repeat the one before: it travels along like a state.
        self.carries_output = self.valid is not None and not self.layer.zero_output_for_mask
        return not moving and output.shape.is_fully_defined()

    def run(self, tape):
        """Runs the forward pass. Returns `(last output, outputs, final states)`, which are sources for `tape`."""
        with tape.stop_recording():
            self.weights = [internals.read(variable, self._outer) for variable in self.variables]
            carried = self.initial + ([tf.zeros(*self._output)] if self.carries_output else [])
            entering = [tf.TensorArray(x.dtype, self.length, element_shape=x.shape) for x in carried]
            outputs = tf.TensorArray(self._output[1], self.length, element_shape=self._output[0])

            def body(t, carried, entering, outputs):
                output, new = self.step(self.inputs[t], carried, None if self.valid is None else self.valid[t])
                entering = [array.write(t, state) for array, state in zip(entering, carried, strict=True)]
                return t + 1, new, entering, outputs.write(t, output)

            _, final, entering, outputs = tf.while_loop(
                lambda t, *_: t < self.length, body, (tf.constant(0), carried, entering, outputs)
            )
            self.entering = [array.stack() for array in entering]  # what each time step begins with
            outputs = tf.stop_gradient(outputs.stack())
            self.final = [tf.stop_gradient(state) for state in final[: len(self.initial)]]
        self.outputs = outputs if self.layer.return_sequences else tf.identity(outputs[-1])
        tape.watch([self.outputs, *self.final])
        last = self.outputs[-1] if self.layer.return_sequences else self.outputs
        sequence = swap(self.outputs) if self.layer.return_sequences else last[:, tf.newaxis]
        return last, sequence, pack(self._states, self.final)

    def step(self, inputs, carried, valid, unmasked=None):
        """Returns (output, carried state) of one time step, or of many with time in the batch.

        `unmasked`: a list that receives the output and the states before masking.
        """
        carried = list(carried)
        previous = carried.pop() if self.carries_output else None
        kwargs = {"training": self._training} if internals.takes_training(self.cell) else {}
        values = {id(v): w for v, w in zip(self.variables, self.weights, strict=True)}
        with StepScope(self._outer, values, ()):
            output, new = self.cell(inputs, pack(self._states, carried), **kwargs)
        new = keras.tree.flatten(new)
        if unmasked is not None:
            unmasked += [output, new]
        if valid is not None:
            output = select(valid, output, tf.zeros_like(output) if previous is None else previous)
            new = [select(valid, after, before) for after, before in zip(new, carried, strict=True)]
        return output, new + ([output] if self.carries_output else [])

    def valid_times(self):
        """Returns [time], in input order: whether any example is valid at that time step."""
        if self.valid is None:
            return tf.ones([self.length], tf.bool)
        valid = tf.reduce_any(self.valid, axis=1)
        return tf.reverse(valid, [0]) if self.backwards else valid

    @property
    def block(self):
        """The number of time steps in one call of the cell."""
        return max(1, min(self.length, _ROWS // self.batch))

    def fold_error(self):
        """Returns how much the cell's results differ between joint and separate calls on time steps.

        The value is the largest relative deviation of a state, at both ends of the sequence. If it exceeds rounding,
        the cell does not treat all examples and time steps alike.
        """
        half = max(1, self.block // 2)
        chosen = sorted({*range(min(half, self.length)), *range(max(0, self.length - half), self.length)})
        folded = [tf.gather(x, chosen) for x in (self.inputs, *self.entering)]
        valid = None if self.valid is None else _fold(tf.gather(self.valid, chosen))
        found = self.step(_fold(folded[0]), [_fold(x) for x in folded[1:]], valid)[1]
        worst = tf.zeros([], tf.float64)
        for state, own, final in zip(found[: len(self.final)], self.entering, self.final, strict=False):
            leaving = _fold(tf.gather(tf.concat([own[1:], final[tf.newaxis]], axis=0), chosen))
            scale = tf.reduce_max(tf.abs(leaving)) + tf.cast(1e-30, leaving.dtype)
            worst = tf.maximum(worst, tf.cast(tf.reduce_max(tf.abs(state - leaving)) / scale, tf.float64))
        return worst

    # ---- Back through the loop.

    def back(self, arriving, final, *, inputs, weights, norms=False, input_norms=False, window=None):
        """Returns the `Adjoints` of C losses.

        Args:
            arriving: [C, time, batch, units] at the outputs (or [C, batch, units] at the last one), or None.
            final: [C, batch, units] at each final state, or None.
            inputs, norms, input_norms: whether to compute these.
            weights: positions of the variables to differentiate.
            window: number of time steps after which to cut the gradient, as truncated back-propagation does.
        """
        count = next(x for x in [arriving, *final] if x is not None).shape[0]
        way = _Way(self, count, arriving, inputs, weights, norms, input_norms, window)
        given = dict(enumerate(final))
        later = [_or_zeros(given.get(j), state, count) for j, state in enumerate(self._carried_shapes())]
        start = self._last_reached(arriving, final)
        end, later, sums, arrays = tf.while_loop(
            lambda end, *_: end > 0,
            way.block_back,
            (start + 1, later, way.empty_sums(), way.empty_arrays()),
            parallel_iterations=1,
        )
        found = {key: array.stack() for key, array in arrays.items()}
        return Adjoints(
            swap(found["inputs"]) if inputs else None,
            later[: len(self.initial)],
            sums,
            self._in_input_time(found["state_norms"]) if norms else None,
            self._in_input_time(found["input_norms"]) if input_norms else None,
        )

    def _carried_shapes(self):
        return self.initial + ([tf.zeros(*self._output)] if self.carries_output else [])

    def _last_reached(self, arriving, final):
        """Returns the last time step that any of the losses depends on; the backward pass starts there."""
        if not self.layer.return_sequences or any(gradient is not None for gradient in final):
            return tf.constant(self.length - 1)
        reached = tf.reduce_any(arriving != 0, axis=[0, *range(2, arriving.shape.rank)])
        return tf.reduce_max(tf.where(reached, tf.range(self.length), -1))

    def _in_input_time(self, norms):
        return tf.transpose(tf.reverse(norms, [0]) if self.backwards else norms)


class _Way:
    """The nested loops of `Loop.back`: blocks of time steps, time steps of a block, losses."""

    def __init__(self, loop, count, arriving, inputs, weights, norms, input_norms, window):
        self.loop, self.count, self.arriving = loop, count, arriving
        self.chosen = list(weights)
        self.wanted = {"inputs": inputs, "state_norms": norms, "input_norms": input_norms}
        self.window = window
        # An output that is a state and is not masked has one adjoint, together with that state.
        self.merged = loop.alias is not None and loop.valid is None

    def empty_sums(self):
        weights = [self.loop.weights[k] for k in self.chosen]
        return [tf.zeros([self.count, *weight.shape], weight.dtype) for weight in weights]

    def empty_arrays(self):
        shapes = {"inputs": ([self.count, *self.loop.inputs.shape[1:]], self.loop.inputs.dtype)}
        shapes |= {key: ([self.count], tf.float64) for key in ("state_norms", "input_norms")}
        return {
            key: tf.TensorArray(dtype, self.loop.length, element_shape=shape)
            for key, (shape, dtype) in shapes.items()
            if self.wanted[key]
        }

    def block_back(self, end, later, sums, arrays):
        start = tf.maximum(end - self.loop.block, 0)
        shapes = [([self.count, *x.shape], x.dtype) for x in self._targets_like()]
        seeds = [tf.TensorArray(dtype, end - start, element_shape=shape) for shape, dtype in shapes if self.chosen]

        def body(t, later, seeds, arrays):
            later, found, passed = self.step_back(t, later)
            arrays = {key: array.write(t, found[key]) for key, array in arrays.items()}
            seeds = [array.write(t - start, seed) for array, seed in zip(seeds, passed, strict=False)]
            return t - 1, later, seeds, arrays

        _, later, seeds, arrays = tf.while_loop(
            lambda t, *_: t >= start, body, (end - 1, later, seeds, arrays), parallel_iterations=1
        )
        if self.chosen:
            found = self._weights_of(start, end, [array.stack() for array in seeds])
            sums = [total + own for total, own in zip(sums, found, strict=True)]
        return start, later, sums, arrays

    def _targets_like(self):
        carried = self.loop._carried_shapes()
        return carried if self.merged else [tf.zeros(*self.loop._output), *carried]

    def _targets(self, output, carried):
        return carried if self.merged else [output, *carried]

    def step_back(self, t, later):
        """Goes back one time step. Returns adjoints of its initial state, the reported values, and its own adjoints."""
        loop = self.loop
        inputs, carried = loop.inputs[t], [state[t] for state in loop.entering]
        valid = None if loop.valid is None else loop.valid[t]
        arriving = self._arriving(t)
        total = list(later)
        if self.merged and arriving is not None:
            total[loop.alias] = total[loop.alias] + arriving
        if arriving is None:
            arriving = tf.zeros([self.count, *loop._output[0]], loop._output[1])
        passed = total if self.merged else [arriving, *total]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch([inputs, *carried])
            unmasked: list = []
            targets = self._targets(*loop.step(inputs, carried, valid, unmasked))
        needs_inputs = self.wanted["inputs"] or self.wanted["input_norms"]
        sources = carried + ([inputs] if needs_inputs else [])
        found = vector_jacobian(tape, targets, sources, passed)
        found = [_or_zeros(gradient, x, self.count) for gradient, x in zip(found, sources, strict=True)]
        before = found[: len(carried)]
        if self.window is not None:
            # Windows lie in the order of the inputs, also where a layer goes backwards.
            border = (loop.length - t if loop.layer.go_backwards else t) % self.window
            before = [tf.where((t > 0) & (border == 0), tf.zeros_like(x), x) for x in before]
        report = {"inputs": found[-1]}
        if self.wanted["input_norms"]:
            report["input_norms"] = _mean_norm([found[-1]], valid)
        if self.wanted["state_norms"]:
            report["state_norms"] = _mean_norm(self._whole_state(tape, unmasked, total, arriving, valid), valid)
        return before, report, passed

    def _whole_state(self, tape, unmasked, total, arriving, valid):
        """Returns λ of the states after a time step: their adjoint, plus (∂y/∂s)ᵀ times the adjoint of the output y."""
        loop = self.loop
        states = total[: len(loop.initial)]
        if self.merged:
            return states
        if loop.carries_output:
            arriving = arriving + total[-1]
        if valid is not None:
            arriving = select(valid[tf.newaxis], arriving, tf.zeros_like(arriving))
        if loop.alias is not None:
            states[loop.alias] = states[loop.alias] + arriving
            return states
        output, new = unmasked

        def way(later, earlier, gradient):
            return vector_jacobian(tape, [new[later]], [new[earlier]], [gradient])[0]

        direct = direct_gradients(vector_jacobian(tape, [output], new, [arriving]), way)
        return [own if part is None else own + part for own, part in zip(states, direct, strict=True)]

    def _arriving(self, t):
        if self.arriving is None:
            return None
        if self.loop.layer.return_sequences:
            return self.arriving[:, t]
        return tf.where(t == self.loop.length - 1, self.arriving, tf.zeros_like(self.arriving))

    def _weights_of(self, start, end, seeds):
        """Returns [C, *shape] for each chosen weight: the gradient from a block of time steps."""
        loop = self.loop
        valid = None if loop.valid is None else _fold(loop.valid[start:end])
        weights = [loop.weights[k] for k in self.chosen]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(weights)
            output, carried = loop.step(
                _fold(loop.inputs[start:end]), [_fold(state[start:end]) for state in loop.entering], valid
            )
        targets = self._targets(output, carried)
        arrays = [tf.TensorArray(w.dtype, self.count, element_shape=w.shape) for w in weights]

        def body(index, arrays):
            own = [_fold(seed[:, index]) for seed in seeds]
            gradients = tape.gradient(targets, weights, output_gradients=own)
            gradients = [tf.zeros_like(w) if g is None else g for g, w in zip(gradients, weights, strict=True)]
            return index + 1, [a.write(index, tf.convert_to_tensor(g)) for a, g in zip(arrays, gradients, strict=True)]

        _, arrays = tf.while_loop(
            lambda index, _: index < self.count, body, (tf.constant(0), arrays), parallel_iterations=1
        )
        return [array.stack() for array in arrays]


def draws_masks(cell):
    """Returns whether a Keras cell has dropout. Its cached mask has one row per example, too few for folded time."""
    return bool(getattr(cell, "dropout", 0) or getattr(cell, "recurrent_dropout", 0))


def vector_jacobian(tape, targets, sources, seeds):
    """Returns [C, ...] gradients of the sources for C sets of seeds, None if not connected. Traced.

    Args:
        tape: persistent.
        targets: a list of tensors.
        sources: a list of tensors or variables.
        seeds: for each target [C, *shape].
    """
    connected = []

    def one(seeds):
        found = tape.gradient(targets, sources, output_gradients=list(seeds))
        connected[:] = [gradient is not None for gradient in found]
        # Something is always returned: a function that returns nothing cannot be vectorised.
        return [seeds[0], *(tf.convert_to_tensor(gradient) for gradient in found if gradient is not None)]

    found = iter(tf.vectorized_map(one, tuple(seeds))[1:])
    return [next(found) if is_connected else None for is_connected in connected]


def _or_zeros(gradient, like, count):
    return tf.zeros([count, *like.shape], like.dtype) if gradient is None else gradient


def _fold(tensor):
    """[time, batch, ...] to [time · batch, ...]."""
    return tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], axis=0))


def _mean_norm(adjoints, valid):
    """Returns [C]: the joint norm of [C, batch, ...] tensors, mean over the valid examples; NaN if none is valid."""
    squares = tf.add_n(
        [tf.reduce_sum(tf.square(tf.cast(x, tf.float64)), axis=list(range(2, x.shape.rank))) for x in adjoints]
    )
    norms = tf.sqrt(squares)
    if valid is None:
        return tf.reduce_mean(norms, axis=1)
    valid = tf.cast(valid, tf.float64)
    return tf.reduce_sum(norms * valid, axis=1) / tf.reduce_sum(valid)
