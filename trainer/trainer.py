"""`Trainer`: the class that people subclass."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from looptape import _quiet
from looptape import losses as losses_package
from looptape._types import History
from looptape.trainer import arguments
from looptape.trainer.checkpoints import export
from looptape.trainer.data.adapters import as_dataset
from looptape.trainer.data.windows import check_losses, check_windows
from looptape.trainer.debug import dry_run, summary
from looptape.trainer.engine import Engine
from looptape.trainer.examination import Examination
from looptape.trainer.health.options import check_parts
from looptape.trainer.hooks import Hooks
from looptape.trainer.loggers.interface import Logger
from looptape.trainer.loop.fit_loop import Fitting
from looptape.trainer.loop.signals import interruptible
from looptape.trainer.optim.freezing import check_freeze
from looptape.trainer.overriding import overrides
from looptape.trainer.recurrent.actions import Action
from looptape.trainer.recurrent.core import check_loops
from looptape.trainer.recurrent.loops.memory import check_memory
from looptape.trainer.recurrent.row_begins import RowBegins
from looptape.trainer.recurrent.steering import check_actions
from looptape.trainer.step.forward.loss_weights import LossWeights
from looptape.trainer.step.gradients.own_stages import Stage, check_stages
from looptape.trainer.variables import own_variable, temporary_values


@arguments.explained_methods
class Trainer(Hooks, Examination):
    """Trains a Keras model with a custom loop, one traced update at a time.

    `fit` is this loop, with many updates per call of the traced function::

        while step < steps:
            micro_batches = next(data) × accumulation_steps           # traced
            losses, gradients = compute_losses + tf.GradientTape      # traced, summed over the micro-batches
            check, clip, optimizer.apply, step += 1                   # traced
            log, evaluate, save a checkpoint when due                 # host

    Subclass it to override `compute_losses` for an objective of your own, or `train_step` for several optimizers.

    Args:
        model: a built or unbuilt `keras.Model`, a `tf.Module`, or a pair (function, [variables]).
        optimizer: a Keras optimizer, without clipping, averaging or accumulation of its own; or {regular expression:
            optimizer}, by the variables' paths.
        losses: {name: callable(targets, outputs) or keras.losses.Loss}. Omit it in subclasses that override
            `compute_losses`. With several outputs a loss uses the output of the same name.
        loss_weights: {name: number or schedule of the step}; 1 for all by default.
        combiner: combines the losses into one update; an object from `losses` or its name, by default
            `losses.WeightedSum()`.
        metrics: {name: keras.metrics.Metric or a list of them}, or a list. With several outputs a metric uses the
            output whose name equals or begins its own: `label_accuracy` uses `label`.
        accumulation_steps: micro-batches per update; {0: 1, 1000: 4} changes the number at step 1,000. "auto"
            divides a batch that does not fit into memory into more and more micro-batches, and repeats the update.
        freeze: names or regular expressions of layers not to train; {0: "encoder", 1000: ()} trains the encoder from
            step 1,000 on.
        clip_norm: maximum global gradient norm, applied after accumulation and aggregation.
        ema_decay: decay of the averaged weights, or None.
        probe_every: steps between logs of every time step's gradient, beside steps 1, 2, 5, 10 and 20; 0 for never.
        jit_compile: compile the micro-step with XLA.
        steps_per_call: updates per call of the traced function, or "auto".
        recurrent: the loop of recurrent Keras layers in training: "auto", Looptape's loop unless Keras's is faster;
            "adjoint", Looptape's general loop wherever possible, bit-equal to Keras; "keras", Keras's loop.
        recurrent_memory: how many states of recurrent layers to keep for the backward pass; the others are recomputed:
            "sqrt" for the fewest; a number of bytes per layer, or "500MB", above which a layer keeps the fewest;
            "every 16" for every 16th; None for all.
        timestep_actions: actions on the gradient of recurrent layers as it travels back through time, from
            `looptape.timesteps`: a list for all layers, or {layer: list}.
        bptt_window: number of time steps per window, for truncated back-propagation; no gradient passes from one window
            to the one before. None for the whole sequence.
        bptt_updates: make one update per window of `bptt_window` time steps. Recurrent layers carry their states from
            window to window.
        bptt_begins: where rows start from zero states: "batch", with each batch; "never", rows continue in the next
            batch; or `looptape.timesteps.Flags`, `Lengths` or `Mask`, which read it from the batch.
        bptt_compare_every: steps between comparisons of truncated and whole gradient, logged as `optimizer/bptt/…`.
        strategy: a `tf.distribute.Strategy`, or None. Create model, optimizer and metrics in its scope. Each batch is
            split among its replicas; all workers of a `MultiWorkerMirroredStrategy` must produce the same batches. With
            `looptape.IndexedData` each worker produces only its own rows.
        run_eagerly: run without tracing, for debugging.
        stages: your own stages, `looptape.Stage(name, init, apply)`, between clipping and the optimizer.
        health_every: number of steps between logs of the gradient norm, weight norm, update-to-weight ratio and zeros
            of every variable, also after steps 1, 2, 5, 10 and 20; 0 for never.
        health: additional contents of health rows: "activations" (dead units of each layer), "histograms" (of gradients
            and weights), "positions" (the gradient at every position of each layer).

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
    # first one; or "restore": skip, and after `max_skipped` in a row return to the last good checkpoint and continue
    # with the data that follow, at most `max_restores` times.
    on_nonfinite = "skip"
    max_skipped = 10
    max_restores = 3
    # What to do about updates whose loss or gradient norm is finite, but far above its median over the last
    # `spike_window` updates: "ignore"; "record" the cause and apply the update; "skip" it; "raise"; or "restore",
    # return to the last good checkpoint and continue with the data that follow, at most `max_restores` times.
    on_spike = "ignore"
    spike_threshold: float = 10.0
    spike_window = 100
    # Which recurrent layers are probed: names or regular expressions of them; all by default, none for ().
    probe_layers: Any = None
    # Where a combiner compares the gradients of the losses: at the output of the layer of this name (or the argument
    # of `share`), or at these variables, layers or names of them; by default at all variables.
    shared_features: Any = None
    shared_variables: Any = None
    # How workers sum gradients ("auto", "connections" of their own, "tensorflow"), and in which type ("bfloat16", …).
    communication, communication_dtype = "auto", None
    head_gradients: str = "weighted"  # the coefficients weight unshared variables, too; "own": only the shared ones

    def __init__(
        self,
        model: Any,
        optimizer: str | keras.optimizers.Optimizer | Mapping[str, keras.optimizers.Optimizer],
        losses: Mapping[str, str | Callable] | None = None,
        *,
        loss_weights: Mapping[str, float | losses_package.Schedule] | None = None,
        combiner: str | losses_package.Combiner | None = None,
        metrics: Mapping[str, Any] | Sequence[keras.metrics.Metric] | None = None,
        accumulation_steps: int | str | dict[int, int] = 1,
        clip_norm: float | None = None,
        ema_decay: float | None = None,
        probe_every: int = 0,
        jit_compile: bool = False,
        steps_per_call: int | str = "auto",
        strategy: tf.distribute.Strategy | None = None,
        run_eagerly: bool = False,
        stages: Sequence[Stage] = (),
        recurrent: str = "auto",
        recurrent_memory: str | int | None = None,
        timestep_actions: Sequence[Action] | Mapping[str, Sequence[Action]] = (),
        bptt_window: int | None = None,
        bptt_updates: bool = False,
        bptt_begins: str | RowBegins = "batch",
        bptt_compare_every: int = 0,
        health_every: int = 0,
        health: str | Sequence[str] = (),
        freeze: str | Sequence[str] | Mapping[int, str | Sequence[str]] | None = None,
    ) -> None:
        self.model = arguments.check_model(model)
        self.strategy = arguments.check_strategy(strategy)
        _quiet.settle()
        with self.strategy.scope():  # an optimizer or a metric given by its name is made here
            self.optimizer = arguments.check_optimizer(optimizer)
            self.losses = arguments.check_losses(losses)
            self.metrics = arguments.check_metrics(metrics, self.losses)
        arguments.check_scope(self.strategy, self.model, self.optimizer, self.metrics)
        arguments.require_losses(
            self.losses, any(overrides(self, Hooks, hook) for hook in ("compute_losses", "train_step"))
        )
        self.accumulation_steps = arguments.check_accumulation(accumulation_steps, self.strategy)
        self.freeze = check_freeze(freeze, self.model)
        self.clip_norm = arguments.check_positive("clip_norm", clip_norm, "Use None for no clipping.")
        self.ema_decay = arguments.check_decay(ema_decay)
        self.probe_every = arguments.check_integer("probe_every", probe_every, 0, "Use 0 for no probing.")
        self.health_every = arguments.check_integer("health_every", health_every, 0, "Use 0 for never.")
        self.health_parts = check_parts(health)
        self.jit_compile = arguments.check_flag("jit_compile", jit_compile)
        self.steps_per_call = arguments.check_steps_per_call(steps_per_call)
        self.run_eagerly = arguments.check_flag("run_eagerly", run_eagerly)
        self.stages = check_stages(stages)
        self.recurrent = check_loops(recurrent)
        self.recurrent_memory = check_memory(recurrent_memory, "recurrent_memory")
        self.timestep_actions = check_actions(timestep_actions)
        windows = check_windows(bptt_window, bptt_updates, bptt_begins, bptt_compare_every, self.accumulation_steps)
        check_losses(self.losses, bptt_updates)
        self.bptt_window, self.bptt_updates, self.bptt_begins, self.bptt_compare_every = windows
        self.loss_weights = LossWeights(loss_weights, functools.partial(own_variable, self.strategy))
        self.combiner = arguments.check_combiner(combiner)
        if self.losses and loss_weights and not overrides(self, Hooks, "compute_losses"):
            self.loss_weights.check_names(self.losses)

        self.step = own_variable(self.strategy, np.int64(0), "step")
        self._engine = Engine(self, Hooks)

    # ---- Public methods.

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
        loggers: Sequence[Logger] | Logger = (),
    ) -> History:
        """Trains until the trainer has made `steps` updates or `epochs` passes over the data in its lifetime.

        Args:
            dataset: a `tf.data.Dataset` of batches, arrays like `(x, y)` (shuffled), a `looptape.IndexedData`, a
                `keras.utils.PyDataset`, a loader (PyTorch, Grain), or a function that returns an iterator of batches.
                The same object continues where the last `fit` stopped.
            steps: lifetime total of updates. Pass exactly one of `steps` and `epochs`.
            epochs: lifetime total of passes over the data.
            eval_dataset: evaluated every `eval_every` updates, after each epoch, or at the end. Several sets,
                {"clean": …, "noisy": …}, give `val_clean_loss`, `val_noisy_loss` and so on; the first gives `val_loss`.
            eval_every: updates between evaluations. When training by steps, each one ends an epoch for callbacks.
            log_every: updates between two rows in TensorBoard; the last step is always logged.
            checkpoint_every: updates between checkpoints; the end of the run always writes one.
            workdir: directory of event files and checkpoints; `fit` resumes from what it finds there. With it, SIGTERM
                and Ctrl-C write a checkpoint before the process ends, with exit code 143 or 130.
            callbacks: Keras callbacks.
            batch_size: number of examples per batch, if the data are arrays.
            eval_steps: maximum number of batches per evaluation.
            progress: show a progress bar, or log lines if the output is not a terminal.
            evaluate_averaged: evaluate with the averaged weights (needs `ema_decay`).
            checkpoint_every_seconds: seconds between checkpoints, beside `checkpoint_every`; None for never.
            keep_checkpoints: number of newest checkpoints to keep.
            keep_best: a result of the evaluation, such as "loss" ("-accuracy" if larger is better). Also writes and
                keeps the checkpoint with the best value.
            loggers: `looptape.loggers`, which receive everything that TensorBoard receives.

        Returns:
            A `keras.callbacks.History`.

        >>> history = trainer.fit(data.repeat(), steps=5, progress=False)
        >>> history = trainer.fit(data.repeat(), steps=8, progress=False)  # three more
        >>> trainer.step.numpy().item()
        8
        """
        return Fitting(
            self._engine,
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
            loggers=loggers,
        ).run()

    @interruptible
    def evaluate(
        self, dataset: Any, *, steps: int | None = None, averaged: bool = False, batch_size: int = 32
    ) -> dict[str, float]:
        """{name: float}: every loss over the whole dataset, their statically weighted sum `loss`, every metric.

        Does not change training metrics and states. Omits a loss whose weights sum to 0, as in training; without any
        loss, `loss` is NaN. `steps` limits the number of batches; `averaged` uses the averaged weights.
        A dict of datasets gives `<name>_<result>`; `loss` comes from the first one.

        >>> sorted(trainer.evaluate(data))
        ['error', 'loss']
        >>> sorted(trainer.evaluate({"clean": data, "noisy": data}))
        ['clean_error', 'clean_loss', 'loss', 'noisy_error', 'noisy_loss']
        """
        with self.averaged_weights() if averaged else contextlib.nullcontext():
            return self._engine.evaluation.evaluate(dataset, steps, batch_size)

    @interruptible
    def predict(self, dataset: Any, *, steps: int | None = None, batch_size: int = 32) -> Any:
        """The model's outputs for every example of the dataset, as NumPy arrays in the structure of the outputs.

        >>> trainer.predict(data).shape
        (8, 6, 1)
        """
        self._engine.frozen.check()
        return self._engine.evaluation.predict(dataset, steps, batch_size)

    def timestep_gradients(
        self, batch: Any, per_example: bool = False, *, full: bool = False
    ) -> dict[str, dict[str, np.ndarray]]:
        """The gradient at every time step of every recurrent layer and `probe`, for one batch.

        Uses the current loss weights in training mode. Trains nothing and changes no state.

        Args:
            batch: a batch as the dataset yields it; arrays are converted.
            per_example: return [batch, time] instead of the mean over the examples.
            full: also return the gradients λ_t themselves, as `state_gradient/<state>`; implies `per_example`.

        Returns:
            {layer: {quantity: array [time] or [batch, time]}}. Quantities: `state`, `hidden`, `cell`, `recurrent`,
            `external`, `input`, `gain`, `weight/<variable>`; per-example norms are norms of dL/d(tensor), times the
            number of examples.

        >>> trainer.timestep_gradients(batch)["lstm"]["state"].shape
        (6,)
        >>> trainer.timestep_gradients(batch, per_example=True)["lstm"]["state"].shape
        (8, 6)
        """
        return self._engine.inspection.timestep_gradients(batch, per_example, full)

    def check_timestep_sum(self, batch: Any) -> dict[str, float]:
        """{variable path: ‖Σ_t G_t − dL/dW‖ / ‖dL/dW‖} of the weights in recurrent layers: about 1e-6 in float32.

        A larger value means that a weight is also used outside the loop, for example by a regularizer.

        >>> max(trainer.check_timestep_sum(batch).values()) < 1e-5
        True
        """
        return self._engine.inspection.sum_check(batch)

    def summary(self) -> None:
        """Prints the model, the losses with their weights, the stages of the update, and what is logged where.

        >>> trainer.summary()  # doctest: +ELLIPSIS
        Model      sequential...: 76 trainable parameters, ...
        Losses
          error: squared_error, weight 1.0
        ...
        """
        print(summary.summarize(self._engine))

    @interruptible
    def fast_dev_run(self, dataset: Any, eval_dataset: Any = None) -> dict[str, float]:
        """Runs a few steps of everything to find mistakes quickly. Returns an evaluation; changes nothing.

        >>> sorted(trainer.fast_dev_run(data.repeat()))
        ['error', 'loss']
        """
        return dry_run.fast_dev_run(self._engine, dataset, eval_dataset)

    @interruptible
    def overfit(self, dataset: Any, batches: int = 1, steps: int = 200) -> dict[str, tuple[float, float]]:
        """Trains on a few batches repeatedly; returns {loss: (before, after)} and leaves the trainer unchanged.

        >>> before, after = trainer.overfit(data.repeat(), batches=1, steps=50)["error"]
        >>> after < before
        True
        """
        return dry_run.overfit(self._engine, dataset, batches, steps)

    def warm_start(self, source: Any) -> export.WarmStart:
        """Copies weights from a Keras model, a `.keras` file or a work directory, by layer and variable names.

        Returns a report of the weights that matched and those that did not; print it.

        >>> print(trainer.warm_start(keras.models.clone_model(trainer.model)))
        5 weights taken over
        """
        return export.warm_start(self.model, source)

    def build(self, dataset: Any) -> None:
        """Builds an unbuilt model for the batches of a `tf.data.Dataset`, by tracing its losses. Runs nothing.

        >>> trainer.build(data)
        """
        self._engine.build(as_dataset(dataset).element_spec)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """A context in which the model uses the averaged weights. Eager.

        >>> averaged = Trainer(trainer.model, "sgd", {"error": "mse"}, ema_decay=0.9)
        >>> history = averaged.fit(data.repeat(), steps=3, progress=False)
        >>> with averaged.averaged_weights():
        ...     predictions = averaged.predict(data)
        """
        if self.ema_decay is None:
            raise ValueError("There are no averaged weights: `ema_decay` is None. Pass e.g. ema_decay=0.999.")
        minimizers = self._engine.minimizers.values()
        with temporary_values([pair for minimizer in minimizers for pair in minimizer.pipeline.averaged()]):
            yield
