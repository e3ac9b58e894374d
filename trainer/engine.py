"""What lies under `Trainer`: everything that the traced update and the host loop use, and nobody overrides."""

import contextlib
import functools
import inspect
from typing import Any

import keras
import tensorflow as tf

import losses as losses_package
from trainer import arguments, batches, objective, optimizers, update
from trainer.scaling import LossScale
from trainer.state import all_layers, creating_variables, raw, recurrent_states

# What an update is traced with and cannot change afterwards.
_TRACED = ("optimizer", "losses", "accumulation_steps", "clip_norm", "ema_decay", "jit_compile")


class Engine:
    """The machinery of a trainer. `Trainer` has the constructor, the hooks and what people call."""

    base: type | None = None  # the class whose methods are the hooks' defaults
    # Set by `Trainer`.
    model: Any
    losses: dict
    metrics: dict
    minimizers: dict
    accumulation_steps: int
    tracing: Any
    _traced = None  # {setting: value} that the update was traced with

    @property
    def trainable_variables(self):
        return list(self.model.trainable_variables)

    @property
    def main(self):
        """The trainer's own minimizer."""
        if "" not in self.minimizers:
            self._make_minimizer("", None, None, None, None)
        return self.minimizers[""]

    def overrides(self, method):
        return getattr(type(self), method) is not getattr(self.base, method)

    def hook(self, method):
        """A hook, converted by AutoGraph where a subclass wrote it (so that `for t in tf.range(n)` is a loop)."""
        bound = getattr(self, method)
        if not self.overrides(method) or self.run_eagerly:
            return bound
        return _converted(bound)

    def make_variable(self, value, name):
        """A variable of the trainer's own: equal on all replicas, not watched by tapes."""
        with creating_variables(self.strategy):
            return tf.Variable(value, trainable=False, name=name, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    @property
    def replicas(self):
        return self.strategy.num_replicas_in_sync

    def read(self, variable):
        """A variable's value as a tensor, from what lies on this replica or worker: nobody else is asked.

        Keras splits a metric's value among the replicas: each holds an equal part of it (see `merging`), and reading
        it in the ordinary way adds them up, over the network if need be.
        """
        variable = raw(variable)
        if self.replicas == 1 or variable.synchronization != tf.VariableSynchronization.ON_READ:
            return tf.convert_to_tensor(variable)
        # Outside every scope TensorFlow speaks of a replica, too: that of no strategy.
        if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
            variable = self.strategy.experimental_local_results(variable)[0]
        value = tf.convert_to_tensor(variable)
        return value * self.replicas if variable.aggregation == tf.VariableAggregation.SUM else value

    def read_state(self):
        return [self.read(variable) for variable in self.forward_state.variables()]

    @contextlib.contextmanager
    def collecting_logs(self):
        self.tracing.logs.append({})
        try:
            yield self.tracing.logs[-1]
        finally:
            self.tracing.logs.pop()

    def end_update(self, outputs, batch):
        """Counts an update, if all its checks passed. Returns whether they did."""
        extra = {**self.tracing.logs[0], **(outputs or {})}
        examples = batches.count_examples(batch) if extra else None

        def count():
            self.ledger.commit(extra, examples)
            self.loss_scale.grow()
            self.step.assign_add(1)
            return tf.constant(True)

        if not self.aborting:
            return tf.cond(tf.reduce_all(self.tracing.checks), count, lambda: tf.constant(False))
        with tf.control_dependencies([check for check in self.tracing.checks if check is not None]):
            return count()

    # ---- Preparation.

    def prepare(self, iterator):
        """Builds the model and the optimizer and traces the update. Once; a second call finds all done."""
        self.build(iterator.element_spec)
        if self.loss_scale is None:
            self.loss_scale = LossScale(self.model, self.make_variable)
        self._refuse_undivided()
        self._refuse_changes()
        self._notice_freezing()
        self.calls.prepare(iterator)

    def _refuse_undivided(self):
        """Refuses what cannot be divided among replicas: a state for each row of the batch, metrics of integers."""
        if self.replicas == 1:
            return
        for name, metric in self.metrics.items():
            integers = [variable.path for variable in metric.variables if not raw(variable).dtype.is_floating]
            if integers:
                raise ValueError(
                    f"The metric {name!r} keeps {integers} as {raw(metric.variables[0]).dtype.name}; with "
                    f"{self.replicas} replicas a metric must keep real numbers, which can be divided among them. "
                    "Give its variables the type float32."
                )
        names = [layer.name for layer in all_layers(self.model) if layer is not self.model and recurrent_states(layer)]
        if names:
            raise ValueError(
                f"The layers {names} are stateful: they keep a state for each row of the batch, and here the rows are "
                f"divided among {self.replicas} replicas. Use one device, or `stateful=False` and sequences that begin "
                "anew (or pass the states in the batch)."
            )

    def _refuse_changes(self):
        """A traced update does not see another optimizer or another limit: better an error than silence."""
        present = {name: getattr(self, name) for name in _TRACED}
        if self._traced is None:
            self._traced = present
        changed = [name for name, value in self._traced.items() if present[name] != value]
        if changed:
            raise ValueError(
                f"{', '.join(f'`trainer.{name}`' for name in changed)} was set after the update had been traced, which "
                "would have no effect. Make a new Trainer with it. `loss_weights`, the optimizer's `learning_rate` and "
                "`trainable` of layers may change at any time."
            )

    def _notice_freezing(self):
        """Layers frozen or unfrozen since the last `fit` need a new trace, and an optimizer that knows them."""
        present = [id(variable) for variable in self.trainable_variables]
        if self._trained is not None and present != self._trained:
            self.optimizer = optimizers.extended(self.optimizer, self.trainable_variables)
            self.calls.forget()
            for minimizer in self.minimizers.values():
                minimizer.forget(self.optimizer)
        self._trained = present
        self._traced["optimizer"] = self.optimizer

    def build(self, spec):
        """Builds an unbuilt model from the `element_spec` of a dataset, by tracing its losses. Runs nothing."""
        if getattr(self.model, "built", True):
            return
        with self.strategy.scope():
            tf.function(lambda batch: self.hook("compute_losses")(batch, False), autograph=False).get_concrete_function(
                spec
            )

    def take_batch(self, batch):
        """A batch of arrays or tensors as tensors; an unbuilt model is built for it."""
        batch = tf.nest.map_structure(tf.convert_to_tensor, batch)
        self.build(tf.nest.map_structure(tf.type_spec_from_value, batch))
        return batch

    def _make_minimizer(self, name, compute_losses, variables, optimizer, loss_weights):
        listed = (lambda: list(variables)) if variables is not None else (lambda: self.trainable_variables)
        optimizer = self.optimizer if optimizer is None else arguments.check_optimizer(optimizer)
        weights = (
            self.loss_weights
            if loss_weights is None and not name
            else objective.LossWeights(loss_weights, self.make_variable)
        )
        combiner = self.combiner if not name else losses_package.WeightedSum()
        optimizers.check_built_for(optimizer, listed())
        if not optimizer.built:
            with creating_variables(self.strategy):
                optimizer.build(listed())
        hook = self.hook("compute_losses") if compute_losses is None else compute_losses
        self.minimizers[name] = update.Minimizer(self, name, hook, optimizer, listed, weights, combiner)
        return self.minimizers[name]

    def _check_weight_names(self):
        missing = [name for name in self.losses if name not in list(self.loss_weights)]
        unknown = [n for n in self.loss_weights if n not in self.losses and n != objective.REGULARIZATION]
        if missing or unknown:
            raise ValueError(
                "Every loss needs exactly one weight. "
                f"Losses without a weight: {missing}; weights without a loss: {unknown}."
            )

    @functools.cached_property
    def _model_takes_training(self):
        if isinstance(self.model, keras.Model):
            return True
        parameters = inspect.signature(self.model.__call__).parameters.values()
        return any(p.name == "training" or p.kind is p.VAR_KEYWORD for p in parameters)


def _converted(bound):
    try:
        converted = tf.autograph.to_graph(bound.__func__)
    except Exception:  # source not available (an interactive session): the hook runs as it is written
        return bound
    return functools.partial(converted, bound.__self__)
