"""The state that a forward pass moves: BatchNorm statistics, dropout seeds, recurrent states, metrics.

The forward pass runs in a scope that turns every assignment to a Keras variable into a value. So a micro-step is a
pure function: an update that is skipped has moved nothing, replicas can merge what they computed, and a second
forward pass on the same data leaves no trace. Variables of `tf.Module`s are not caught: they move at once.
"""

import contextlib
import functools
import threading

import keras
import tensorflow as tf


@contextlib.contextmanager
def creating_variables(strategy=None):
    """A context for making variables while a `tf.function` is traced: eager, and without a second trace.

    A function that sees variables being made traces itself once more, to be sure that it makes none then.
    """

    def without_lifting(next_creator, **arguments):
        return next_creator(**{**arguments, "experimental_enable_variable_lifting": False})

    scope = contextlib.nullcontext() if strategy is None else strategy.scope()
    with tf.init_scope(), scope, tf.variable_creator_scope(without_lifting):
        yield


class ForwardScope(keras.StatelessScope):
    """A `keras.StatelessScope` that remembers which variables were assigned, and collects `add_loss` terms."""

    def __init__(self, variables, values):
        super().__init__(state_mapping=list(zip(variables, values, strict=True)), collect_losses=True)
        self.assigned = {}

    def add_update(self, update):
        variable, _ = update
        self.assigned[id(variable)] = variable
        super().add_update(update)


class Tracing(threading.local):
    """What is noted while one update is traced. Each replica is traced in a thread of its own."""

    def __init__(self):
        self.begin()

    def begin(self):
        self.rows, self.waits = [], []  # the ledger's
        self.checks = []  # operations that fail if the update is not finite
        self.logs = [{}]  # of nested `collecting_logs`
        self.reports = {}  # of probed updates, by minimizer
        self.features = None  # where `share` reports to, see trainer.sharing


class StateDiscovered(Exception):
    """The forward pass assigned variables nobody knew of: the trace starts again with them. Internal."""

    def __init__(self, variables):
        self.variables = variables
        super().__init__([getattr(variable, "path", variable) for variable in variables])


class SeveralGroups(Exception):
    """The losses need several gradients, hence a persistent tape: the trace starts again with one. Internal."""


class ForwardState:
    """The list of Keras variables that a forward pass may assign. It grows when a trace finds another."""

    def __init__(self, model, metrics):
        self._model = model
        self._metrics = metrics
        self._found = []

    def variables(self):
        known = [v for v in getattr(self._model, "non_trainable_variables", ()) if isinstance(v, keras.Variable)]
        known += self.metric_variables() + recurrent_states(self._model) + self._found
        unique = {id(variable): variable for variable in known}
        return list(unique.values())

    def metric_variables(self):
        return [variable for metric in self._metrics for variable in metric.variables]

    def are_metrics(self, variables):
        """[bool]: which of the variables belong to metrics."""
        own = {id(variable) for variable in self.metric_variables()}
        return [id(variable) in own for variable in variables]

    def add(self, variables):
        self._found += list(variables)


def traced(function, **options):
    """A `tf.function` without AutoGraph. TensorFlow's warning about frequent traces counts it by itself."""
    return tf.function(functools.partial(function), autograph=False, **options)


def all_layers(model):
    """Every layer inside a model, the model included, each once."""
    seen, queue = {}, [model]
    while queue:
        layer = queue.pop()
        if id(layer) in seen or not isinstance(layer, keras.layers.Layer):
            continue
        seen[id(layer)] = layer
        # `_layers` is where Keras tracks sub-layers of any layer; only containers have the public `layers`.
        queue += list(getattr(layer, "_layers", ())) + list(getattr(layer, "layers", ()) or ())
    return list(seen.values())


def recurrent_states(model):
    """States of stateful recurrent layers: in none of Keras's lists of variables."""
    return [
        state
        for layer in all_layers(model)
        if getattr(layer, "stateful", False)
        for state in tf.nest.flatten(getattr(layer, "states", None))
        if isinstance(state, keras.Variable)
    ]


def is_seed(variable):
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    return variable.name == "seed_generator_state" and tuple(variable.shape) == (2,)


def raw(variable):
    """The `tf.Variable` behind a Keras variable, or the variable itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def path_of(variable):
    """The path of a Keras variable, or the name of a `tf.Variable`: what errors and reports call it."""
    return getattr(variable, "path", None) or variable.name.split(":")[0]
