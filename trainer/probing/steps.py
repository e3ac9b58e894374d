"""What is probed where Python goes through the time steps one by one, without a single tap.

All states are within reach of the tape there, so their gradients λ_t are asked of it directly. What a time step sends
back, r_t, its inputs' and its weights' gradients follow from λ_t by a tape of its own around each time step. So the
sums of the backward pass are those of an unprobed update in the same order: a tap would split some of them in two.
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from trainer.probing import internals, stepping, taps
from trainer.probing.records import LoopRecord


class _Step(NamedTuple):
    tape: Any
    entering: Any  # [inputs, *states]
    weights: Any  # what the weights are read from
    leaving: Any  # {key: tensor}: states, and the output if it is none of them


class StepRecord(LoopRecord):
    """`LoopRecord` for loops in Python. Its sources are `new/<cell>/<iteration>/<j>`, `outputs` or `last`, `final/<j>`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._steps = {}  # cell -> [_Step]

    def tap_inputs(self, inputs):
        self.batch, self.length = tf.shape(inputs)[1], inputs.shape[0]
        return inputs

    def separate(self, flat):
        """Gives states that are one and the same tensor a tensor each."""
        ids = [id(state) for state in flat]
        return [tf.identity(s) if ids.index(id(s)) < position else s for position, s in enumerate(flat)]

    def observe(self, index, call, inputs, states):
        """Runs `call(inputs, states)`, a time step of cell `index`, and remembers how to go back through it."""
        flat = keras.tree.flatten(states)
        outer = internals.outer_scope()
        weights = [internals.source(variable, outer) for variable in self._variables_of(index)]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([tensor for tensor in [inputs, *flat, *weights] if _is_floating_tensor(tensor)])
            output, new = call(inputs, states)
            new = [tf.identity(x) if stepping.index_of(x, flat) is not None else x for x in keras.tree.flatten(new)]
        leaving = {str(j): state for j, state in enumerate(new) if state.dtype.is_floating}
        alias = stepping.index_of(output, new)
        if alias is None and output.dtype.is_floating:
            leaving["output"] = output
        steps = self._steps.setdefault(index, [])
        self.sources.update({f"new/{index}/{len(steps)}/{key}": tensor for key, tensor in leaving.items()})
        steps.append(_Step(tape, [inputs, *flat], weights, leaving))
        if len(steps) == 1:
            self.inner[index] = (output, alias)
        return output, keras.tree.pack_sequence_as(new if not keras.tree.is_nested(states) else states, new)
