"""What is probed in one run of one loop: the ports that its time steps tap, and where their gradients are to
be found.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from trainer.probing import internals, lists, taps


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

    `sources` maps keys to tensors whose gradients make the report: `input`, `state/<j>` (of the state that
    enters a time step), `output` or `outputs` or `last`, `final/<j>`, `weights` or `weight/<k>`, `inner/<i>`
    (what inner cell i of a stack hands upwards), `probe/<name>`. Gradients of `state`, `output`, `weights`,
    `weight`, `inner` and `probe` come with the last iteration first.

    Args:
        root: scalar zero that the tape watches; all ports come from it.
        name: under which to report.
        layout: `loop.Layout`.
        free_name: function that gives a name that nothing else reports under.
        variables: trainable variables whose use is followed.
        weights: "norms", "full" or None.
        inputs: whether to report their gradient.
        cells: {name: (number of states, variables)} of the inner cells of a stack, or None.
    """

    def __init__(
        self, root, name, layout, free_name, *, variables=(), weights="norms", inputs=True, cells=None, stateful=False
    ):
        self._root = root
        self.name = name
        self.layout = layout
        self._free_name = free_name
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
        self.probes[name] = (self._free_name(name), batched)

    def discover_inner(self, index, output, alias):
        """The output of an inner cell of a stack, met in the trial run."""
        self.inner[index] = (output, alias)

    def start(self, length, states, output, new_states, masked):
        """The ports as lists to be carried by the loop, {key: list}, and what they hold, {key: Spec}."""
        flat, new = keras.tree.flatten(states), keras.tree.flatten(new_states)
        self.length, self.masked = length, masked
        alias = next((j for j, state in enumerate(new) if state is output), None)
        self.make_groups([state.dtype.is_floating for state in flat], alias)
        ports = {f"state/{j}": self._port(state) for j, state in enumerate(flat) if state.dtype.is_floating}
        if masked and output.dtype.is_floating:
            ports["output"] = self._port(output)
        if self.weights == "norms" and self.variables:
            ports["weights"] = self._zeros([length, len(self.variables)], None, tf.float32)
        if self.weights == "full":
            for index, variable in enumerate(self.variables):
                ports[f"weight/{index}"] = self._port(internals.read(variable))
        for index, (inner, _) in self.inner.items():
            if index < len(self.inner) - 1:
                ports[f"inner/{index}"] = self._port(inner)
        for name, (tensor, batched) in self._discovered.items():
            ports[f"probe/{name}"] = self._port(tensor) if batched else self._zeros([length, 1], None, tf.float32)
        self.sources.update(ports)
        unstacked = {key: lists.unstack(port) for key, port in ports.items()}
        return {key: items for key, (items, _) in unstacked.items()}, {k: spec for k, (_, spec) in unstacked.items()}

    # In a time step.

    def tap_states(self, flat, ports):
        """The states that enter a time step."""
        keys = [f"state/{j}" for j in range(len(flat))]
        return [taps.tap(state, ports[key]) if key in ports else state for key, state in zip(keys, flat, strict=True)]

    def tap_output(self, output, ports):
        """The output of a time step before a mask acts on it."""
        return taps.tap(output, ports["output"]) if "output" in ports else output

    def tap_inner(self, index, output, ports):
        """What an inner cell hands to the one above."""
        key = f"inner/{index}"
        return taps.tap(output, ports[key]) if key in ports else output

    def tap_probe(self, name, tensor, ports):
        """A `probe` whose t is the index of this loop."""
        port = ports[f"probe/{name}"]
        if self._discovered[name][1]:
            return taps.tap(tensor, port)
        return taps.tap_norms([tensor], port)[0]

    def tap_weights(self, ports, scope):
        """{id(variable): its value for this time step}. `scope`: where values are looked up first, or None."""
        values = [internals.read(variable, scope) for variable in self.variables]
        if self.weights == "norms" and values:
            values = taps.tap_norms(values, ports["weights"])
        elif self.weights == "full":
            values = [taps.tap(value, ports[f"weight/{index}"]) for index, value in enumerate(values)]
        return {id(variable): value for variable, value in zip(self.variables, values, strict=True)}

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
        kinds = ("state", "weights", "weight", "probe")
        return any(value is not None for key, value in gradients.items() if key.split("/")[0] in kinds)

    def translate(self, gradients):
        """What `trainer.probing.measure` reads."""
        return gradients

    def make_groups(self, floating, alias):
        """`floating`: for each state whether it has a gradient; `alias`: which of them is the output, or
        None.
        """
        external = "output" if self.masked else ("outputs" if self.layout.return_sequences else "last")
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

    def _port(self, like):
        shape = tf.concat([[self.length], tf.shape(like)], axis=0)
        static = tf.TensorShape([self.length if isinstance(self.length, int) else None]).concatenate(like.shape)
        return self._zeros(shape, static, like.dtype)

    def _zeros(self, shape, static_shape, dtype):
        zeros = tf.fill(shape, tf.cast(self._root, dtype))
        if static_shape is not None:
            zeros.set_shape(static_shape)
        return zeros
