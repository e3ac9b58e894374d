"""`Trainer`: the class that people subclass."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import losses as losses_package
from trainer import arguments, debugging, objective, summary, weights, workers
from trainer.calls import TrainCalls
from trainer.evaluation import Evaluation
from trainer.examination import Examination
from trainer.fitting import Fitting
from trainer.hooks import Hooks
from trainer.inspection import Inspection
from trainer.ledger import Ledger
from trainer.persistence import WholeCopies
from trainer.state import ForwardState, Tracing, raw
from trainer.timesteps import TimestepLog


class Trainer(Hooks, Examination):
    """Trains a Keras model by a custom loop, one traced update at a time.

    `fit` is this loop, with many updates per call of the traced function::

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
        combiner: how the losses become one update, from `losses` or by name; `losses.WeightedSum()` by default.
        metrics: {name: keras.metrics.Metric or a list of them}, or a list. With several outputs a metric takes the one
            of its own name, or with which its name begins: `label_accuracy` takes `label`.
        accumulation_steps: micro-batches per update.
        clip_norm: the largest global gradient norm, applied after accumulation and aggregation.
        ema_decay: decay of the averaged weights, or None.
        probe_every: log the gradients of every time step at every so many steps; 0 for never.
        jit_compile: compile the micro-step by XLA.
        steps_per_call: updates per call of the traced function, or "auto".
        strategy: a `tf.distribute.Strategy`, or None. Model, optimizer and metrics are made in its scope. A batch is
            divided among its replicas; the workers of a `MultiWorkerMirroredStrategy` make the same batches.
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
    shared_features: Any = None
    shared_variables: Any = None
    head_gradients: str = "weighted"  # what is not shared has the combiner's coefficients, too; or "own": it has none

    @arguments.explained
    def __init__(
        self,
        model: Any,
        optimizer: str | keras.optimizers.Optimizer | Mapping[str, keras.optimizers.Optimizer],
        losses: Mapping[str, str | Callable] | None = None,
        *,
        loss_weights: Mapping[str, float | losses_package.Schedule] | None = None,
        combiner: str | losses_package.Combiner | None = None,
        metrics: Mapping[str, Any] | Sequence[keras.metrics.Metric] | None = None,
        accumulation_steps: int = 1,
        clip_norm: float | None = None,
        ema_decay: float | None = None,
        probe_every: int = 0,
        jit_compile: bool = False,
        steps_per_call: int | str = "auto",
        strategy: tf.distribute.Strategy | None = None,
        run_eagerly: bool = False,
    ) -> None:
        self.model = arguments.check_model(model)
        self.strategy = arguments.check_strategy(strategy)
        with self.strategy.scope():  # an optimizer or a metric given by its name is made here
            self.optimizer = arguments.check_optimizer(optimizer)
            self.losses = arguments.check_losses(losses)
            self.metrics = arguments.check_metrics(metrics, self.losses)
        self.workers = workers.of(self.strategy)
        arguments.check_scope(self.strategy, self.model, self.optimizer, self.metrics)
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
        self.combiner = arguments.check_combiner(combiner)
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
        self.minimizers: dict = {}
        self.calls = TrainCalls(self)
        self.evaluation = Evaluation(self)
        self.timesteps = TimestepLog(self)
        self.inspection = Inspection(self)
        self.sources: dict = {}
        self.whole_copies = WholeCopies(self)
        self._trained = None  # ids of the variables that the traced update trains
        self.probe_capacity: dict = {}  # of `probe` calls in loops whose length is not known, grown as needed
        self.best_loss = math.inf  # of the evaluations
        self.restores = 0  # returns to a checkpoint because of updates that were not finite
        self.epoch = 0  # passes over the data
        self.rounds = 0  # epochs as the callbacks count them

    # ---- What people call.

    @arguments.explained
    def fit(
        self,
        dataset: Any,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        eval_dataset: Any = None,
        eval_every: int | None = None,
        log_every: int = 100,
        checkpoint_every: int | None = None,
        workdir: str | os.PathLike | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback = (),
        batch_size: int = 32,
        eval_steps: int | None = None,
        progress: bool = True,
        evaluate_averaged: bool = False,
        checkpoint_every_seconds: float | None = 600.0,
        keep_checkpoints: int = 3,
        keep_best: str | None = None,
    ) -> keras.callbacks.History:
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

        >>> history = trainer.fit(data.repeat(), steps=5, progress=False)
        >>> history = trainer.fit(data.repeat(), steps=8, progress=False)  # three more
        >>> trainer.step.numpy().item()
        8
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

    def evaluate(
        self, dataset: Any, *, steps: int | None = None, averaged: bool = False, batch_size: int = 32
    ) -> dict[str, float]:
        """{name: float}: every loss over the whole dataset, their statically weighted sum `loss`, every metric.

        Training metrics and states stay as they are. `steps` limits the number of batches; `averaged` uses the
        averaged weights.

        >>> sorted(trainer.evaluate(data))
        ['error', 'loss']
        """
        with self.averaged_weights() if averaged else contextlib.nullcontext():
            return self.evaluation.evaluate(dataset, steps, batch_size)

    def predict(self, dataset: Any, *, steps: int | None = None, batch_size: int = 32) -> Any:
        """The model's outputs for every example of the dataset, as NumPy arrays in the structure of the outputs.

        >>> trainer.predict(data).shape
        (8, 6, 1)
        """
        return self.evaluation.predict(dataset, steps, batch_size)

    def timestep_gradients(
        self, batch: Any, per_example: bool = False, *, full: bool = False
    ) -> dict[str, dict[str, np.ndarray]]:
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

        >>> trainer.timestep_gradients(batch)["lstm"]["state"].shape
        (6,)
        >>> trainer.timestep_gradients(batch, per_example=True)["lstm"]["state"].shape
        (8, 6)
        """
        return self.inspection.timestep_gradients(batch, per_example, full)

    def check_timestep_sum(self, batch: Any) -> dict[str, float]:
        """{variable path: ‖Σ_t G_t − dL/dW‖ / ‖dL/dW‖} of the weights in recurrent layers: about 1e-6 in float32.

        A larger value means that a weight is used outside the loop as well, for example by a regularizer.

        >>> max(trainer.check_timestep_sum(batch).values()) < 1e-5
        True
        """
        return self.inspection.sum_check(batch)

    def summary(self) -> None:
        """Prints the model, the losses with their weights, the stages of the update, and what is logged where.

        >>> trainer.summary()  # doctest: +ELLIPSIS
        Model      sequential...: 76 trainable parameters, ...
        Losses
          error: squared_error, weight 1.0
        ...
        """
        print(summary.summarize(self))

    def fast_dev_run(self, dataset: Any, eval_dataset: Any = None) -> dict[str, float]:
        """Runs a few steps of everything, to find mistakes in a minute. Returns an evaluation; nothing is changed.

        >>> sorted(trainer.fast_dev_run(data.repeat()))
        ['error', 'loss']
        """
        return debugging.fast_dev_run(self, dataset, eval_dataset)

    def overfit(self, dataset: Any, batches: int = 1, steps: int = 200) -> dict[str, tuple[float, float]]:
        """Trains on a few batches over and over; {loss: (before, after)}. The trainer is left as it was.

        >>> before, after = trainer.overfit(data.repeat(), batches=1, steps=50)["error"]
        >>> after < before
        True
        """
        return debugging.overfit(self, dataset, batches, steps)

    def warm_start(self, source: Any) -> weights.WarmStart:
        """Takes weights over from a Keras model, a `.keras` file or a work directory, by layer and variable names.

        Returns a report of what matched and what did not; print it.

        >>> print(trainer.warm_start(keras.models.clone_model(trainer.model)))
        5 weights taken over
        """
        return weights.warm_start(self.model, source)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """A context in which the model has the averaged weights. Eager.

        >>> averaged = Trainer(trainer.model, "sgd", {"error": "mse"}, ema_decay=0.9)
        >>> history = averaged.fit(data.repeat(), steps=3, progress=False)
        >>> with averaged.averaged_weights():
        ...     predictions = averaged.predict(data)
        """
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
