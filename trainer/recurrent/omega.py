"""Ω, the penalty on gradients that vanish or explode through time (Pascanu 2013), as a loss that is trained.

    Ω_t = (‖J_tᵀ λ_t‖ / ‖λ_t‖ − 1)²,   λ_t = ∂E/∂s_t,   J_t = ∂s_t/∂s_{t−1}

E is the error and s_t the state after time step t, so that J_tᵀ λ_t is what step t sends back to the state before it. A
zero tensor δ_t is added to every state: the gradient of E with respect to it is λ_t. With λ and the states at hand, all
J_tᵀ λ_t are one vector-Jacobian product of the cell, with time as a part of the batch.

A cell whose output y_t is not one of its states makes it before δ_t is added. Then λ_t is the gradient with respect to
δ_t plus (∂y_t/∂s_t)ᵀ e_t, where e_t arrives at the output; the derivative holds the other states constant.
"""

import dataclasses
import difflib
import functools
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from looptape.trainer.recurrent import active, internals
from looptape.trainer.recurrent.core import run_call
from looptape.trainer.recurrent.layers import Call, find_layers, layout_of, run_by
from looptape.trainer.recurrent.loops.cells import run_cell
from looptape.trainer.recurrent.loops.python_steps import index_of
from looptape.trainer.recurrent.loops.recurrent_loop import Options

FORMS = ("immediate", "full")


@dataclasses.dataclass(frozen=True)
class Omega:
    """Ω as one of the `losses` of a `Trainer`. Its value is the mean of Ω_t over examples and time steps.

    The first time step, which has no previous state of the network's, and time steps whose λ is 0 do not count. Ω
    depends only on the direction of λ, so neither the loss scale nor the size of the error matters. Evaluations leave
    it out.

    Args:
        layer: the name of a recurrent layer; the only one by default.
        form: "immediate", the paper's: λ_t and the states are constants, and the gradient only reaches the cell's
            weights in J_t; "full": the derivative of Ω itself, through the states and through λ, a second derivative
            of the loop. TensorFlow's own of `LayerNormalization` is not exact: `tf.nn.moments` holds the mean constant.

    >>> penalty = Omega("rnn")
    """

    layer: str | None = None
    form: str = "immediate"

    def __post_init__(self):
        if self.layer is not None and not isinstance(self.layer, str):
            raise TypeError(f"`layer` of Omega is {self.layer!r}; it must be the name of a recurrent layer, or None.")
        if self.form not in FORMS:
            raise ValueError(
                f"`form` of Omega is {self.form!r}; it must be one of {list(FORMS)}. Use 'immediate' for the paper's."
            )

    def __call__(self, targets, outputs):
        raise TypeError(
            "Ω is not a function of targets and outputs. Give `Omega` as one of the `losses` of a Trainer, or call "
            "`looptape.timesteps.omega` in `compute_losses`."
        )


def omega(model, compute, layer=None, form="immediate"):
    """Runs `compute` and returns Ω of a recurrent layer in it.

    For `compute_losses`, traced or eager. A tape around it differentiates both.

    Args:
        model: a Keras model, which `compute` calls.
        compute: function without arguments that returns (anything, the scalar error whose gradient is λ).
        layer, form: see `Omega`.

    Returns:
        (the first result of `compute`, Ω_t [batch, time], their weights [batch, time]).
    """
    wanted = Omega(layer, form)
    layers = find_layers(model)
    name = _find(wanted, layers)
    runner = _Runner(name, layers[name])
    with tf.GradientTape() as tape:
        runner.tape = tape
        with run_by(runner, [layers[name]]):
            result, error = compute()
    if len(runner.runs) != 1:
        raise ValueError(
            f"The layer {name!r} was called {len(runner.runs)} times; Ω needs exactly one call. "
            "Call the layer once for each batch."
        )
    run = runner.runs[0]
    if form == "immediate":
        with internals.unrecorded():
            adjoints = _adjoints(tape, error, run)
        run = Run(*tf.nest.map_structure(tf.stop_gradient, run[:5]), *run[5:])
    else:
        adjoints = _adjoints(tape, error, run)
    return result, *_values(run, adjoints)


class Run(NamedTuple):
    """One call of a layer. All [batch, time, …], in the order in which they were computed."""

    inputs: Any
    taps: Any  # the zeros that were added to the states
    before: Any  # states before each time step, all in one
    mask: Any  # [batch, time]: valid time steps
    initial: Any  # nested states
    step: Any  # `(inputs, states all in one) -> (output, [new state])`, of any batch size
    reads: Any  # the zeros that were added to the outputs; None where the output is a state


def _find(wanted, layers):
    if wanted.layer is None and len(layers) == 1:
        return next(iter(layers))
    if wanted.layer not in layers:
        near = difflib.get_close_matches(wanted.layer or "", list(layers), 1)
        hint = f"Did you mean {near[0]!r}?" if near else "Name one of them."
        raise ValueError(f"Omega is for the layer {wanted.layer!r}; the recurrent layers are {list(layers)}. {hint}")
    return wanted.layer


def _adjoints(tape, error, run):
    """λ [batch, time, states all in one]."""
    if run.reads is None:
        return tape.gradient(error, run.taps, unconnected_gradients="zero")
    later, arriving = tape.gradient(error, [run.taps, run.reads], unconnected_gradients="zero")
    flat = [_flat(x) for x in (run.inputs, run.before, arriving)]
    # Outside of a graph nothing can be differentiated with other results held constant.
    direct = functools.partial(_through_output, run.step)
    if tf.executing_eagerly():
        direct = tf.function(direct, autograph=False).get_concrete_function(*flat)
    return later + tf.cast(tf.reshape(direct(*flat), tf.shape(later)), later.dtype)


def _through_output(step, inputs, before, arriving):
    """(∂y/∂s)ᵀ e of single time steps, all states in one. Traced."""
    output, after = step(inputs, before)
    found = internals.symbolic_gradients([output], after, [tf.cast(arriving, output.dtype)], after)
    return tf.concat(found, axis=-1)


def _flat(x):
    """[batch · time, …], of [batch, time, …]."""
    flat = tf.reshape(x, tf.concat([[-1], tf.shape(x)[2:]], 0))
    return tf.ensure_shape(flat, [None, *x.shape[2:]])


def _values(run, adjoints):
    """(Ω_t [batch, time] in float32, weights): the square of how far ‖J_tᵀ λ_t‖ / ‖λ_t‖ is from 1."""
    adjoints = tf.cast(adjoints, tf.float32)
    largest = tf.stop_gradient(tf.reduce_max(tf.abs(adjoints), axis=-1, keepdims=True))
    counts = (largest[..., 0] > 0) & tf.math.is_finite(largest[..., 0])
    # The ratio does not depend on the length of λ; squares of a small one would be 0.
    adjoints = tf.math.divide_no_nan(adjoints, tf.where(counts[..., tf.newaxis], largest, 1.0))
    adjoints = tf.where(counts[..., tf.newaxis], adjoints, tf.ones_like(adjoints))
    batch, time, size = tf.unstack(tf.shape(run.before))
    before, inputs = _flat(run.before), _flat(run.inputs)
    with tf.GradientTape() as tape:
        tape.watch(before)
        after = tf.concat(run.step(inputs, before)[1], axis=-1)
    sent = tape.gradient(after, before, output_gradients=tf.cast(_flat(adjoints), after.dtype))
    sent = tf.reshape(tf.cast(sent, tf.float32), [batch, time, size])
    ratio = _norm(sent) / _norm(adjoints)
    valid = tf.cast(run.mask, tf.int32)
    counts &= run.mask & (tf.cumsum(valid, axis=1, exclusive=True) > 0)
    return tf.where(counts, tf.square(ratio - 1.0), 0.0), tf.cast(counts, tf.float32)


def _norm(vectors):
    squares = tf.reduce_sum(tf.square(vectors), axis=-1)
    return tf.sqrt(tf.maximum(squares, 1e-30))  # finite slope at 0


class _Runner:
    """Runs the layer with zeros added to its states; see `layers.run_by`."""

    def __init__(self, name, layer):
        self._name, self._layer = name, layer
        self.tape: Any = None
        self.runs: list = []

    def run_layer(self, call):
        if call.layer is not self._layer:
            return None
        self._check(call)
        session, found = active.session(), self._run(call)
        if session is None or not session.probes(call.layer):
            return found
        return _reported(call, session.open_layer(call.layer), found)

    def _run(self, call):
        layer, x = call.layer, tf.convert_to_tensor(call.sequences)
        initial = [tf.convert_to_tensor(state) for state in keras.tree.flatten(call.initial_state)]
        sizes = [state.shape[-1] for state in initial]
        batch, time = tf.shape(x)[0], tf.shape(x)[1]
        taps = tf.zeros([batch, time, sum(sizes)], initial[0].dtype)
        taps = tf.ensure_shape(taps, [x.shape[0], x.shape[1], sum(sizes)])
        self.tape.watch(taps)
        cell = _TappedCell(layer.cell, call.training, x.shape[-1], sizes)
        layout = layout_of(layer)._replace(return_sequences=True, zero_output_for_mask=False)
        inputs = tf.concat([tf.cast(x, taps.dtype), tf.reverse(taps, [1]) if layer.go_backwards else taps], axis=-1)
        options = Options(
            memory=next((r.options(layer).memory for r in active.runners() if hasattr(r, "options")), None)
        )
        _, found, states = run_cell(cell, inputs, call.initial_state, call.mask, False, layout, None, options)
        after = found[..., : sum(sizes)]
        before = tf.concat([tf.concat(initial, axis=-1)[:, tf.newaxis], after[:, :-1]], axis=1)
        mask = tf.ones([batch, time], tf.bool) if call.mask is None else tf.cast(call.mask, tf.bool)
        if layer.go_backwards:
            x, mask = tf.reverse(x, [1]), tf.reverse(mask, [1])
        outputs, reads = cell.output_of(found), None
        if not cell.output_is_state:
            reads = tf.zeros_like(outputs)
            self.tape.watch(reads)
            outputs += reads if call.mask is None else _repeated(reads, mask)
        if call.mask is not None and layer.zero_output_for_mask:
            outputs = tf.where(mask[..., tf.newaxis], outputs, tf.zeros_like(outputs))
        structure = call.initial_state
        step = lambda x, flat: cell.stepped(x, flat, structure)  # noqa: E731
        self.runs.append(Run(x, taps, before, mask, initial, step, reads))
        return outputs[:, -1], outputs, states

    def _check(self, call):
        cells = [call.layer.cell, *getattr(call.layer.cell, "cells", ())]
        reason = None
        if active.action(self._name) is not None:
            reason = "has actions on its gradient; λ would be that after them"
        elif call.anew is not None:
            reason = "has sequences that begin inside a window"
        elif any(getattr(cell, "dropout", 0) or getattr(cell, "recurrent_dropout", 0) for cell in cells):
            reason = "has dropout inside its cell; put a `Dropout` layer before or after it"
        elif call.sequences.shape.rank != 3 or any(s.shape.rank != 2 for s in keras.tree.flatten(call.initial_state)):
            reason = f"has inputs of shape {call.sequences.shape}; they and the states must have one axis of features"
        if reason is not None:
            raise ValueError(f"Omega is for the layer {self._name!r}, which {reason}. Leave one of the two out.")


def _reported(call, record, found):
    """`found`, the results of a layer; a second run, which trains nothing, reports the gradient that arrives there."""
    layer, outer = call.layer, internals.outer_scope()
    constants = [(v, tf.stop_gradient(internals.read(v, outer))) for v in layer.cell.variables]
    inputs, initial = tf.nest.map_structure(tf.stop_gradient, (call.sequences, list(call.initial_state)))
    with keras.StatelessScope(state_mapping=constants):
        shown = run_call(Call(layer, inputs, initial, *call[3:]), record, Options())
    zeros = [x - tf.stop_gradient(x) for x in tf.nest.flatten(shown)]
    return tf.nest.pack_sequence_as(found, [x + zero for x, zero in zip(tf.nest.flatten(found), zeros, strict=True)])


def _repeated(steps, mask):
    """[batch, time, …] with the last valid time step at each masked one, as a loop repeats it; 0 before the first."""
    valid_first = tf.argsort(tf.cast(~mask, tf.int32), axis=1, stable=True)
    count = tf.cumsum(tf.cast(mask, tf.int32), axis=1)
    latest = tf.gather(valid_first, tf.maximum(count - 1, 0), batch_dims=1)
    repeated = tf.gather(steps, latest, batch_dims=1)
    return tf.where(count[..., tf.newaxis] > 0, repeated, tf.zeros_like(repeated))


class _TappedCell:
    """A cell whose inputs end with numbers to be added to its states, and whose output is all states in one."""

    def __init__(self, cell, training, features, sizes):
        self._cell, self._features, self._sizes = cell, features, sizes
        self._options = {"training": training} if internals.takes_training(cell) else {}
        self._alias = None  # the state that is the output; None if it is none of them

    def __call__(self, inputs, states):
        x, *taps = tf.split(inputs, [self._features, *self._sizes], axis=-1)
        output, new = self._cell(x, states, **self._options)
        flat = keras.tree.flatten(new)
        self._alias = index_of(output, flat)
        flat = [state + tap for state, tap in zip(flat, taps, strict=True)]
        parts = flat if self._alias is not None else [*flat, output]
        return tf.concat(parts, axis=-1), keras.tree.pack_sequence_as(new, flat)

    @property
    def output_is_state(self):
        return self._alias is not None

    def output_of(self, found):
        """The cell's own outputs, from those of all time steps."""
        total = sum(self._sizes)
        if self._alias is None:
            return found[..., total:]
        start = sum(self._sizes[: self._alias])
        return found[..., start : start + self._sizes[self._alias]]

    def stepped(self, inputs, before, structure):
        """(output, [new state]) of the states all in one, without taps."""
        states = keras.tree.pack_sequence_as(structure, tf.split(before, self._sizes, axis=-1))
        output, new = self._cell(tf.cast(inputs, before.dtype), states, **self._options)
        return output, keras.tree.flatten(new)
