"""The private engine of a `Trainer`: everything that the traced update and the host loop use, in one object."""

import contextlib
import functools
import inspect
from typing import Any

import keras
import tensorflow as tf

from looptape import losses as losses_package
from looptape.trainer import arguments, overriding
from looptape.trainer.analysis.timestep_gradients import Inspection
from looptape.trainer.checkpoints import trainer_state
from looptape.trainer.checkpoints.contents import outside_state
from looptape.trainer.counters import Counters, Phases
from looptape.trainer.data import batches, windows
from looptape.trainer.data.windows import Window
from looptape.trainer.debug.traced_constants import TracedConstants
from looptape.trainer.distribution import replica_sums, workers
from looptape.trainer.evaluation.evaluation import Evaluation
from looptape.trainer.loggers.interface import Guarded
from looptape.trainer.optim import optimizer_groups
from looptape.trainer.optim.freezing import Freezing
from looptape.trainer.optim.loss_scale import LossScale
from looptape.trainer.recurrent.carrying import Carrying
from looptape.trainer.recurrent.core import RecurrentCore
from looptape.trainer.recurrent.steering import Steering
from looptape.trainer.settings import FrozenSettings, Public
from looptape.trainer.step.division import Division
from looptape.trainer.step.forward.forward_state import ForwardState, Tracing
from looptape.trainer.step.forward.hook_state import HookState
from looptape.trainer.step.forward.loss_weights import LossWeights
from looptape.trainer.step.minimizer import Minimizer
from looptape.trainer.step.nonfinite import Skips
from looptape.trainer.step.plan import Asked, Mode
from looptape.trainer.step.train_function import TrainCalls
from looptape.trainer.summaries.health_summaries import HealthLog
from looptape.trainer.summaries.media import Media
from looptape.trainer.summaries.step_sums import Ledger
from looptape.trainer.summaries.timestep_summaries import TimestepLog
from looptape.trainer.variables import (
    all_layers,
    creating_variables,
    make_global_seed,
    own_variable,
    raw,
    recurrent_states,
)


class Engine:
    """All that a trainer keeps for itself: modules receive it, and a subclass of `Trainer` may use any name it likes.

    Args:
        trainer: the trainer, with its settings.
        base: the class whose methods are the hooks' defaults.
    """

    model, strategy, optimizer, step = Public(), Public(), Public(), Public()
    losses, loss_weights, combiner, metrics = Public(), Public(), Public(), Public()
    clip_norm, ema_decay, stages = Public(), Public(), Public()
    probe_every, jit_compile, steps_per_call, run_eagerly = Public(), Public(), Public(), Public()
    recurrent, recurrent_memory, timestep_actions, bptt_window = Public(), Public(), Public(), Public()
    bptt_updates, bptt_begins, bptt_compare_every = Public(), Public(), Public()
    health_every, health_parts, freeze = Public(), Public(), Public()
    on_spike, spike_threshold, spike_window = Public(), Public(), Public()
    communication, communication_dtype = Public(), Public()
    on_none_gradient, on_nonfinite, max_skipped, max_restores = Public(), Public(), Public(), Public()
    shared_features, shared_variables, head_gradients, probe_layers = Public(), Public(), Public(), Public()

    def __init__(self, trainer, base):
        self.trainer = trainer
        self._base = base
        self.workers = workers.of(self.strategy)
        self.replica_sums: Any = None  # `ReplicaSums`, made by `prepare`
        self.counters = Counters(Skips(self))
        self.mode = Mode()  # of the update being traced
        self.tracing = Tracing()
        self.division = Division(self)
        self.freezing = Freezing(self.model, self.freeze)
        if not self.overrides("train_step"):  # which may train other networks
            self.freezing.check()
        self.freezing.follow(0)
        self.ledger = Ledger(self.make_variable, self.tracing)
        self.media = Media(self)
        self.loss_scale: Any = None  # made by `prepare`
        self.forward_state = ForwardState(self.model, lambda: list(self.metrics.values()))
        window = None if self.bptt_updates else self.bptt_window
        self.steering = Steering(self.timestep_actions, self._timestep_hook(), window)
        self.recurrent_core = RecurrentCore(
            self.model,
            loops=self.recurrent,
            memory=self.recurrent_memory,
            act_of=self.steering.act_for,
            moment_of=self.steering.moments,
            is_named=self.steering.names,
        )
        self.carrying = Carrying(self.replicas)
        self.hook_state = HookState(self)
        self.minimizers: dict = {}
        self.calls = TrainCalls(self)
        self.evaluation = Evaluation(self)
        self.timesteps = TimestepLog(self)
        self.health_log = HealthLog(self)
        self.inspection = Inspection(self)
        self.sources: dict = {}
        self.batch_feed: Any = None  # of `train_on_batch`
        self.latest_history: Any = None  # of the latest `fit`
        self.workdir: str | None = None  # of the latest `fit` that had one
        self.loggers = Guarded(())  # those of the latest `fit`
        self.whole_copies = trainer_state.WholeCopies(self)
        self.device_state = functools.partial(trainer_state.device_state, self)
        self.restored_arrays: dict = {}  # of the checkpoint that was restored
        self.given_learning_rates: dict = {}  # before a checkpoint was restored
        self.given_frozen: list | None = None  # names of the layers that were frozen before the first `fit`
        self.probe_capacity: dict = {}  # of `probe` calls in loops whose length is not known, grown as needed
        self.outside: Any = None  # `OutsideState`, known when the update is traced
        self.building = self._built = False  # `build` is tracing: `minimize` computes losses only; it has traced
        self._parts: tuple | None = None  # batches and micro-batches per update, as traced
        self._trained = None  # ids of the variables that the traced update trains
        self.frozen = FrozenSettings(trainer)
        self.constants = TracedConstants(trainer)

    @property
    def accumulation_steps(self):
        """Batches that make the next update."""
        return self.accumulation_at(self.counters.step)

    def accumulation_at(self, step):
        """Batches of the update after `step` updates."""
        asked = 1 if self.division.auto else self.trainer.accumulation_steps
        return asked.at(step) if isinstance(asked, Phases) else asked

    @property
    def micro_batches(self):
        """Micro-batches that make an update."""
        return self.accumulation_steps * self.division.count

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
        return overriding.overrides(self.trainer, self._base, method)

    def hook(self, method):
        """A hook, converted by AutoGraph where a subclass wrote it (so that `for t in tf.range(n)` is a loop)."""
        bound = getattr(self.trainer, method)
        return overriding.converted(bound) if self.overrides(method) else bound

    def _timestep_hook(self):
        name = "transform_timestep_gradient"
        return (lambda *arguments: self.hook(name)(*arguments)) if self.overrides(name) else None

    def make_variable(self, value, name):
        """A variable of the trainer's own: equal on all replicas, not watched by tapes."""
        return own_variable(self.strategy, value, name)

    @property
    def replicas(self):
        return self.strategy.num_replicas_in_sync

    def read(self, variable):
        """A variable's value as a tensor, from this replica's or worker's own copy, without communication.

        Keras splits a metric's value among the replicas: each holds an equal part of it (see `merge_replicas`), and
        reading it in the ordinary way adds them up, over the network if need be.
        """
        variable = raw(variable)
        if self.replicas == 1 or variable.synchronization != tf.VariableSynchronization.ON_READ:
            return tf.convert_to_tensor(variable)
        # Outside every scope TensorFlow also reports a replica context, that of the default strategy.
        if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
            variable = self.strategy.experimental_local_results(variable)[0]
        value = tf.convert_to_tensor(variable)
        return value * self.replicas if variable.aggregation == tf.VariableAggregation.SUM else value

    def read_state(self):
        return [self.read(variable) for variable in self.forward_state.variables()]

    def kinds_of_state(self, variables):
        """([bool] which of the variables belong to metrics, [bool] which hold a recurrent state for each row)."""
        rows = self.carrying.are_rows(variables, recurrent_states(self.model))
        return self.forward_state.are_metrics(variables), rows

    @contextlib.contextmanager
    def collecting_logs(self):
        self.tracing.logs.append({})
        try:
            yield self.tracing.logs[-1]
        finally:
            self.tracing.logs.pop()

    def in_windows(self, dataset):
        """The dataset, cut into windows if each window is an update of its own."""
        if not self.bptt_updates:
            return dataset
        return windows.cut(dataset, self.bptt_window, self.bptt_begins, bool(self.bptt_compare_every))

    def open_window(self, batch):
        """The batch inside a window. Recurrent layers continue with their states unless its sequences begin."""
        self.carrying.begin(batch.begins if isinstance(batch, Window) else None)
        return batch.batch if isinstance(batch, Window) else batch

    def end_update(self, outputs, batch):
        """Counts an update, if all its checks passed. Returns whether they did."""
        extra = {**self.tracing.logs[0], **(outputs or {})}
        examples = batches.count_examples(batch) if extra and batch is not None else None

        def count():
            self.ledger.commit(extra, examples)
            self.loss_scale.grow()
            with self.division.written():
                self.step.assign_add(1)
            return tf.constant(True)

        if not self.mode.aborting:
            return tf.cond(tf.reduce_all(self.tracing.checks), count, lambda: tf.constant(False))
        with tf.control_dependencies([check for check in self.tracing.checks if check is not None]):
            return count()

    # ---- Preparation.

    def prepare(self, iterator, own_rows=False, counted=True):
        """Builds the model and the optimizer and traces the update. Once; a second call finds all done.

        Args:
            iterator: of the data.
            own_rows: whether its batches have the rows of this worker only.
            counted: whether their number is known, and so equal on all workers.
        """
        self.frozen.check()
        with self.strategy.scope():
            make_global_seed()
        self.build(iterator.element_spec)
        if self.loss_scale is None:
            self.loss_scale = LossScale(self.model, self.make_variable)
        self._refuse_undivided()
        self.frozen.begin_trace()
        self._notice_freezing()
        self._notice_division()
        if self.replica_sums is None:
            self.replica_sums = replica_sums.between(self.workers, self.communication, self.communication_dtype)
        if self.frozen.differs("probe_layers"):
            self.calls.forget_probes()
            self.frozen.renew("probe_layers")
        with self.constants.noting("training"):
            self.calls.prepare(iterator, own_rows, counted)
        self.frozen.end_trace()
        self.recurrent_core.check(self)
        not_kept = [self.ledger.sums, *self.media.variables, *self.replica_sums.variables, *self.hook_state.variables]
        self.outside = outside_state.find(self.trainer, self.calls.captured(), not_kept)

    def _refuse_undivided(self):
        """Refuses what cannot be divided among replicas: metrics of integers."""
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

    @property
    def freezing_changed(self):
        """Whether layers were frozen or unfrozen since the update was traced."""
        changed = [id(variable) for variable in self.trainable_variables] != self._trained
        return changed or bool(outside_state.refrozen(self.outside, self.model))

    def _notice_freezing(self):
        """Layers frozen or unfrozen since the last `fit` need a new trace, and an optimizer that knows them."""
        refrozen = outside_state.refrozen(self.outside, self.model)
        if refrozen:
            raise ValueError(
                f"{refrozen} was frozen or unfrozen after the update had been traced; outside `trainer.model` that "
                "has no effect any more. Freeze it before the first `fit`, or make a new Trainer."
            )
        present = [id(variable) for variable in self.trainable_variables]
        if self._trained is not None and present != self._trained:
            if self.optimizer.built:
                self.trainer.optimizer = optimizer_groups.extended(self.optimizer, self.trainable_variables)
            self.calls.forget()
            for minimizer in self.minimizers.values():
                minimizer.forget(self.optimizer)
        self._trained = present
        self.frozen.renew("optimizer")

    @property
    def outdated(self):
        """Whether the traced update trains other variables, or divides its batches otherwise, than it should now."""
        self.constants.check()
        self.freezing.follow(self.counters.step)
        return self.freezing_changed or self._parts != (self.accumulation_steps, self.micro_batches)

    def _notice_division(self):
        present = self.accumulation_steps, self.micro_batches
        if self._parts not in (None, present):
            self.calls.forget()
            for minimizer in self.minimizers.values():
                minimizer.retrace()
        self._parts = present

    def build(self, spec):
        """Builds unbuilt networks from the `element_spec` of a dataset, by tracing the hooks. Runs nothing.

        An overridden `train_step` is traced with a `minimize` that only computes the losses: no `call` is needed.
        """
        self.frozen.check()
        if self._built or not self._unbuilt():
            return
        spec = spec.batch if isinstance(spec, Window) else spec
        by_step = self.overrides("train_step")
        if by_step:
            trace = lambda batch: self.hook("train_step")(batch)  # noqa: E731
        else:
            trace = lambda batch: self.hook("compute_losses")(batch, False)  # noqa: E731
        self.building = by_step
        try:
            with self.strategy.scope():
                tf.function(trace, autograph=False).get_concrete_function(spec)
        finally:
            self.building = False
        self._built = True
        for model in self._unbuilt():
            # Nobody calls a model that only holds others; it is built when they are, and can be saved.
            model.built = all(layer.built for layer in all_layers(model) if layer is not model)

    def _unbuilt(self):
        roots = outside_state.find(self.trainer, ()).roots
        networks = {id(network): network for network in (self.model, *roots)}.values()
        return [network for network in networks if not getattr(network, "built", True)]

    def take_batch(self, batch):
        """A batch of arrays or tensors as tensors; an unbuilt model is built for it."""
        if isinstance(batch, tf.data.Dataset):
            raise TypeError("The batch is a dataset; it must be one batch of arrays. Use next(iter(dataset)).")
        batch = tf.nest.map_structure(tf.convert_to_tensor, batch)
        self.build(tf.nest.map_structure(tf.type_spec_from_value, batch))
        return batch

    def minimizer_for(self, name, compute_losses, variables, optimizer, loss_weights):
        """The minimizer of this name, made by the first call. Refuses a call with other arguments than that one."""
        variables = None if variables is None else list(variables)
        ids = None if variables is None else [id(variable) for variable in variables]
        own = None if optimizer is self.optimizer else optimizer
        asked = Asked(ids, own, compute_losses, loss_weights)
        minimizer = self.minimizers.get(name)
        if minimizer is None:
            minimizer = self._make_minimizer(name, compute_losses, variables, optimizer, loss_weights)
            minimizer.asked = asked
        elif minimizer.refrozen and variables is not None:
            minimizer.renew(variables)
            minimizer.asked = minimizer.asked._replace(variables=ids)
            with creating_variables(self.strategy):
                optimizer_groups.extend(minimizer.optimizer, variables)
        repeated = any(entry.minimizer is minimizer for entry, _ in self.tracing.rows)
        asked.check(minimizer.asked, name, repeated)
        minimizer.asked = asked
        if compute_losses is not None:
            minimizer.compute_losses = compute_losses
        return minimizer

    def _make_minimizer(self, name, compute_losses, variables, optimizer, loss_weights):
        listed = (lambda: variables) if variables is not None else (lambda: self.trainable_variables)
        optimizer = self.optimizer if optimizer is None else arguments.check_optimizer(optimizer)
        weights = (
            self.loss_weights if loss_weights is None and not name else LossWeights(loss_weights, self.make_variable)
        )
        combiner = self.combiner if not name else losses_package.WeightedSum()
        optimizer_groups.check_built_for(optimizer, listed())
        if not optimizer.built:
            with creating_variables(self.strategy):
                known = self.freezing.including(listed()) if variables is None else listed()
                optimizer_groups.build(optimizer, known, self.model.variables)
        hook = self.hook("compute_losses") if compute_losses is None else compute_losses
        self.minimizers[name] = Minimizer(self, name, hook, optimizer, listed, weights, combiner)
        return self.minimizers[name]

    @functools.cached_property
    def model_takes_training(self):
        """Whether the model's call has the argument `training`."""
        if isinstance(self.model, keras.Model):
            return True
        parameters = inspect.signature(self.model.__call__).parameters.values()
        return any(p.name == "training" or p.kind is p.VAR_KEYWORD for p in parameters)
