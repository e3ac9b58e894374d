"""The state that a forward pass moves: BatchNorm statistics, dropout seeds, recurrent states, metrics.

The forward pass runs in a scope that turns every assignment to a Keras variable into a value. So a micro-step is a
pure function: an update that is skipped has moved nothing, replicas can merge what they computed, and a second
forward pass on the same data leaves no trace. Other variables move at once, see `hook_state`.
"""

import contextlib
import threading

import keras

from looptape.trainer.variables import recurrent_states


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
    """Notes taken while one update is traced. Each replica is traced in a thread of its own."""

    def __init__(self):
        self._clear()
        self.logs = []  # of nested `collecting_logs`, the first one of the update; empty outside the hooks

    @contextlib.contextmanager
    def update(self):
        """A context in which one update is traced. What it noted stays, but for the logs."""
        self._clear()
        self.logs = [{}]
        try:
            yield
        finally:
            self.logs = []

    def _clear(self):
        self.rows, self.waits = [], []  # the ledger's
        self.checks = []  # operations that fail if the update is not finite
        self.reports = {}  # of probed updates, by minimizer
        self.health = {}  # of examined updates, by minimizer
        self.features = None  # where `share` reports to, see `gradients.shared_features`

    def share_to(self, features):
        self.features = features


class StateDiscovered(Exception):
    """The forward pass assigned unknown variables: the trace starts again with them. Internal."""

    def __init__(self, variables):
        self.variables = variables
        super().__init__([getattr(variable, "path", variable) for variable in variables])


class SeveralGroups(Exception):
    """The losses need several gradients, hence a persistent tape: the trace starts again with one. Internal."""


class ForwardState:
    """The list of Keras variables that a forward pass may assign. It grows when a trace finds another.

    Args:
        model: the model.
        metrics: function that lists the metrics.
    """

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
        return [variable for metric in self._metrics() for variable in metric.variables]

    def are_metrics(self, variables):
        """[bool]: which of the variables belong to metrics."""
        own = {id(variable) for variable in self.metric_variables()}
        return [id(variable) in own for variable in variables]

    def add(self, variables):
        self._found += list(variables)
