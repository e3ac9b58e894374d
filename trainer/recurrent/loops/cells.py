"""A Keras cell as the step of a loop: its variables are read before the loop, and what it moves is carried along.

The cell is not edited. It runs in a `keras.StatelessScope`, which Keras asks for the value of each variable. What the
cell assigns (the seed of its dropout) is a value that the loop carries; after the loop the scope around it gets it, or
the variable.
"""

import contextlib
import functools

import keras
import tensorflow as tf

from looptape.trainer.recurrent import active, internals
from looptape.trainer.recurrent.loops.python_steps import index_of, select
from looptape.trainer.recurrent.loops.recurrent_loop import run


def run_cell(cell, inputs, states, mask, training, layout, record=None, options=None, anew=None):
    """Runs a Keras cell over time; returns `(last output, outputs, final states)` as `RNN.inner_loop`
    does. `anew` says where sequences begin, see `carrying.Anew`.
    """
    states = list(states) if keras.tree.is_nested(states) else [states]
    last, outputs, states = run(CellStep(cell, training, anew), inputs, tuple(states), mask, layout, record, options)
    return last, outputs, states


class StepScope(keras.StatelessScope):
    """Where the cell finds its variables in one time step.

    Args:
        outer: the scope around it, or None.
        weights: {id(variable): value} that it is to find.
        moving: [(variable, value)] that earlier time steps assigned.

    Attributes: `moved`, {id(variable): (variable, value)} that were assigned; `read`, {id(variable): variable}.
    """

    def __init__(self, outer, weights, moving):
        super().__init__(collect_losses=outer is not None and outer.collect_losses, initialize_variables=False)
        self._outer = outer
        self._weights = weights
        self.moved = {id(variable): (variable, value) for variable, value in moving}
        self.read = {}

    def get_current_value(self, variable):
        self.read[id(variable)] = variable
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
    """Calls a cell as Keras's own loop does; for the methods see `FunctionStep` in `recurrent_loop`."""

    fixes_values = True

    def __init__(self, cell, training, anew=None):
        self._cell = cell
        self._flags = None if anew is None else tf.transpose(anew.flags)
        self._new = None if anew is None else keras.tree.flatten(anew.states)
        self._kwargs = {"training": training} if internals.takes_training(cell) else {}
        self._moving = []
        self._outer = internals.outer_scope()
        self._values = {}  # {id(variable): its value before the loop}
        self._masks = internals.dropout_masks(cell)
        self._context = internals.call_context()
        self._runners = active.runners()

    def first(self, inputs, states, record):
        t = tf.constant(0)
        with active.discovering(record, t):
            output, states, scope = self._call(inputs, states, None, (), record)
        self._moving = [variable for variable, _ in scope.moved.values()]
        self._read = [variable for key, variable in scope.read.items() if key not in scope.moved]
        return output, states, [value for _, value in scope.moved.values()]

    def fix_values(self):
        """From now on the cell finds the values that its variables have here, also when it is called much later."""
        self._values = {id(variable): internals.read(variable, self._outer) for variable in self._read}

    def value_of(self, variable):
        """The tensor that a variable is read from in the loop, or None if the cell does not read it."""
        return self._values.get(id(variable))

    def __call__(self, t, inputs, states, marks, moving, record):
        states = states if self._flags is None else self._begun(t, states)
        stepped = moving is None
        known = [] if stepped else self._moving
        with active.time_step(None if stepped else record, t, marks):
            pairs = zip(known, moving or (), strict=True)
            output, states, scope = self._call(inputs, states, marks, pairs, record, observed=stepped)
        values = [scope.moved.pop(id(variable))[1] for variable in known]
        for variable, value in scope.moved.values():
            variable.assign(value)
        return output, states, values

    def _begun(self, t, states):
        """The states of rows whose sequence begins at t are the initial ones."""
        begins, flat = tf.gather(self._flags, t), keras.tree.flatten(states)
        begun = [select(begins[:, tf.newaxis], new, old) for new, old in zip(self._new, flat, strict=True)]
        return keras.tree.pack_sequence_as(states, begun)

    def finish(self, moving):
        for variable, value in zip(self._moving, moving, strict=True):
            variable.assign(value)

    @contextlib.contextmanager
    def repeatable(self):
        """Calls in this context are as they were in the forward pass: the same dropout masks, the same mode."""
        masks, context = internals.with_dropout_masks(self._masks), internals.in_call_context(self._context)
        with masks, context, active.ran_by(self._runners):
            yield

    def is_constant(self, tensor):
        """Whether no gradient of this tensor can be wanted."""
        return any(tensor is mask for _, masks in self._masks for mask in tf.nest.flatten(masks))

    def _call(self, inputs, states, marks, moving, record, observed=False):
        inner = inner_cells(self._cell) if record is not None else ()
        call = functools.partial(self._cell, **self._kwargs)
        with contextlib.ExitStack() as stack:
            for index, cell in enumerate(inner):
                wrapper = _observed(index, record) if observed else _tapped(index, marks, record)
                stack.enter_context(internals.intercepted_call(cell, wrapper))
            scope = stack.enter_context(StepScope(self._outer, self._values, moving))
            if observed and record is not None and not inner:
                output, new_states = record.observe(0, call, inputs, states)
            else:
                output, new_states = call(inputs, states)
        return output, new_states if keras.tree.is_nested(new_states) else [new_states], scope


def inner_cells(cell):
    """The cells of a `StackedRNNCells`, else nothing."""
    return tuple(cell.cells) if isinstance(cell, keras.layers.StackedRNNCells) else ()


def _tapped(index, marks, record):
    """Marks what an inner cell hands to the one above, which no loop variable shows."""

    def wrapper(call):
        def tapped(inputs, states, *args, **kwargs):
            output, new_states = call(inputs, states, *args, **kwargs)
            if marks is None:
                record.discover_inner(index, output, index_of(output, keras.tree.flatten(new_states)))
                return output, new_states
            return record.mark_inner(index, output, marks), new_states

        return tapped

    return wrapper


def _observed(index, record):
    """Lets a `StepRecord` watch an inner cell."""

    def wrapper(call):
        def observed(inputs, states, *args, **kwargs):
            return record.observe(index, lambda x, s: call(x, s, *args, **kwargs), inputs, states)

        return observed

    return wrapper
