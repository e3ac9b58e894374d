"""A Keras cell as the step of a loop: every trainable variable is read through taps, and what the cell moves
is carried.

The cell is not edited. It runs in a `keras.StatelessScope`, which Keras asks for the value of each variable:
there a read of a weight becomes a read through a tap. The scope looks everything else up in the scope around
it (or in the variables), and hands what the cell assigned (the seed of its dropout) on to it after the loop.
"""

import contextlib
import functools

import keras
import tensorflow as tf

from trainer.probing import active, internals
from trainer.probing.loop import run
from trainer.probing.stepping import index_of


def run_cell(cell, inputs, states, mask, training, layout, record=None):
    """Runs a Keras cell over time; returns `(last output, outputs, final states)` as `RNN.inner_loop`
    does.
    """
    states = list(states) if keras.tree.is_nested(states) else [states]
    last, outputs, states = run(CellStep(cell, training), inputs, tuple(states), mask, layout, record)
    return last, outputs, states


class StepScope(keras.StatelessScope):
    """Where the cell finds its variables in one time step.

    Args:
        outer: the scope around it, or None.
        weights: {id(variable): value} of the tapped ones.
        moving: [(variable, value)] that earlier time steps assigned.
    """

    def __init__(self, outer, weights, moving):
        super().__init__(collect_losses=outer is not None and outer.collect_losses, initialize_variables=False)
        self._outer = outer
        self._weights = weights
        self.moved = {id(variable): (variable, value) for variable, value in moving}

    def get_current_value(self, variable):
        if id(variable) in self.moved:
            return self.moved[id(variable)][1]
        if id(variable) in self._weights:
            return self._weights[id(variable)]
        return None if self._outer is None else self._outer.get_current_value(variable)

    def add_update(self, update):
        variable, value = update
        self.moved[id(variable)] = (variable, value)

    def add_loss(self, loss):
        if self._outer is not None:
            self._outer.add_loss(loss)


class CellStep:
    """Calls a cell as Keras's own loop does; see `trainer.probing.loop._FunctionStep` for the methods."""

    def __init__(self, cell, training):
        self._cell = cell
        self._kwargs = {"training": training} if internals.takes_training(cell) else {}
        self._moving = []

    def first(self, inputs, states, record):
        t = tf.constant(0)
        with active.discovering(record, t):
            output, states, scope = self._call(inputs, states, None, (), record)
        self._moving = [variable for variable, _ in scope.moved.values()]
        return output, states, [value for _, value in scope.moved.values()]

    def __call__(self, t, inputs, states, ports, moving, record):
        stepped = moving is None
        known = [] if stepped else self._moving
        with active.time_step(None if stepped else record, t, ports):
            pairs = zip(known, moving or (), strict=True)
            output, states, scope = self._call(inputs, states, ports, pairs, record, observed=stepped)
        values = [scope.moved.pop(id(variable))[1] for variable in known]
        for variable, value in scope.moved.values():
            variable.assign(value)
        return output, states, values

    def finish(self, moving):
        for variable, value in zip(self._moving, moving, strict=True):
            variable.assign(value)

    def _call(self, inputs, states, ports, moving, record, observed=False):
        outer = internals.outer_scope()
        weights = record.tap_weights(ports, outer) if record is not None and ports else {}
        inner = inner_cells(self._cell) if record is not None else ()
        call = functools.partial(self._cell, **self._kwargs)
        with contextlib.ExitStack() as stack:
            for index, cell in enumerate(inner):
                wrapper = _observed(index, record) if observed else _tapped(index, ports, record)
                stack.enter_context(internals.intercepted_call(cell, wrapper))
            scope = stack.enter_context(StepScope(outer, weights, moving))
            if observed and record is not None and not inner:
                output, new_states = record.observe(0, call, inputs, states)
            else:
                output, new_states = call(inputs, states)
        return output, new_states if keras.tree.is_nested(new_states) else [new_states], scope


def inner_cells(cell):
    """The cells of a `StackedRNNCells`, else nothing."""
    return tuple(cell.cells) if isinstance(cell, keras.layers.StackedRNNCells) else ()


def _tapped(index, ports, record):
    """Taps what an inner cell hands to the one above, which no loop variable shows."""

    def wrapper(call):
        def tapped(inputs, states, *args, **kwargs):
            output, new_states = call(inputs, states, *args, **kwargs)
            if ports is None:
                record.discover_inner(index, output, index_of(output, keras.tree.flatten(new_states)))
            else:
                output = record.tap_inner(index, output, ports)
            return output, new_states

        return tapped

    return wrapper


def _observed(index, record):
    """Lets a `StepRecord` watch an inner cell."""

    def wrapper(call):
        def observed(inputs, states, *args, **kwargs):
            return record.observe(index, lambda x, s: call(x, s, *args, **kwargs), inputs, states)

        return observed

    return wrapper
