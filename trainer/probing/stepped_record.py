"""Records the time steps that Python runs one by one, without taps.

The tape only tells what arrives at the outputs and the final states. From there the report goes back through
the loop once more, by a tape of its own around each time step. So the training gradient is summed in the very
order of an unprobed update; a tap would split some of its sums in two. It costs a second backward pass of the
loop, which in eager and unrolled loops is nothing to save.

One thing is not seen this way: a loss that is made of gradients through the loop itself (nested tapes around an eager
or unrolled layer) depends on the states by other ways than the outputs. In traced loops, which are tapped, it is.
"""

import functools
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from looptape.trainer.probing import taps
from looptape.trainer.probing.records import LoopRecord
from looptape.trainer.recurrent import internals
from looptape.trainer.recurrent.loops import python_steps


class _Step(NamedTuple):
    tape: Any
    entering: Any  # [inputs, *states]
    weights: Any  # what the weights are read from
    leaving: Any  # states
    output: Any


class StepRecord(LoopRecord):
    """`LoopRecord` for loops in Python. Its sources are `outputs` or `last`, and `final/<j>`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._steps = {}  # index of the cell -> [_Step]

    def tap_inputs(self, inputs):
        self.batch, self.length = tf.shape(inputs)[1], inputs.shape[0]
        return inputs

    def discover(self, name, tensor, batched):
        """A `probe` in a time step is like any other in Python."""

    def separate(self, flat):
        """Gives states that are one and the same tensor a tensor each."""
        ids = [id(state) for state in flat]
        return [tf.identity(s) if ids.index(id(s)) < position else s for position, s in enumerate(flat)]

    def observe(self, index, call, inputs, states):
        """Runs `call(inputs, states)`, a time step of cell `index`, and remembers how to go back through
        it.
        """
        flat, outer = keras.tree.flatten(states), internals.outer_scope()
        weights = [internals.source(self.variables[k], outer) for k in self._variables_of(index)]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([tensor for tensor in [inputs, *flat, *weights] if tensor.dtype.is_floating])
            output, new = call(inputs, states)
        leaving = keras.tree.flatten(new)
        self.inner[index] = (output, python_steps.index_of(output, leaving))
        self._steps.setdefault(index, []).append(_Step(tape, [inputs, *flat], weights, leaving, output))
        return output, new

    def finish(self, states, mask):
        states = super().finish(states, mask)
        self.masked = mask is not None
        self.make_groups([state.dtype.is_floating for state in keras.tree.flatten(states)], self.inner[0][1])
        return states

    def is_reached(self, gradients):
        return any(gradient is not None for gradient in gradients.values())

    def translate(self, gradients):
        found = {key: value for key, value in gradients.items() if key.startswith("final/")} | self._arriving(gradients)
        arriving = self._unstack_arriving(found)
        # Doubled, and halved below, which is exact: were these the very operations of the training gradient,
        # TensorFlow would merge the two, and might then sum the latter in another order.
        later = [_double(found.get(f"final/{j}")) for j in range(self._count_states())]
        ways = []
        for number in range(self.length - 1, -1, -1):
            way, later = self._go_back(number, later, _double(arriving[number]))
            ways.append(way)
        for key in ways[0]:
            found[key] = tf.stack([way[key] for way in reversed(ways)]) / 2
        if "input" in found and self.layout.go_backwards:
            found["input"] = tf.reverse(found["input"], [0])
        if not self.inputs:
            found.pop("input", None)
        if self.weights == "norms" and self.variables:
            steps = [tf.unstack(found.pop(f"weight/{k}")) for k in range(len(self.variables))]
            found["weights"] = tf.stack([taps.stack_norms(own) for own in zip(*steps, strict=True)])
        return found

    def _go_back(self, number, later, arriving):
        """Back through one iteration. Returns what is reported of it, and the gradients of the states before
        it.

        Args:
            later: gradients of the states after it, from all later iterations; None for 0.
            arriving: gradient of its output.
        """
        way, before = {}, list(later)
        end = len(later)
        for index in reversed(self._steps):
            step = self._steps[index][number]
            start = end - len(step.leaving)
            seeds = [self._unmasked(number, gradient) for gradient in later[start:end]]
            inputs, *rest = _vector_jacobian(step, seeds, arriving)
            if self.inner[index][1] is None:
                for j, own in enumerate(_state_gradients(step, seeds, arriving), start):
                    way[f"state/{j}"] = own
            states, weights = rest[: end - start], rest[end - start :]
            for j, state in enumerate(states, start):
                if state is not None:
                    before[j] = state + self._masked(number, later[j])
                    way[f"recurrent/{j}"] = before[j]
            way |= {f"weight/{k}": g for k, g in zip(self._variables_of(index), weights, strict=True)}
            if inputs is not None:
                way["input" if index == 0 else f"inner/{index - 1}"] = inputs
            arriving, end = inputs, start
        return way, before

    def _unmasked(self, number, gradient):
        """The part of a gradient that goes through the cell."""
        if gradient is None or not self.masked:
            return gradient
        return python_steps.select(self._valid_at(number), gradient, tf.zeros_like(gradient))

    def _masked(self, number, gradient):
        """The part that a masked time step hands on as it is."""
        if gradient is None or not self.masked:
            return 0
        return python_steps.select(self._valid_at(number), tf.zeros_like(gradient), gradient)

    def _valid_at(self, number):
        t = self.length - 1 - number if self.layout.go_backwards else number
        return self.valid[t][:, tf.newaxis]

    def _variables_of(self, index):
        if not self.cells:
            return range(len(self.variables))
        own = {id(variable) for variable in list(self.cells.values())[index][1]}
        return [k for k, variable in enumerate(self.variables) if id(variable) in own]

    def _count_states(self):
        return sum(len(steps[0].leaving) for steps in self._steps.values())

    def _arriving(self, gradients):
        """The gradient at the output of each cell, with a mask before the mask acts on it; as from taps."""
        key = "outputs" if self.layout.return_sequences else "last"
        gradient = gradients.get(key)
        if not self.masked or gradient is None:
            return {"external" if self.masked else key: gradient}
        arriving = tf.unstack(gradient) if self.layout.return_sequences else [gradient]
        carried, found = None, []
        for number in range(self.length - 1, -1, -1):
            now = arriving.pop() if arriving else tf.zeros_like(carried)
            now = now if carried is None else now + carried
            found.append(self._unmasked(number, now))
            # What arrives at a masked time step is for the output that it repeats, unless that is zeroed.
            zeroed = python_steps.zeroes_at_once(self.layout)
            carried = tf.zeros_like(now) if zeroed else self._masked(number, now)
        return {"external": tf.stack(found[::-1])}

    def _unstack_arriving(self, found):
        if found.get("external") is not None:
            return tf.unstack(found["external"])
        if found.get("outputs") is not None:
            return tf.unstack(found["outputs"])
        return [None] * (self.length - 1) + [found.get("last")]


def _vector_jacobian(step, seeds, arriving):
    """Gradients of the inputs, the states and the weights of one time step; None for what is not a real
    number.
    """
    pairs = [(tensor, seed) for tensor, seed in zip(step.leaving, seeds, strict=True) if seed is not None]
    if arriving is not None:
        pairs.append((step.output, arriving))
    sources = [*step.entering, *step.weights]
    found = [None] * len(sources)
    if pairs:
        targets, gradients = zip(*pairs, strict=True)
        found = step.tape.gradient(list(targets), sources, output_gradients=list(gradients))
    return [
        (tf.zeros_like(source) if gradient is None else tf.convert_to_tensor(gradient))
        if source.dtype.is_floating
        else None
        for gradient, source in zip(found, sources, strict=True)
    ]


def _state_gradients(step, seeds, arriving):
    """λ of the states of a cell whose output is computed from them: what is sent back, and (∂y/∂s)ᵀ e."""
    leaving = step.leaving
    direct = [None] * len(leaving)
    if arriving is not None:
        total = step.tape.gradient(step.output, leaving, output_gradients=arriving)
        direct = python_steps.direct_gradients(total, functools.partial(_way, step))
    zeros = [tf.zeros_like(state) for state in leaving]
    return [
        sum((part for part in parts if part is not None), zero)
        for zero, *parts in zip(zeros, seeds, direct, strict=True)
    ]


def _way(step, later, earlier, seed):
    """The part of a gradient of state `later` that belongs to state `earlier` of the same time step, or None."""
    return step.tape.gradient(step.leaving[later], step.leaving[earlier], output_gradients=seed)


def _double(gradient):
    return None if gradient is None else 2 * tf.convert_to_tensor(gradient)
