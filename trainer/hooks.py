"""The hooks that a subclass of `Trainer` overrides, and the methods it calls in them. Part of `Trainer`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from looptape import losses as losses_package
from looptape.trainer import overriding
from looptape.trainer.data import batches
from looptape.trainer.engine import Engine
from looptape.trainer.step.forward import loss_terms, omega_losses
from looptape.trainer.summaries import media


class Hooks:
    """Traced methods of `Trainer`: five to override, the most needed first, and others to call inside them."""

    # Set by `Trainer`.
    model: Any
    losses: dict
    metrics: dict
    accumulation_steps: int | str | dict[int, int]
    _engine: Engine

    # ---- Hooks, in order of need.

    def compute_losses(self, batch: Any, training: bool) -> dict[str, Any]:
        """{name: loss} of a batch: a tensor [batch], [batch, time], [batch, …], a scalar, or (tensor, weights).

        Traced. Called once per micro-batch in training and once per batch in evaluation. Values are not reduced
        here: the trainer divides Σ w·l by Σ w over the whole update.

        >>> class Robust(Trainer):
        ...     def compute_losses(self, batch, training):
        ...         inputs, targets = batch
        ...         outputs = self.model(inputs, training=training)
        ...         return {"error": tf.abs(outputs - targets)[..., 0]}  # [batch, time]
        >>> sorted(Robust(trainer.model, "adam").evaluate(data))
        ['error', 'loss']
        """
        inputs, targets, sample_weight = batches.unpack(batch)
        plain, penalties = omega_losses.divide(self.losses)

        def compute():
            outputs = self.call_model(inputs, training)
            self.update_metrics(targets, outputs, sample_weight)
            running = not self._engine.jit_compile
            return loss_terms.apply_losses(plain, self.model, targets, outputs, sample_weight, running=running)

        if not penalties or not training:
            return compute()
        return omega_losses.add(self._engine, penalties, compute, batches.count_examples(batch))

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Makes one update. Traced. Returns {name: tensor}, logged beside the losses.

        Override it for several optimizers and call `minimize` once for each.

        >>> class Twice(Trainer):
        ...     def train_step(self, batch):
        ...         before = self.minimize(batch)
        ...         return {"twice": 2.0 * before["error"]}
        >>> history = Twice(trainer.model, "adam", {"error": "mse"}).fit(data.repeat(), steps=2, progress=False)
        """
        self.minimize(batch)
        return {}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """The losses {name: loss} of an evaluation, without training. Traced; runs once per batch of `evaluate`.

        >>> class Halved(Trainer):
        ...     def eval_step(self, batch):
        ...         return {"half": 0.5 * self.compute_losses(batch, training=False)["error"]}
        >>> sorted(Halved(trainer.model, "adam", {"error": losses.squared_error}).evaluate(data))
        ['half', 'loss']
        """
        return self._engine.hook("compute_losses")(batch, training=False)

    def transform_gradients(self, gradients: list, variables: list) -> list:
        """Returns the gradients for the optimizer. Traced; runs after accumulation, the finite check and clipping.

        >>> class Centralised(Trainer):
        ...     def transform_gradients(self, gradients, variables):
        ...         return [g - tf.reduce_mean(g, axis=0) if g.shape.rank > 1 else g for g in gradients]
        >>> centralised = Centralised(trainer.model, "sgd", {"error": "mse"})
        >>> history = centralised.fit(data.repeat(), steps=2, progress=False)
        """
        return gradients

    def transform_timestep_gradient(self, layer: str, t: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        """The gradient of a recurrent layer's state at time step t, as it travels back to t − 1 and to the weights.

        Traced, inside the backward loop, after `timestep_actions`. Called for each state; `layer.state` is its number.

        Args:
            layer: the name of the layer.
            t: an int32 tensor.
            gradient: [batch, units], times the number of examples, as in the logs; float32, also in a layer that
                computes in a narrower type.

        >>> class Damped(Trainer):
        ...     def transform_timestep_gradient(self, layer, t, gradient):
        ...         return 0.9 * gradient
        >>> damped = Damped(trainer.model, "sgd", {"error": "mse"})
        >>> history = damped.fit(data.repeat(), steps=2, progress=False)
        """
        return gradient

    # ---- Called inside hooks.

    def minimize(
        self,
        batch: Any,
        compute_losses: Callable[[Any, bool], dict[str, Any]] | None = None,
        *,
        variables: Sequence | None = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        loss_weights: Mapping[str, float | losses_package.Schedule] | None = None,
        name: str = "",
    ) -> dict[str, tf.Tensor]:
        """Runs the whole pipeline on a batch: losses, gradients, accumulation, check, clip, apply, average.

        Call it in `train_step`. Without further arguments it makes the trainer's own update.

        Args:
            batch: the batch of `train_step`. It is split into `accumulation_steps` micro-batches.
            compute_losses: `(batch, training) -> {name: loss}`; the trainer's by default.
            variables: the variables to train; the model's trainable variables by default.
            optimizer: the trainer's by default; each set of variables needs an optimizer of its own.
            loss_weights: {name: number or schedule}.
            name: distinguishes calls with different arguments; losses are logged as `loss/<name>/<loss>`. Calls with
                the same name need the same arguments; their losses are logged as one mean.

        Returns:
            {name: the loss's value before the update}.

        Raises:
            ValueError: a call with the same name had other arguments.

        >>> class Alternating(Trainer):
        ...     def train_step(self, batch):
        ...         recurrent, readout = self.model.layers
        ...         self.minimize(batch, variables=recurrent.trainable_variables, name="recurrent")
        ...         slow = self.readout_optimizer
        ...         self.minimize(batch, variables=readout.trainable_variables, optimizer=slow, name="readout")
        ...         return {}
        >>> alternating = Alternating(trainer.model, "adam", {"error": "mse"})
        >>> alternating.readout_optimizer = keras.optimizers.SGD(0.001)
        >>> history = alternating.fit(data.repeat(), steps=2, progress=False)
        """
        if self._engine.building:
            found = (compute_losses or self._engine.hook("compute_losses"))(batch, True)
            return {loss: tf.zeros([]) for loss in found}
        minimizer = self._engine.minimizer_for(name, compute_losses, variables, optimizer, loss_weights)
        count = self._engine.micro_batches
        if count == 1:
            return minimizer.from_parts([batch])
        if tf.executing_eagerly() or self._engine.replicas > 1:
            return minimizer.from_parts([batches.slice_for_replica(batch, i, count) for i in range(count)])
        return minimizer.from_batch(batch)

    def call_model(self, inputs: Any, training: bool) -> Any:
        """The model's outputs. Passes `training` to the model if it accepts it.

        >>> tuple(trainer.call_model(batch[0], training=False).shape)
        (8, 6, 1)
        """
        with batches.explaining(self.model, inputs):
            if self._engine.model_takes_training:
                return self.model(inputs, training=training)
            return self.model(inputs)

    def log(self, name: str, tensor: Any) -> None:
        """Logs an extra scalar to TensorBoard and callbacks: the mean over the examples since the last log.

        Do not use `loss` or the name of a loss: callbacks and `evaluate` show the loss under these names.

        >>> class Logging(Trainer):
        ...     def compute_losses(self, batch, training):
        ...         self.log("largest", tf.reduce_max(batch[0]))
        ...         return super().compute_losses(batch, training)
        >>> history = Logging(trainer.model, "adam", {"error": "mse"}).fit(data.repeat(), steps=2, progress=False)
        >>> "largest" in history.history
        True
        """
        media.check_name("log", name)
        tensor = media.as_tensor("log", name, tensor, "a number or a tensor of numbers")
        if tensor.dtype == tf.string:
            raise TypeError(f"`log` of {name!r} got a text; it takes numbers. Use `log_text`.")
        if self._logs("log"):
            value = tf.reduce_mean(tf.cast(tensor, tf.float32))
            self._engine.tracing.logs[-1][name] = tf.stop_gradient(value)

    def _logs(self, method: str) -> bool:
        """Whether the logged value belongs to an update or an evaluation, and not to a hook called by hand."""
        collecting = bool(self._engine.tracing.logs)
        if not collecting:
            overriding.check_place(self, method)
        return collecting

    def log_histogram(self, name: str, tensor: Any) -> None:
        """Logs a histogram of a tensor's finite elements, once per row of `log_every`; other updates cost nothing.

        It comes from the last update of the row, and from its last micro-batch. With several replicas or `jit_compile`
        nothing is logged, and a warning says so.

        >>> class Watched(Trainer):
        ...     def compute_losses(self, batch, training):
        ...         outputs = self.model(batch[0], training=training)
        ...         self.log_histogram("outputs", outputs)
        ...         return {"error": tf.square(outputs - batch[1])}
        >>> watched = Watched(trainer.model, "sgd")
        >>> history = watched.fit(data.repeat(), steps=2, progress=False)
        """
        media.check_name("log_histogram", name)
        tensor = media.check_numbers(name, tensor)
        if self._logs("log_histogram"):
            self._engine.media.record(name, "histogram", lambda: media.buckets(tensor))

    def log_image(self, name: str, images: Any, limit: int = 3) -> None:
        """Logs the first images of a batch, [batch, height, width, channels], or one image.

        It follows the schedule of `log_histogram`. Floating-point pixels range from 0 to 1, integers from 0 to 255.

        >>> class Watched(Trainer):
        ...     def compute_losses(self, batch, training):
        ...         self.log_image("sequences", batch[0][..., tf.newaxis], limit=1)
        ...         return {"error": tf.square(self.model(batch[0], training=training) - batch[1])}
        >>> history = Watched(trainer.model, "sgd").fit(data.repeat(), steps=2, progress=False)
        """
        media.check_name("log_image", name)
        images, limit = media.check_images(name, images), media.check_limit(limit)
        if self._logs("log_image"):
            self._engine.media.record(name, "image", lambda: media.pixels(images, limit))

    def log_audio(self, name: str, audio: Any, sample_rate: int, limit: int = 1) -> None:
        """Logs the first sounds of a batch, [batch, samples, channels], or one sound.

        It follows the schedule of `log_histogram`. Samples are clipped to the range from -1 to 1. `sample_rate` is the
        number of samples per second.

        >>> class Watched(Trainer):
        ...     def compute_losses(self, batch, training):
        ...         outputs = self.model(batch[0], training=training)
        ...         self.log_audio("outputs", outputs, sample_rate=8000)
        ...         return {"error": tf.square(outputs - batch[1])}
        >>> history = Watched(trainer.model, "sgd").fit(data.repeat(), steps=2, progress=False)
        """
        media.check_name("log_audio", name)
        (audio, kind), limit = media.check_audio(name, audio, sample_rate), media.check_limit(limit)
        if self._logs("log_audio"):
            self._engine.media.record(name, kind, lambda: media.clipped(audio, limit))

    def log_text(self, name: str, text: Any) -> None:
        """Logs a text in Markdown, a Python or a TensorFlow string, on the same schedule as `log_histogram`.

        >>> class Watched(Trainer):
        ...     def compute_losses(self, batch, training):
        ...         self.log_text("longest", tf.strings.format("{} steps", tf.shape(batch[0])[1]))
        ...         return {"error": tf.square(self.model(batch[0], training=training) - batch[1])}
        >>> history = Watched(trainer.model, "sgd").fit(data.repeat(), steps=2, progress=False)
        """
        media.check_name("log_text", name)
        text = media.check_text(name, text)
        if self._logs("log_text"):
            self._engine.media.record(name, "text", lambda: text)

    def share(self, tensor: tf.Tensor) -> tf.Tensor:
        """Marks features that several losses share, for combiners that compare gradients; returns them.

        Use it in `compute_losses`: with a trunk and heads, `features = self.share(trunk(x))` makes PCGrad and similar
        combiners nearly as cheap as a sum. Do not call it inside a loop.

        >>> class TwoHeads(Trainer):
        ...     def compute_losses(self, batch, training):
        ...         recurrent, readout = self.model.layers
        ...         features = self.share(recurrent(batch[0]))
        ...         outputs = readout(features)
        ...         return {"error": tf.square(outputs - batch[1])[..., 0], "size": tf.abs(outputs)[..., 0]}
        >>> both = TwoHeads(trainer.model, "adam", combiner=losses.PCGrad())
        >>> history = both.fit(data.repeat(), steps=2, progress=False)
        """
        features = self._engine.tracing.features
        return tensor if features is None else features.add(tensor)

    def update_metrics(self, targets: Any, outputs: Any, sample_weight: Any = None) -> None:
        """Updates every metric with a batch. With several outputs a metric uses the output of its name.

        An evaluation whose hooks do not update a metric has no result for it.
        Targets and outputs that are NaN at a weight of 0 do not count. Keras's metrics sum in float32; over millions of
        examples give the metric `dtype="float64"`.

        >>> class Measured(Trainer):
        ...     def compute_losses(self, batch, training):
        ...         inputs, targets = batch
        ...         outputs = self.model(inputs, training=training)
        ...         self.update_metrics(targets, outputs)
        ...         return {"error": tf.square(outputs - targets)[..., 0]}
        >>> measured = Measured(trainer.model, "adam", metrics={"mae": keras.metrics.MeanAbsoluteError()})
        >>> sorted(measured.evaluate(data))
        ['error', 'loss', 'mae']
        """
        if not self.metrics:
            return
        outputs = batches.named_outputs(self.model, outputs)
        names = list(outputs) if isinstance(outputs, dict) else None
        for name, metric in self.metrics.items():
            part = batches.output_of(name, names)
            output = batches.select(outputs, part, names, "metric", "output")
            target = batches.select(targets, part, names, "metric", "target")
            weight = batches.select(sample_weight, part, names, "metric", "sample weight")
            mask = loss_terms.keras_mask(output)
            loss_terms.check_metric(name, metric, target, output)
            target, output = (
                loss_terms.without_uncounted(loss_terms.without_uncounted(x, weight), mask) for x in (target, output)
            )
            function = getattr(metric, "_fn", None)  # of a metric that is the mean of a function
            if function is not None and not str(getattr(function, "__module__", "")).startswith("keras."):
                target, output = loss_terms.same_rank(function, target, output)
            metric.update_state(target, output, sample_weight=loss_terms.WeightCache().get(mask, weight))
