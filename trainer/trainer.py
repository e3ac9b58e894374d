"""`Trainer`: the class that people subclass."""

import contextlib
import math

import numpy as np
import tensorflow as tf

import losses as losses_package
from trainer import arguments, batches, debugging, objective, summary, weights
from trainer.calls import TrainCalls
from trainer.engine import Engine
from trainer.evaluation import Evaluation
from trainer.examination import Examination
from trainer.fitting import Fitting
from trainer.inspection import Inspection
from trainer.ledger import Ledger
from trainer.state import ForwardState, Tracing, raw
from trainer.timesteps import TimestepLog


class Trainer(Examination, Engine):
    """Trains a Keras model by a custom loop, one traced update at a time.

    `fit` is this loop, with many updates per call of the traced function:

        while step < steps:
            micro_batches = next(data) × accumulation_steps           # traced
            losses, gradients = compute_losses + tf.GradientTape      # traced, summed over the micro-batches
            check, clip, optimizer.apply, step += 1                   # traced
            write, evaluate, checkpoint whatever is due               # host

    Subclass it and override `compute_losses` for a model or objective of your own; `train_step` for several
    optimizers.

    Args:
        model: a built or unbuilt `keras.Model`, a `tf.Module`, or a pair (function, [variables]).
        optimizer: a Keras optimizer, without clipping, averaging or accumulation of its own; or {regular expression:
            optimizer}, by the variables' paths.
        losses: {name: callable(targets, outputs) or keras.losses.Loss}; left out by subclasses that override
            `compute_losses`. With several outputs a loss takes the output of its own name.
        loss_weights: {name: number or schedule of the step}; 1 for all by default.
        combiner: how the losses become one update; `losses.WeightedSum()` by default.
        metrics: {name: keras.metrics.Metric}, or a list.
        accumulation_steps: micro-batches per update.
        clip_norm: the largest global gradient norm, applied after accumulation and aggregation.
        ema_decay: decay of the averaged weights, or None.
        probe_every: log the gradients of every time step at every so many steps; 0 for never.
        jit_compile: compile the micro-step by XLA.
        steps_per_call: updates per call of the traced function, or "auto".
        strategy: a `tf.distribute.Strategy`, or None.
        run_eagerly: run without tracing, to debug.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> trainer = Trainer(model, keras.optimizers.SGD(0.1), {"error": keras.losses.MeanSquaredError()})
    >>> data = tf.data.Dataset.from_tensors((tf.ones([8, 3]), tf.ones([8, 1]))).repeat()
    >>> history = trainer.fit(data, steps=20)
    >>> trainer.step.numpy().item()
    20
    """

    # What a subclass may set:
    on_none_gradient = "error"  # what to do about variables that no loss reaches: "error", "warn" or "ignore"
    # What to do about updates that are not finite: "skip" them, and stop after `max_skipped` in a row; "raise" at the
    # first one; or "restore": skip, and after `max_skipped` in a row go back to the last good checkpoint and on with
    # the data that come then, at most `max_restores` times.
    on_nonfinite = "skip"
    max_skipped = 10
    max_restores = 3
    # Where a combiner compares the gradients of the losses: the output of the layer of this name (or what
    # `share` was called with), or these variables, layers or names of them; by default all variables.
    shared_features = None
    shared_variables = None
    head_gradients = "weighted"  # what is not shared has the combiner's coefficients, too; or "own": it has none

    def __init__(
        self,
        model,
        optimizer,
        losses=None,
        *,
        loss_weights=None,
        combiner=None,
        metrics=None,
        accumulation_steps=1,
        clip_norm=None,
        ema_decay=None,
        probe_every=0,
        jit_compile=False,
        steps_per_call="auto",
        strategy=None,
        run_eagerly=False,
    ):
        self.model = arguments.check_model(model)
        self.strategy = arguments.check_strategy(strategy)
        with self.strategy.scope():  # an optimizer or a metric given by its name is made here
            self.optimizer = arguments.check_optimizer(optimizer)
            self.metrics = arguments.check_metrics(metrics)
        arguments.check_scope(self.strategy, self.model, self.optimizer, self.metrics)
        self.losses = arguments.check_losses(losses)
        if not self.losses and not self.overrides("compute_losses") and not self.overrides("train_step"):
            raise ValueError(
                "There are no losses: `losses` is empty and `compute_losses` is not overridden. Pass "
                "losses={'name': loss}, or subclass `Trainer` and return named losses from `compute_losses`."
            )
        self.accumulation_steps = arguments.check_integer(
            "accumulation_steps", accumulation_steps, 1, "Use 1 for no accumulation."
        )
        self.clip_norm = arguments.check_positive("clip_norm", clip_norm, "Use None for no clipping.")
        self.ema_decay = arguments.check_decay(ema_decay)
        self.probe_every = arguments.check_integer("probe_every", probe_every, 0, "Use 0 for no probing.")
        self.jit_compile = bool(jit_compile)
        self.steps_per_call = arguments.check_steps_per_call(steps_per_call)
        self.run_eagerly = bool(run_eagerly)
        self.loss_weights = objective.LossWeights(loss_weights, self.make_variable)
        self.combiner = losses_package.WeightedSum() if combiner is None else combiner
        if self.losses and loss_weights and not self.overrides("compute_losses"):
            self._check_weight_names()

        # Used by the traced update, see trainer.update and trainer.calls.
        self.step = self.make_variable(np.int64(0), "step")
        self.host_step = 0
        self.probing = False  # the update being traced reports the gradients of every time step
        self.aborting = True  # a check that fails ends the call; else it makes the update do nothing
        self.tracing = Tracing()
        self.ledger = Ledger(self.make_variable, self.tracing)
        self.loss_scale = None
        self.forward_state = ForwardState(self.model, list(self.metrics.values()))
        self.minimizers = {}
        self.calls = TrainCalls(self)
        self.evaluation = Evaluation(self)
        self.timesteps = TimestepLog(self)
        self.inspection = Inspection(self)
        self.sources = {}
        self._trained = None  # ids of the variables that the traced update trains
        self.probe_capacity = {}  # of `probe` calls in loops whose length is not known, grown as needed
        self.best_loss = math.inf  # of the evaluations
        self.restores = 0  # returns to a checkpoint because of updates that were not finite
        self.epoch = 0  # passes over the data
        self.rounds = 0  # epochs as the callbacks count them

    # ---- What people call.

    def fit(
        self,
        dataset,
        *,
        steps=None,
        epochs=None,
        eval_dataset=None,
        eval_every=None,
        log_every=100,
        checkpoint_every=None,
        workdir=None,
        callbacks=(),
        batch_size=32,
        eval_steps=None,
        progress=True,
        evaluate_averaged=False,
        checkpoint_every_seconds=600.0,
        keep_checkpoints=3,
        keep_best=None,
    ):
        """Trains until the trainer has made `steps` updates, or seen `epochs` passes over the data, in its lifetime.

        Args:
            dataset: a `tf.data.Dataset` of batches, arrays like `(x, y)` (shuffled), a `keras.utils.PyDataset`, or a
                function that returns an iterator of batches. The same object continues where the last `fit` stopped.
            steps: lifetime total of updates. Exactly one of `steps` and `epochs` is given.
            epochs: lifetime total of passes over the data.
            eval_dataset: evaluated every `eval_every` updates, or after each epoch, or at the end.
            eval_every: updates between evaluations; each ends an epoch for the callbacks when training by steps.
            log_every: updates between two rows in TensorBoard; the last step is always logged.
            checkpoint_every: updates between checkpoints; one is written at the end in any case.
            workdir: directory of event files and checkpoints; `fit` goes on from what it finds there. With it, SIGTERM
                and Ctrl-C write a checkpoint before the process ends, with exit code 143 or 130.
            callbacks: Keras callbacks.
            batch_size: of arrays.
            eval_steps: evaluate on at most so many batches.
            progress: show a progress bar, or log lines where the output is not a terminal.
            evaluate_averaged: evaluate with the averaged weights (needs `ema_decay`).
            checkpoint_every_seconds: seconds between checkpoints, beside `checkpoint_every`; None for never.
            keep_checkpoints: how many of the newest checkpoints are kept.
            keep_best: a result of the evaluation such as "loss" ("-accuracy" where larger is better): the checkpoint
                in which it is best is written and kept, too.

        Returns:
            A `keras.callbacks.History`.
        """
        return Fitting(
            self,
            dataset,
            steps=steps,
            epochs=epochs,
            eval_dataset=eval_dataset,
            eval_every=eval_every,
            log_every=log_every,
            checkpoint_every=checkpoint_every,
            workdir=workdir,
            callbacks=callbacks,
            batch_size=batch_size,
            eval_steps=eval_steps,
            progress=progress,
            evaluate_averaged=evaluate_averaged,
            checkpoint_every_seconds=checkpoint_every_seconds,
            keep_checkpoints=keep_checkpoints,
            keep_best=keep_best,
        ).run()

    def evaluate(self, dataset, *, steps=None, averaged=False, batch_size=32):
        """{name: float}: every loss over the whole dataset, their statically weighted sum `loss`, every metric.

        Training metrics and states stay as they are. `steps` limits the number of batches; `averaged` uses the
        averaged weights.
        """
        with self.averaged_weights() if averaged else contextlib.nullcontext():
            return self.evaluation.evaluate(dataset, steps, batch_size)

    def predict(self, dataset, *, steps=None, batch_size=32):
        """The model's outputs for every example of the dataset, as NumPy arrays in the structure of the outputs."""
        return self.evaluation.predict(dataset, steps, batch_size)

    def timestep_gradients(self, batch, per_example=False, *, full=False):
        """The gradient at every time step of every recurrent layer and `probe`, for one batch.

        With the present weights of the losses, in training mode; nothing is trained and no state moves.

        Args:
            batch: as the dataset gives it; arrays are converted.
            per_example: [batch, time] instead of the mean over the examples.
            full: the gradients λ_t themselves as well, as `state_gradient/<state>`; implies `per_example`.

        Returns:
            {layer: {quantity: array [time] or [batch, time]}}. Quantities: `state`, `hidden`, `cell`, `recurrent`,
            `external`, `input`, `gain`, `weight/<variable>`; per-example norms are those of dL/d(tensor) times the
            number of examples.
        """
        return self.inspection.timestep_gradients(batch, per_example, full)

    def check_timestep_sum(self, batch):
        """{variable path: ‖Σ_t G_t − dL/dW‖ / ‖dL/dW‖} of the weights in recurrent layers: about 1e-6 in float32.

        A larger value means that a weight is used outside the loop as well, for example by a regularizer.
        """
        return self.inspection.sum_check(batch)

    def summary(self):
        """Prints the model, the losses with their weights, the stages of the update, and what is logged where."""
        print(summary.summarize(self))

    def fast_dev_run(self, dataset, eval_dataset=None):
        """Runs a few steps of everything, to find mistakes in a minute. Returns an evaluation; nothing is changed."""
        return debugging.fast_dev_run(self, dataset, eval_dataset)

    def overfit(self, dataset, batches=1, steps=200):
        """Trains on a few batches over and over; {loss: (before, after)}. The trainer is left as it was."""
        return debugging.overfit(self, dataset, batches, steps)

    def warm_start(self, source):
        """Takes weights over from a Keras model, a `.keras` file or a work directory, by layer and variable names.

        Returns a report of what matched and what did not; print it.
        """
        return weights.warm_start(self.model, source)

    @contextlib.contextmanager
    def averaged_weights(self):
        """A context in which the model has the averaged weights. Eager."""
        if self.ema_decay is None:
            raise ValueError("There are no averaged weights: `ema_decay` is None. Pass e.g. ema_decay=0.999.")
        pairs = [
            (raw(variable), mean)
            for minimizer in self.minimizers.values()
            for variable, mean in zip(getattr(minimizer, "averaged_variables", ()), minimizer.averages, strict=True)
        ]
        kept = [tf.identity(variable) for variable, _ in pairs]
        for variable, mean in pairs:
            variable.assign(mean)
        try:
            yield
        finally:
            for (variable, _), value in zip(pairs, kept, strict=True):
                variable.assign(value)

    # ---- Hooks, in order of need.

    def compute_losses(self, batch, training):
        """{name: loss} of a batch: a tensor [batch], [batch, time], [batch, …], a scalar, or (tensor, weights).

        Traced. Called once per micro-batch in training and once per batch in evaluation. Values are not reduced
        here: the trainer divides Σ w·l by Σ w over the whole update.
        """
        inputs, targets, sample_weight = batches.unpack(batch)
        outputs = self.call_model(inputs, training)
        self.update_metrics(targets, outputs, sample_weight)
        return objective.apply_losses(self.losses, self.model, targets, outputs, sample_weight)

    def train_step(self, batch):
        """One update. Traced. Returns {name: tensor}, logged beside the losses.

        Override it for several optimizers, and call `minimize` once for each.
        """
        self.minimize(batch)
        return {}

    def eval_step(self, batch):
        """{name: loss} as `compute_losses` returns them, without training. Traced; once per batch of `evaluate`."""
        return self.compute_losses(batch, training=False)

    def transform_gradients(self, gradients, variables):
        """Gradients as the optimizer gets them: after accumulation, the finite check and clipping. Traced."""
        return gradients

    # ---- Called inside hooks.

    def minimize(self, batch, compute_losses=None, *, variables=None, optimizer=None, loss_weights=None, name=""):
        """Runs the whole pipeline on a batch: losses, gradients, accumulation, check, clip, apply, average.

        For `train_step`. Without further arguments it is the trainer's own update.

        Args:
            batch: what `train_step` got. It is split into `accumulation_steps` micro-batches.
            compute_losses: `(batch, training) -> {name: loss}`; the trainer's by default.
            variables: what is trained; the model's trainable variables by default.
            optimizer: the trainer's by default; each set of variables needs one of its own.
            loss_weights: {name: number or schedule}.
            name: tells several calls apart; losses are logged as `loss/<name>/<loss>`.

        Returns:
            {name: the loss's value before the update}.
        """
        minimizer = self.minimizers.get(name)
        if minimizer is None:
            minimizer = self._make_minimizer(name, compute_losses, variables, optimizer, loss_weights)
        if self.accumulation_steps == 1:
            return minimizer.from_parts([batch])
        if tf.executing_eagerly() or self.replicas > 1:
            count = self.accumulation_steps
            return minimizer.from_parts([batches.slice_for_replica(batch, i, count) for i in range(count)])
        return minimizer.from_batch(batch)

    def call_model(self, inputs, training):
        """The model's outputs. `training` is passed on where the model takes it."""
        if self._model_takes_training:
            return self.model(inputs, training=training)
        return self.model(inputs)

    def log(self, name, tensor):
        """An extra scalar for TensorBoard and the callbacks' logs: the mean over the examples since the last log."""
        value = tf.reduce_mean(tf.cast(tensor, tf.float32))
        self.tracing.logs[-1][name] = tf.stop_gradient(value)

    def share(self, tensor):
        """Marks features that several losses are computed from, for combiners that compare gradients; returns them.

        For `compute_losses`: with a trunk and heads, `features = self.share(trunk(x))` makes PCGrad and its like
        nearly as cheap as a sum. Not inside a loop.
        """
        features = self.tracing.features
        return tensor if features is None else features.add(tensor)

    def update_metrics(self, targets, outputs, sample_weight=None):
        """Updates every metric with a batch. With several outputs a metric takes the output of its own name."""
        if not self.metrics:
            return
        outputs = batches.named_outputs(self.model, outputs)
        names = list(outputs) if isinstance(outputs, dict) else None
        for name, metric in self.metrics.items():
            output = batches.select(outputs, name, names, "metric", "output")
            target = batches.select(targets, name, names, "metric", "target")
            weight = batches.select(sample_weight, name, names, "metric", "sample weight")
            mask = objective.keras_mask(output)
            metric.update_state(target, output, sample_weight=objective.WeightCache().get(mask, weight))


Trainer.base = Trainer
