"""The step of a loop: its Keras variables are read before the loop, and what it moves is carried along.

It runs in a `keras.StatelessScope`, which Keras asks for the value of each variable. What the step assigns (the seed of
a dropout) is a value that the loop carries; after the loop the scope around it gets it, or the variable.
"""

import contextlib
import functools

import keras
import tensorflow as tf

from looptape.trainer.recurrent import active, internals


class StepScope(keras.StatelessScope):
    """Where the step finds its variables in one time step.

    Args:
        outer: the scope around it, or None.
        weights: {id(variable): value} that it is to find.
        moving: [(variable, value)] that earlier time steps assigned.

    Attributes: `moved`, {id(variable): (variable, value)} that were assigned; `read`, {id(variable): variable}.
    """

    def __init__(self, outer, weights, moving):
        collects = outer is not None and outer.collect_losses
        super().__init__(collect_losses=collects, initialize_variables=outer is None)
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


class Step:
    """The step of a loop, called at every time step.

    A subclass has `__call__(t, inputs, states, marks, moving, record)`, which gives (output, states, moving): `moving`
    are tensors that the loop carries along for the step. Where Python goes through the time steps `marks` and `moving`
    are None. Its `_call`, of the same arguments, gives (output, states, the `StepScope` that it ran in).
    """

    def __init__(self):
        self._moving = []
        self._read = []
        self._values = {}  # {id(variable): its value before the loop}
        self._outer = internals.outer_scope()
        self._context = internals.call_context()
        self._runners = active.runners()

    def first(self, inputs, states, record):
        """Called before the loop; only the look of the result counts. Returns output, states, and what moves."""
        t = tf.constant(0)
        with active.discovering(record, t):
            output, states, scope = self._call(t, inputs, states, None, (), record)
        self._moving = [variable for variable, _ in scope.moved.values()]
        self._read = [variable for key, variable in scope.read.items() if key not in scope.moved]
        return output, states, [value for _, value in scope.moved.values()]

    def _scope(self, moving):
        """A scope in which the step finds its variables; `moving`: pairs as from `_known`."""
        return StepScope(self._outer, self._values, moving)

    def _known(self, moving):
        """[(variable, value)] of what the loop carries."""
        return () if moving is None else list(zip(self._moving, moving, strict=True))

    def _left(self, scope, moving):
        """The values that the loop carries on. Anything else that the step assigned goes to the variable."""
        values = [scope.moved.pop(id(variable))[1] for variable, _ in self._known(moving)]
        for variable, value in scope.moved.values():
            variable.assign(value)
        return values

    def finish(self, moving):
        """Called after the loop with the last of `moving`."""
        for variable, value in zip(self._moving, moving, strict=True):
            variable.assign(value)

    def fix_values(self):
        """Called before a loop whose steps run again: they find the values that the variables have here."""
        self._values = {id(variable): internals.read(variable, self._outer) for variable in self._read}

    def value_of(self, variable):
        """The tensor that a Keras variable is read from in the loop, or None if the step does not read it."""
        return self._values.get(id(variable))

    def reads_by_itself(self, watched):
        """Those of the `tf.Variable`s, read in the trial run, that no Keras variable stands for."""
        known = [internals.raw(variable) for variable in (*self._read, *self._moving)]
        return [variable for variable in watched if not any(variable is other for other in known)]

    @contextlib.contextmanager
    def repeatable(self):
        """A context in which a step computes what it did in the forward pass: the same mode, the same actions."""
        with internals.in_call_context(self._context), active.ran_by(self._runners):
            yield

    def is_constant(self, tensor):
        """Whether no gradient of this tensor can be wanted."""
        return False


class FunctionStep(Step):
    """A user's function `(t, inputs, states) -> (output, states)`. A step over a Keras cell is in `loops.cells`."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def __call__(self, t, inputs, states, marks, moving, record):
        if marks is None:
            call = functools.partial(self._function, t)
            return *(call(inputs, states) if record is None else record.observe(0, call, inputs, states)), None
        with active.time_step(record, t, marks):
            output, states, scope = self._call(t, inputs, states, marks, self._known(moving), record)
        return output, states, self._left(scope, moving)

    def _call(self, t, inputs, states, marks, moving, record):
        with self._scope(moving) as scope:
            output, states = self._function(t, inputs, states)
        return output, states, scope
