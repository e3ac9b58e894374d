"""A Keras cell, which is not edited, as the step of a loop."""

import contextlib
import functools

import keras
import tensorflow as tf

from looptape.trainer.recurrent import active, internals
from looptape.trainer.recurrent.loops.python_steps import index_of, select
from looptape.trainer.recurrent.loops.recurrent_loop import run
from looptape.trainer.recurrent.loops.steps import Step


def run_cell(cell, inputs, states, mask, training, layout, record=None, options=None, anew=None):
    """Runs a Keras cell over time; returns `(last output, outputs, final states)` as `RNN.inner_loop`
    does. `anew` says where sequences begin, see `carrying.Anew`.
    """
    states = list(states) if keras.tree.is_nested(states) else [states]
    last, outputs, states = run(CellStep(cell, training, anew), inputs, tuple(states), mask, layout, record, options)
    return last, outputs, states


class CellStep(Step):
    """Calls a cell as Keras's own loop does."""

    def __init__(self, cell, training, anew=None):
        super().__init__()
        self._cell = cell
        self._flags = None if anew is None else tf.transpose(anew.flags)
        self._new = None if anew is None else keras.tree.flatten(anew.states)
        self._kwargs = {"training": training} if internals.takes_training(cell) else {}
        self._masks = internals.dropout_masks(cell)

    def __call__(self, t, inputs, states, marks, moving, record):
        states = states if self._flags is None else self._begun(t, states)
        stepped = moving is None
        with active.time_step(None if stepped else record, t, marks):
            output, states, scope = self._call(t, inputs, states, marks, self._known(moving), record, stepped)
        return output, states, self._left(scope, moving)

    def _begun(self, t, states):
        """The states of rows whose sequence begins at t are the initial ones."""
        begins, flat = tf.gather(self._flags, t), keras.tree.flatten(states)
        begun = [select(begins[:, tf.newaxis], new, old) for new, old in zip(self._new, flat, strict=True)]
        return keras.tree.pack_sequence_as(states, begun)

    @contextlib.contextmanager
    def repeatable(self):
        with internals.with_dropout_masks(self._masks), super().repeatable():
            yield

    def is_constant(self, tensor):
        return any(tensor is mask for _, masks in self._masks for mask in tf.nest.flatten(masks))

    def _call(self, t, inputs, states, marks, moving, record, observed=False):
        inner = inner_cells(self._cell) if record is not None else ()
        call = functools.partial(self._cell, **self._kwargs)
        with contextlib.ExitStack() as stack:
            for index, cell in enumerate(inner):
                wrapper = _observed(index, record) if observed else _tapped(index, marks, record)
                stack.enter_context(internals.intercepted_call(cell, wrapper))
            scope = stack.enter_context(self._scope(moving))
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
