"""A recurrent loop with a backward loop of its own.

Forwards a `tf.while_loop` keeps nothing but the states. Backwards a second one goes from the last time step to the
first and holds the gradient of the states, λ, as an ordinary tensor:

    λ ← what time step t + 1 sent back + what arrives at the output of t
    λ ← act(t, λ)                                            if there is an action
    run step t again from its saved state; (dx, λ, G) ← its vector-Jacobian product with λ
    dW ← dW + G

The step is differentiated by TensorFlow, so that any step will do. Traced only: in eager mode wrap it in a
`tf.function`.

For a step whose output y is not one of its states, λ_t = r_{t+1} + (∂y_t/∂s_t)ᵀ e_t, where r is what the next time step
sends back and e what arrives at y. The derivative holds the other states constant.
"""

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from looptape.trainer.recurrent import internals
from looptape.trainer.recurrent.loops.python_steps import pack, select
from looptape.trainer.recurrent.loops.state_loop import StateLoop, shaped
from looptape.trainer.recurrent.loops.taped_loop import run_loop


class Entering(NamedTuple):
    """Values of a time step that its backward step needs."""

    states: Any  # flat, before it
    moving: Any
    costly: Any


class Way(NamedTuple):
    """Values that the backward loop carries from one time step to the one before."""

    later: Any  # gradients of the real-valued states
    pending: Any  # of an output that masked time steps repeat, or that only the last time step has; or ()
    sums: Any  # of the weights so far
    arrays: Any  # {key: TensorArray} of what is kept of every time step
    sender: Any = ()  # [batch, 1]: the valid time step that sent `later`, -1 for none; where a mask makes them differ


class AdjointLoop(StateLoop):
    """One run of a loop; `run` gives its result.

    Args:
        step: a `trainer.recurrent.loops.steps.Step`.
        first: from its trial run.
        inputs: [time, batch, ...].
        states: initial states, nested.
        mask: [time, batch, 1], or None.
        layout: `recurrent_loop.Layout`; its `unroll` is ignored.
        act: `act(t, gradients, valid) -> gradients`, traced once: what to make of λ_t, a list with a tensor for each
            real-valued state. t counts in input time. `valid` is [batch, 1], or None without a mask; λ of a masked
            example is not changed whatever `act` returns. If it has an attribute `carried`, a function
            `(t, gradients, sender) -> gradients`, that is called first, with what time step `sender` sent back (with a
            mask [batch, 1]). It does not change what arrives at the final states. None for no action.
        stride: keep the states of every so many time steps only, and compute the others again; an integer or a scalar
            tensor. None for all.
        record: what is to be reported, see `trainer.probing.records.LoopRecord`, or None. Its taps are zeros, whose
            gradients are the report: [time, ...] by iteration, the first one first. Keys: `recurrent/<j>` (what step t
            sends back to state j before it), `external` (what arrives at the output), `before/<j>` and `after/<j>` (λ
            of state j before and after the action), and what the record marks in a step or makes of it.
        tracked: function that tells whether a tensor's gradient is wanted by anybody; None if all may be.
    """

    def __init__(self, step, first, inputs, states, mask, layout, *, act=None, stride=None, record=None, tracked=None):
        super().__init__(step, first, inputs, states, mask, layout, stride, record, act is not None)
        self._act = act
        self._tracked = tracked or (lambda tensor: True)

    def run(self):
        """(last output or None, outputs [time, batch, ...] or None, final states, moving)."""
        with internals.watch_variables() as watcher, internals.unrecorded():
            results, integers, moving, externals = self._forward()
        variables = watcher.watched_variables()
        self._variables = [v for v in variables if any(v.handle is x for x in externals)]
        self._sources = [
            x
            for x in externals
            if x.dtype.is_floating and x is not self._inputs and not self._step.is_constant(x) and self._tracked(x)
        ]
        self._wants_inputs = self._inputs.dtype.is_floating and self._tracked(self._inputs)
        return *self._returned(self._with_gradient(results), integers), moving

    def _returned(self, results, integers):
        """(last output or None, outputs or None, final states)."""
        final = [None] * len(self._initial)
        for j, state in zip(self._real, results[1:], strict=True):
            final[j] = state
        for j, state in integers.items():
            final[j] = state
        if self._record is not None and self._mask is None:
            self._record.note_outputs(results[0])
        ends = (None, results[0]) if self._layout.return_sequences else (results[0], None)
        return *ends, pack(self._structure, final)

    # ---- The gradient.

    def _with_gradient(self, results):
        """`results`, whose gradient is that of the backward loop."""
        real = [self._initial[j] for j in self._real]
        reads = [tf.convert_to_tensor(variable) for variable in self._variables]
        inputs = [self._inputs] if self._wants_inputs else []
        arguments = [*inputs, *real, *self._sources, *reads, *self._taps.values()]

        @tf.custom_gradient
        def recurrent(*arguments):
            def gradient(*upstream, variables=()):
                found = self._first_order(arguments, upstream)
                return (found, [None] * len(variables)) if variables else found

            return [tf.identity(result) for result in results], gradient

        return recurrent(*arguments)

    def _first_order(self, arguments, upstream):
        """Gradients of the arguments. They can be differentiated again: then TensorFlow goes through a plain loop."""
        count = len(arguments)

        @tf.custom_gradient
        def adjoint(*tensors):
            def second(*seeds, variables=()):
                found = self._second_order(tensors[:count], tensors[count:], seeds)
                return (found, [None] * len(variables)) if variables else found

            with internals.unrecorded():
                return self._backward(tensors[count:]), second

        return list(adjoint(*arguments, *upstream))

    def _second_order(self, arguments, upstream, seeds):
        if self._act is not None:
            raise RuntimeError(
                "A second derivative goes through a recurrent loop whose gradient an action changes: a changed "
                "gradient is not the derivative of anything. Leave out the action or the nested tape."
            )
        own = arguments[: len(arguments) - len(self._taps)]
        states = {key: tf.zeros_like(tap) for key, tap in self._taps.items() if key.startswith("recurrent/")}
        watched = [*own, *upstream, *states.values()]
        with tf.GradientTape() as outer:
            outer.watch(watched)
            with tf.GradientTape() as inner:
                inner.watch(own)
                results = self._plain(own, states)
            first = inner.gradient(results, own, output_gradients=list(upstream), unconnected_gradients="zero")
        seeds = list(seeds[: len(own)])
        found = outer.gradient(first, watched, output_gradients=seeds, unconnected_gradients="zero")
        sent = dict(zip(states, found[len(own) + len(upstream) :], strict=True))
        # Of all other taps only the part of the first derivative would be known.
        taps = [sent[key] if key in sent else tf.fill(tf.shape(tap), math.nan) for key, tap in self._taps.items()]
        return [*found[: len(own)], *taps, *found[len(own) : len(own) + len(upstream)]]

    def _plain(self, arguments, taps):
        """The results as a function of the arguments that TensorFlow differentiates by itself.

        `taps`: {`recurrent/<j>`: zeros} that are added to the states which enter the time steps.
        """
        arguments = list(arguments)
        inputs = arguments.pop(0) if self._wants_inputs else self._inputs
        initial = list(self._initial)
        for j in self._real:
            initial[j] = arguments.pop(0)
        with self._repeating():
            last, outputs, states, _ = run_loop(
                self._step, self._first, inputs, pack(self._structure, initial), self._given_mask, self._layout, taps
            )
        flat = keras.tree.flatten(states)
        return [outputs if self._layout.return_sequences else last, *(flat[j] for j in self._real)]

    # ---- Backwards.

    def _backward(self, upstream):
        """[gradients of the inputs, the real-valued initial states, the sources, the variables, the taps]."""
        arriving, final = upstream[0], list(upstream[1:])
        pending = ()
        if self._merged and not self._layout.return_sequences:
            position = self._real.index(self._alias)
            final[position] = final[position] + arriving
        elif self._pends:
            pending = tf.zeros_like(self._output) if self._layout.return_sequences else arriving
        outside = [*self._sources, *(variable.handle for variable in self._variables)]
        sums = [tf.zeros_like(x) for x in (*self._sources, *self._variables)]
        arrays = {key: self._array(tap[0]) for key, tap in self._taps.items()}
        if self._wants_inputs:
            arrays["inputs"] = self._array(self._inputs[0])
        arriving = arriving if self._layout.return_sequences else None
        sender = ()
        if self._mask is not None and getattr(self._act, "carried", None) is not None:
            sender = -tf.ones_like(self._mask[0], tf.int32)
        way = Way(final, pending, sums, arrays, sender)
        with self._repeating():
            if self._stride is None:
                way = self._retreat(0, self._length, way, self._saved, None, arriving, outside)
            else:
                way = self._retreat_in_chunks(way, arriving, outside)
        found = {key: array.stack() for key, array in way.arrays.items()}
        for key, tap in self._taps.items():
            found[key] = tf.ensure_shape(found[key], tap.shape)
        inputs = [tf.ensure_shape(found["inputs"], self._inputs.shape)] if self._wants_inputs else []
        return [*inputs, *way.later, *way.sums, *(found[key] for key in self._taps)]

    def _retreat_in_chunks(self, way, arriving, outside):
        chunks = -(-self._length // self._stride)

        def chunk(c, way):
            start = c * self._stride
            end = tf.minimum(start + self._stride, self._length)
            entering = [array.read(c) for array in self._saved]
            flat, moving = entering[: len(self._initial)], entering[len(self._initial) :]
            saved = [self._array(x, self._stride) for x in (*entering, *self._first.costly.values())]
            previous = tf.zeros_like(self._output) if self._keeps else ()
            *_, saved = self._advance(start, end, (flat, moving, previous), (), saved, start)
            return c - 1, self._retreat(start, end, way, saved, start, arriving, outside)

        # One stretch at a time: they do not wait for each other to be computed again, and all would be in memory.
        loop = tf.while_loop(lambda c, _: c >= 0, chunk, (chunks - 1, way), parallel_iterations=1)
        return loop[1]

    def _retreat(self, start, end, way, saved, offset, arriving, outside):
        """Back from iteration `end` to `start`."""

        def body(t, way):
            entering = [array.read(t if offset is None else t - offset) for array in saved]
            flat, entering = entering[: len(self._initial)], entering[len(self._initial) :]
            moving, costly = entering[: len(self._moving)], entering[len(self._moving) :]
            # Says in the graph what Python knows: Grappler sums in another order where it knows no shapes.
            flat = [shaped(x, like) for x, like in zip(flat, self._initial, strict=True)]
            return t - 1, self._step_back(t, way, Entering(flat, moving, costly), arriving, outside)

        loop = tf.while_loop(lambda t, _: t >= start, body, (tf.convert_to_tensor(end) - 1, way))
        return loop[1]

    def _step_back(self, t, way, saved, arriving, outside):
        """Back through one time step."""
        marks: dict = {}
        begin = internals.operations_since()
        now, output, new, _ = self._at(t, saved.states, saved.moving, marks)
        costly = self._costly_since(begin)
        entering = [saved.states[j] for j in self._real]
        leaving = [new[j] for j in self._real]
        at_output, pending = self._arriving_at(t, way.pending, arriving)
        valid = None if self._mask is None else tf.gather(self._mask, t)
        later, passed = way.later, None
        if valid is not None:
            later, passed = zip(*[_divide(valid, gradient) for gradient in way.later], strict=True)
            at_output, pending = self._mask_output(valid, at_output, pending)
        carried = self._carried(t, list(later), way.sender)
        parts, state, after = self._parts(t, output, leaving, (list(later), carried), at_output, valid)
        inputs = [now] if self._wants_inputs else []
        sources = [*entering, *inputs, *marks.values(), *map(internals.captured, outside)]
        found = [internals.symbolic_gradients(targets, sources, seeds, stop) for targets, seeds, stop in parts]
        found = found[0] if len(found) == 1 else [own + other for own, other in zip(*found, strict=True)]
        sent = [shaped(x, like) for x, like in zip(found, way.later, strict=False)]
        if passed is not None:
            sent = [own + other for own, other in zip(sent, passed, strict=True)]
        weights = found[len(sources) - len(outside) :]
        sums = [shaped(total + own, total) for total, own in zip(way.sums, weights, strict=True)]
        report = dict(zip((["inputs"] if inputs else []) + list(marks), found[len(entering) :], strict=False))
        report["external"] = at_output
        for j, *kept in zip(self._real, later, state, after, sent, strict=True):
            report |= {
                f"{kind}/{j}": x for kind, x in zip(("later", "before", "after", "recurrent"), kept, strict=True)
            }
        if self._record is not None:
            report |= self._record.read_step(report, self._weights(weights), {"": output, **marks}, new)
        arrays = {key: array.write(self._place(key, t), report[key]) for key, array in way.arrays.items()}
        for result, value in zip(costly, saved.costly, strict=True):
            internals.replace_tensor(result, shaped(value, result))
        sender = tf.where(valid, self._time(t), way.sender) if tf.is_tensor(way.sender) else ()
        return Way(sent, pending, sums, arrays, sender)

    def _weights(self, gradients):
        """{id(value): gradient} of the values that the step read its weights from."""
        return {id(source): gradient for source, gradient in zip(self._sources, gradients, strict=False)}

    def _place(self, key, t):
        return self._length - 1 - t if key == "inputs" and self._layout.go_backwards else t

    def _arriving_at(self, t, pending, arriving):
        """(what arrives at the output of iteration t, what is pending for those before), both before the mask."""
        if arriving is not None:
            own = shaped(tf.gather(arriving, t), self._output)
            return (own + pending if self._pends else own), (tf.zeros_like(own) if self._pends else ())
        if not self._pends:
            return None, ()
        return pending, tf.zeros_like(pending)

    def _mask_output(self, valid, at_output, pending):
        """Splits it: the part for the output of this iteration, and that for the output that masked examples repeat."""
        own, other = _divide(valid, at_output)
        return own, (other if self._repeats else pending)

    def _parts(self, t, output, leaving, sent, at_output, valid):
        """([(targets, their gradients, tensors to hold constant)], λ before the action, λ after it).

        `sent`: what the next time step sent back, before and after the action on that.
        """
        later = sent[0]
        if self._alias is not None:
            direct = [None] * len(later)
            direct[self._real.index(self._alias)] = at_output
            state, after = self._acted(t, sent, direct, valid)
            return [(leaving, after, ())], state, after
        whole = [([output, *leaving], [at_output, *later], ())]
        if self._act is None:
            return whole, later, later
        direct = internals.symbolic_gradients([output], leaving, [at_output], leaving)
        state, after = self._acted(t, sent, direct, valid)
        # The states with what the action made of their gradient, and the output by all other ways.
        return [(leaving, after, ()), ([output], [at_output], leaving)], state, after

    def _time(self, iteration):
        """The time step of an iteration."""
        return self._length - 1 - iteration if self._layout.go_backwards else iteration

    def _carried(self, t, later, sender):
        """The gradient that the next time step sent back, after the action on it."""
        carried = getattr(self._act, "carried", None)
        if carried is None:
            return later
        if tf.is_tensor(sender):
            was_sent = sender >= 0
        else:
            was_sent, sender = t < self._length - 1, self._time(t + 1)
        changed = carried(self._time(t), later, sender)
        return [select(was_sent, new, old) for new, old in zip(changed, later, strict=True)]

    def _acted(self, t, sent, direct, valid):
        """(λ_t before the action, λ_t after it)."""
        later, carried = sent
        state = _added(later, direct)
        if self._act is None:
            return state, state
        after = list(self._act(self._time(t), _added(carried, direct), valid))
        if valid is not None:
            after = [select(valid, new, old) for new, old in zip(after, state, strict=True)]
        return state, after


def _added(later, direct):
    return [own if other is None else own + other for own, other in zip(later, direct, strict=True)]


def _divide(valid, gradient):
    """(the part that goes through the step, the part that a masked example hands on as it is)."""
    zeros = tf.zeros_like(gradient)
    return select(valid, gradient, zeros), select(valid, zeros, gradient)
