"""One run of a recurrence as a function of tensors, with gradients of its own. Eager or traced."""

import copy
import functools
import math
import warnings
from typing import Any, NamedTuple

import tensorflow as tf

from looptape.trainer.recurrent import internals
from looptape.trainer.recurrent.hoisted import compilation, report, scan
from looptape.trainer.recurrent.hoisted.parts import Parts, flat, project, times_before
from looptape.trainer.recurrent.hoisted.report import Found


class SecondDerivativeError(RuntimeError):
    """A second derivative through a backward loop in which an action changed the adjoints."""

    # AutoGraph raises an error anew in the caller's name, and keeps its type only if it is made like this.
    __init__ = Exception.__init__


class Keys(NamedTuple):
    """The quantities that a run reports; see `both_ways.run`."""

    taps: tuple[str, ...]
    weights: tuple[int, ...]
    name: Any


class _Ran(NamedTuple):
    """Results of a forward pass, in parts of the batch and whole."""

    inputs: Any
    parts: Any
    recurrent: Any
    starts: Any
    masks: Any
    forward: Any
    after: Any
    final: Any


class Action:
    """An action on λ_t, as `scan.backward` takes it.

    Args:
        act: see `both_ways.run`.
        go_backwards: whether the first iteration is the last time step.
        length: number of time steps of the whole sequence.
    """

    def __init__(self, act, go_backwards, length):
        self.act, self.go_backwards, self.length = act, go_backwards, length
        self.begin, self.later = 0, False
        self.compiled = tf.function(self.plain, jit_compile=True)

    def at(self, begin, later):
        """The same for a stretch; see `AdjointPass.at`. All stretches share one compiled function."""
        found = copy.copy(self)
        found.begin, found.later = tf.convert_to_tensor(begin), tf.convert_to_tensor(later)
        return found

    def place(self):
        """The last arguments of `plain` and `compiled`."""
        return self.begin, self.later

    def plain(self, recurrence, *arguments):
        *arguments, begin, later = arguments

        def time(iteration):
            return self.length - 1 - begin - iteration if self.go_backwards else begin + iteration

        return scan.backward(recurrence, *arguments, act=self.act, time=time, later=later)


class AdjointPass:
    """One run of a recurrence as a function of tensors, with gradients of its own."""

    view = None  # function that gives the inputs, if they are not among the arguments and need no gradient
    sequences = True  # whether the results begin with all outputs
    total = staticmethod(tf.add_n)  # the sum of a list of tensors

    def __init__(self, recurrence, has_bias, mask, shown, act, choose, keys):
        self.recurrence = recurrence
        self.has_bias = has_bias
        self.mask = mask  # [time, batch, 1] or None
        self.shown = shown  # where the output is the hidden state, not zero; None for everywhere
        self.act = act  # `Action` or None
        self.choose = choose  # whether the loops are compiled
        self.keys = keys

    def at(self, begin, later, view=None):
        """The same for the stretch that begins at the iteration `begin`; `later`: another one follows."""
        found = copy.copy(self)
        found.view = view
        found.act = None if self.act is None else self.act.at(begin, later)
        return found

    def __call__(self, *arguments):
        """`(outputs, *final states)` of `(inputs, *initial states, *weights, *taps)`; with a view, no inputs."""
        return tf.custom_gradient(self._with_gradient)(*arguments)

    def _split(self, arguments):
        if self.view is not None:
            arguments = (None, *arguments)
        weights = 1 + self.recurrence.states
        taps = weights + (3 if self.has_bias else 2)
        given = arguments[weights:taps]
        return arguments[0], arguments[1:weights], given if self.has_bias else (*given, None), arguments[taps:]

    def _with_gradient(self, *arguments):
        with internals.unrecorded():
            ran = self.forwards(arguments)

        def gradient(*upstream):
            return self._twice_differentiable(arguments, upstream, lambda above: self.backwards(arguments, ran, above))

        outputs = [self._show(ran.after[0])] if self.sequences else []
        return (*outputs, *ran.final), gradient

    def forwards(self, arguments):
        inputs, initial, weights, _ = self._split(arguments)
        inputs = inputs if self.view is None else self.view()
        kernel, bias, recurrent = self.recurrence.operands(weights)
        number = 1 if self.choose is False else compilation.parts(inputs.shape[1], initial[0].shape[-1])
        parts = Parts(number, tf.shape(inputs)[1] if inputs.shape[1] is None else inputs.shape[1])
        masks = parts.cut(self.mask, 1)
        starts = parts.cut_all(initial, 0)
        rows = zip(parts.cut(project(inputs, kernel, bias), 1), starts, masks, strict=True)
        forward = [self._forward(projected, start, recurrent, mask) for projected, start, mask in rows]
        after = parts.join_all([states for states, _ in forward], 1)
        final = parts.join_all([tuple(each[-1] for each in states) for states, _ in forward], 0)
        return _Ran(inputs, parts, recurrent, starts, masks, forward, after, final)

    def backwards(self, arguments, ran, upstream):
        """The gradients of the arguments."""
        _, _, weights, _ = self._split(arguments)
        parts, starts = ran.parts, ran.starts
        external, final = tf.zeros_like(ran.after[0]), upstream
        if self.sequences:
            external, final = self._show(upstream[0]), upstream[1:]
        ends = parts.cut_all(final, 0)
        rows = zip(ran.forward, starts, parts.cut(external, 1), ends, ran.masks, strict=True)
        transposed = self.recurrence.transposed(ran.recurrent)
        results = [
            self._backward(kept, start, states, outside, end, transposed, mask)
            for (states, kept), start, outside, end, mask in rows
        ]
        sent, changed, first, deltas, operands = zip(*results, strict=True)
        whole = lambda pieces: parts.join_all(pieces, 1)  # noqa: E731
        found = Found(
            *(whole(sent), whole(changed), external, final, self.mask),
            lambda: self._factorised(arguments, ran, whole(deltas), whole(operands)),
        )
        own = zip(parts.cut(ran.inputs, 1), starts, ran.forward, deltas, operands, strict=True)
        of_inputs, of_weights = zip(*(self._gradients(weights[0], *each) for each in own), strict=True)
        of_weights = [self.total(each) for each in zip(*of_weights, strict=True)]
        of_states = parts.join_all(first, 0)
        of_inputs = parts.join_all(of_inputs, 1) if self.view is None else ()
        return *of_inputs, *of_states, *of_weights, *report.read(self.keys.taps, found)

    def _show(self, outputs):
        return outputs if self.shown is None else tf.where(self.shown, outputs, tf.zeros_like(outputs))

    def _forward(self, *arguments):
        return _either(self.choose, compilation.forward, scan.forward, self.recurrence, arguments)

    def _backward(self, *arguments):
        if self.act is None:
            return _either(self.choose, compilation.backward, scan.backward, self.recurrence, arguments)
        arguments = (*arguments, *self.act.place())
        return _either(self.choose, self.act.compiled, self.act.plain, self.recurrence, arguments)

    def _gradients(self, kernel, inputs, initial, forward, deltas, operands):
        """Gradients of the inputs, in a tuple, and of the weights, for the examples of one part."""
        deltas = [flat(delta) for delta in deltas]
        times_hidden = functools.partial(times_before, initial[0], forward[0][0])
        of_recurrent, of_bias = self.recurrence.weight_gradients(deltas, [flat(one) for one in operands], times_hidden)
        of_kernel = tf.matmul(flat(inputs), deltas[0], transpose_a=True)
        of_inputs = tf.reshape(tf.matmul(deltas[0], kernel, transpose_b=True), tf.shape(inputs))
        return (of_inputs,), (of_kernel, of_recurrent, of_bias) if self.has_bias else (of_kernel, of_recurrent)

    def _factorised(self, arguments, ran, deltas, operands):
        _, initial, *_ = self._split(arguments)
        found = self.recurrence.factorised(ran.inputs, (initial[0], ran.after[0]), deltas, operands)
        return [found[place] for place in self.keys.weights]

    def _twice_differentiable(self, arguments, upstream, gradients):
        """`gradients(upstream)`; TensorFlow differentiates it once more through a plain loop."""
        number = len(arguments)

        @tf.custom_gradient
        def adjoint(*both):
            with internals.unrecorded():
                results = gradients(both[number:])
            return results, lambda *above: self._second(both[:number], both[number:], above)

        return adjoint(*arguments, *upstream)

    def _second(self, arguments, upstream, above):
        if self.act is not None:
            raise SecondDerivativeError(
                "A second derivative goes through a recurrent layer whose gradient an action changes: a changed "
                "gradient is not the derivative of anything. Leave out the action or the nested tape."
            )
        both = [*arguments, *upstream]
        with tf.GradientTape() as outer:
            outer.watch(both)
            with tf.GradientTape() as inner:
                inner.watch(arguments)
                results = self._plain(*arguments)
            first = inner.gradient(results, arguments, upstream, unconnected_gradients="zero")
        found = outer.gradient(first, both, above, unconnected_gradients="zero")
        start = len(arguments) - len(self.keys.taps)
        for place, key in enumerate(self.keys.taps, start):
            if key.startswith("weight"):
                found[place] = tf.fill(tf.shape(arguments[place]), tf.constant(math.nan, arguments[place].dtype))
        if any(key.startswith("weight") for key in self.keys.taps):
            warnings.warn(
                f"A loss is made of gradients through the layer {self.keys.name!r} (nested tapes). How much each time "
                "step adds to the gradient of its weights is only known for the first derivative, so it is reported as "
                "NaN; all other quantities are complete. Leave the nested tape out to see those of the weights.",
                stacklevel=2,
            )
        return found

    def _plain(self, *arguments):
        """The same results by operations that TensorFlow differentiates as often as needed."""
        inputs, initial, weights, taps = self._split(arguments)
        kernel, bias, recurrent = self.recurrence.operands(weights)
        given = dict(zip(self.keys.taps, taps, strict=True))
        added = [
            [given[f"{kind}/{j}"] for j in range(len(initial)) if f"{kind}/{j}" in given]
            for kind in ("recurrent", "state")
        ]
        projected = project(inputs if self.view is None else self.view(), kernel, bias)
        after, _ = scan.forward(self.recurrence, projected, initial, recurrent, self.mask, *added)
        outputs = [self._show(after[0])] if self.sequences else []
        return (*outputs, *(states[-1] for states in after))


def _either(choose, compiled, plain, recurrence, arguments):
    """The compiled or the plain loop; `choose` is a bool or a bool tensor."""
    if isinstance(choose, bool):
        return (compiled if choose else plain)(recurrence, *arguments)
    return tf.cond(choose, lambda: compiled(recurrence, *arguments), lambda: plain(recurrence, *arguments))
