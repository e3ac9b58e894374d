"""Records of one probed run of one loop: the ports that its time steps tap, and where their gradients are to
be found.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from looptape.trainer.probing import taps
from looptape.trainer.recurrent import active, internals


class Group(NamedTuple):
    """States that are reported together: those of a cell, or of one inner cell of a stack."""

    name: str
    states: Any  # positions in the flat list of states
    alias: Any  # position in that list of the state that is also the output, or None
    external: str  # key of the gradient that arrives at the output
    variables: Any  # positions in the list of variables
    inputs: bool  # whether it reads the inputs of the layer


class LoopRecord:
    """The taps of one run of a loop, and their sources.

    `sources` maps keys to tensors whose gradients make the report: `input`; `recurrent/<j>`, what a time step sends
    back to state j before it; `state/<j>`, λ of a state where it is not the sum of what is sent back and what arrives
    at the output; `outputs`, `last` or, with a mask, `external`, what arrives at the output; `after/<j>`, what an
    action made of λ; `final/<j>`; `weights` or `weight/<k>`; `inner/<i>` (what arrives at the output of inner cell i of
    a stack from above); `probe/<name>`. Those of the time steps come by iteration, the first one first.

    Args:
        session: the `ProbeSession`.
        root: scalar zero that the tape watches; all ports come from it.
        name: under which to report.
        layout: `loop.Layout`.
        variables: trainable variables whose use is followed.
        weights: "norms", "full" or None.
        inputs: whether to report their gradient.
        cells: {name: (number of states, variables)} of the inner cells of a stack, or None.
    """

    def __init__(
        self, session, root, name, layout, *, variables=(), weights="norms", inputs=True, cells=None, stateful=False
    ):
        self._session = session
        self._root = root
        self.name = name
        self.layout = layout
        self.variables = list(variables) if weights else []
        self.weights = weights
        self.inputs = inputs
        self.stateful = stateful
        self.cells = cells or {}
        self.inner = {}  # index of an inner cell -> (an output, which of its states that is)
        self._discovered = {}  # name -> (tensor, batched)
        self.probes = {}  # name -> (name to report under, batched) of the `probe` calls in its time steps
        self.sources = {}
        self.groups = []
        self.valid = None
        self.batch = self.length = self.masked = None

    # Before the loop.

    def tap_inputs(self, inputs):
        """Inputs [time, batch, ...] on their way into the loop."""
        self.batch = tf.shape(inputs)[1]
        if not self.inputs or not inputs.dtype.is_floating:
            return inputs
        self.sources["input"] = self._zeros(tf.shape(inputs), inputs.shape, inputs.dtype)
        return taps.tap(inputs, self.sources["input"])

    def discover(self, name, tensor, batched):
        """A `probe` in a time step of this loop, met in the trial run."""
        if name in self._discovered:
            raise ValueError(f"Two probes of one time step have the name {name!r}. Give each a name of its own.")
        self._discovered[name] = (tensor, batched)
        self.probes[name] = (self._session.free_name(name), batched)

    def discover_inner(self, index, output, alias):
        """The output of an inner cell of a stack, met in the trial run."""
        self.inner[index] = (output, alias)

    def start(self, step, length, flat, first, masked, steered=False):
        """The taps: {key: zeros}, whose gradients the backward loop fills in. `steered`: an action changes λ."""
        new = keras.tree.flatten(first.states)
        alias = next((j for j, state in enumerate(new) if state is first.output), None)
        self._values = [step.value_of(variable) for variable in self.variables]
        taps = self.start_known(length, flat, alias, first.output, masked, steered)
        for index, (inner, _) in self.inner.items():
            if index < len(self.inner) - 1:
                taps[f"inner/{index}"] = self._tap(inner)
        for name, (tensor, batched) in self._discovered.items():
            taps[f"probe/{name}"] = self._tap(tensor) if batched else self._zeros([length, 1], [None, 1], tf.float32)
        self.sources.update(taps)
        return taps

    def start_known(self, length, flat, alias, output, masked, steered, apart=False):
        """As `start`, for a cell without inner cells and `probe` calls.

        Args:
            length: number of time steps.
            flat: initial states.
            alias: position of the state that is the output, or None.
            output: that of some time step.
            masked: whether there is a mask.
            steered: whether an action changes λ.
            apart: whether λ is reported by itself, because it is not the sum of what is sent back and what arrives.
        """
        self.length, self.masked = length, masked
        self.make_groups([state.dtype.is_floating for state in flat], alias)
        real = [j for j, state in enumerate(flat) if state.dtype.is_floating]
        taps = {f"recurrent/{j}": self._tap(flat[j]) for j in real}
        own = [j for group in self.groups if apart or group.alias is None for j in group.states]
        taps |= {f"state/{j}": self._tap(flat[j]) for j in own}
        if steered:
            taps |= {f"after/{j}": self._tap(flat[j]) for j in real}
        if masked and output.dtype.is_floating:
            taps["external"] = self._tap(output)
        if self.weights == "norms" and self.variables:
            taps["weights"] = self._zeros([length, len(self.variables)], [None, len(self.variables)], tf.float32)
        if self.weights == "full":
            for index, variable in enumerate(self.variables):
                taps[f"weight/{index}"] = self._tap(internals.read(variable))
        self.sources.update(taps)
        return taps

    # In a time step.

    def repeating(self):
        """A context for time steps that are computed again."""
        return active.reactivated(self._session)

    def mark(self, key, tensor, marks):
        """`tensor`; what its gradient is in this time step will be reported."""
        marks[key] = tensor = tf.identity(tensor)
        return tensor

    def mark_inner(self, index, output, marks):
        """The output that an inner cell hands to the one above."""
        return self.mark(f"inner/{index}", output, marks) if index < len(self.inner) - 1 else output

    def read_step(self, found, weights, outputs, states):
        """{key: what is kept} of a time step, beside what it is given. Traced in the backward loop.

        Args:
            found: {key: gradient} of the states, the output (`external`) and the marks.
            weights: {id(value): gradient} of the values that the weights were read from.
            outputs: {key: tensor}, the output (under the empty key) and the marks.
            states: all states after the time step, flat.
        """
        kept = {}
        for group in self.groups:
            if group.alias is None:
                key = group.external if group.external.startswith("inner/") else ""
                kept |= self._direct(group, outputs[key], found[key or "external"], found, states)
        gradients = [weights.get(id(value)) for value in self._values]
        gradients = [
            tf.zeros(variable.shape, variable.dtype) if gradient is None else gradient
            for gradient, variable in zip(gradients, self.variables, strict=True)
        ]
        if self.weights == "norms" and gradients:
            kept["weights"] = taps.stack_norms(gradients)
        elif self.weights == "full":
            kept |= {f"weight/{index}": gradient for index, gradient in enumerate(gradients)}
        for name, (_, batched) in self._discovered.items():
            if not batched:
                kept[f"probe/{name}"] = taps.stack_norms([found[f"probe/{name}"]])
        return kept

    def _direct(self, group, output, arriving, found, states):
        """{`state/<j>`: λ} of a cell whose output is computed from its states."""
        own = [states[j] for j in group.states]
        direct = internals.symbolic_gradients([output], own, [arriving], own)
        return {f"state/{j}": found[f"later/{j}"] + part for j, part in zip(group.states, direct, strict=True)}

    # After the loop.

    def note_outputs(self, outputs):
        """All outputs [time, batch, ...], or the last one; not with a mask, whose doing is in the loop."""
        self.sources["outputs" if self.layout.return_sequences else "last"] = outputs

    def finish(self, states, mask):
        """The final states on their way out. `mask` is [time, batch, 1] in input time, or None."""
        self.valid = None if mask is None else mask[:, :, 0]
        flat = [tf.identity(state) for state in keras.tree.flatten(states)]
        self.sources.update({f"final/{j}": state for j, state in enumerate(flat) if state.dtype.is_floating})
        return keras.tree.pack_sequence_as(states, flat)

    # After the backward pass.

    def is_reached(self, gradients):
        """Whether any gradient came back. `gradients`: {key: gradient or None} of `sources`."""
        kinds = ("recurrent", "weights", "weight", "probe")
        return any(value is not None for key, value in gradients.items() if key.split("/")[0] in kinds)

    def translate(self, gradients):
        """The gradients in the form that `trainer.probing.quantities` reads."""
        return gradients

    def make_groups(self, floating, alias):
        """`floating`: for each state whether it has a gradient; `alias`: which of them is the output, or
        None.
        """
        external = "external" if self.masked else ("outputs" if self.layout.return_sequences else "last")
        if not self.cells:
            members = [j for j, ok in enumerate(floating) if ok]
            self.groups = [Group(self.name, members, alias, external, range(len(self.variables)), True)]
            return
        start, positions = 0, {id(variable): index for index, variable in enumerate(self.variables)}
        for index, (name, (count, variables)) in enumerate(self.cells.items()):
            local = self.inner[index][1]
            self.groups.append(
                Group(
                    f"{self.name}/{name}",
                    [j for j in range(start, start + count) if floating[j]],
                    None if local is None else start + local,
                    external if index == len(self.cells) - 1 else f"inner/{index}",
                    [positions[id(v)] for v in variables if id(v) in positions],
                    index == 0,
                )
            )
            start += count

    def _tap(self, like):
        shape = tf.concat([[self.length], tf.shape(like)], axis=0)
        static = tf.TensorShape([self.length if isinstance(self.length, int) else None]).concatenate(like.shape)
        return self._zeros(shape, static, like.dtype)

    def _zeros(self, shape, static_shape, dtype):
        zeros = tf.fill(shape, tf.cast(self._root, dtype))
        if static_shape is not None:
            zeros.set_shape(static_shape)
        return zeros
