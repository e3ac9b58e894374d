"""What a subclass of `Trainer` overrides, and what it calls there. Part of `Trainer`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import losses as losses_package
from trainer import batches, objective
from trainer.engine import Engine


class Hooks(Engine):
    """Traced methods of `Trainer`: four to override, in order of need, and five to call inside them."""

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
        outputs = self.call_model(inputs, training)
        self.update_metrics(targets, outputs, sample_weight)
        return objective.apply_losses(self.losses, self.model, targets, outputs, sample_weight)

    def train_step(self, batch: Any) -> dict[str, Any]:
        """One update. Traced. Returns {name: tensor}, logged beside the losses.

        Override it for several optimizers, and call `minimize` once for each.

        >>> class Twice(Trainer):
        ...     def train_step(self, batch):
        ...         before = self.minimize(batch)
        ...         return {"twice": 2.0 * before["error"]}
        >>> history = Twice(trainer.model, "adam", {"error": "mse"}).fit(data.repeat(), steps=2, progress=False)
        """
        self.minimize(batch)
        return {}

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """{name: loss} as `compute_losses` returns them, without training. Traced; once per batch of `evaluate`.

        >>> class Halved(Trainer):
        ...     def eval_step(self, batch):
        ...         return {"half": 0.5 * self.compute_losses(batch, training=False)["error"]}
        >>> sorted(Halved(trainer.model, "adam", {"error": losses.squared_error}).evaluate(data))
        ['half', 'loss']
        """
        return self.compute_losses(batch, training=False)

    def transform_gradients(self, gradients: list, variables: list) -> list:
        """Gradients as the optimizer gets them: after accumulation, the finite check and clipping. Traced.

        >>> class Centralised(Trainer):
        ...     def transform_gradients(self, gradients, variables):
        ...         return [g - tf.reduce_mean(g, axis=0) if g.shape.rank > 1 else g for g in gradients]
        >>> centralised = Centralised(trainer.model, "sgd", {"error": "mse"})
        >>> history = centralised.fit(data.repeat(), steps=2, progress=False)
        """
        return gradients

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
        minimizer = self.minimizers.get(name)
        if minimizer is None:
            minimizer = self._make_minimizer(name, compute_losses, variables, optimizer, loss_weights)
        if self.accumulation_steps == 1:
            return minimizer.from_parts([batch])
        if tf.executing_eagerly() or self.replicas > 1:
            count = self.accumulation_steps
            return minimizer.from_parts([batches.slice_for_replica(batch, i, count) for i in range(count)])
        return minimizer.from_batch(batch)

    def call_model(self, inputs: Any, training: bool) -> Any:
        """The model's outputs. `training` is passed on where the model takes it.

        >>> tuple(trainer.call_model(batch[0], training=False).shape)
        (8, 6, 1)
        """
        if self._model_takes_training:
            return self.model(inputs, training=training)
        return self.model(inputs)

    def log(self, name: str, tensor: Any) -> None:
        """An extra scalar for TensorBoard and the callbacks' logs: the mean over the examples since the last log.

        >>> class Logging(Trainer):
        ...     def compute_losses(self, batch, training):
        ...         self.log("largest", tf.reduce_max(batch[0]))
        ...         return super().compute_losses(batch, training)
        >>> history = Logging(trainer.model, "adam", {"error": "mse"}).fit(data.repeat(), steps=2, progress=False)
        >>> "largest" in history.history
        True
        """
        value = tf.reduce_mean(tf.cast(tensor, tf.float32))
        self.tracing.logs[-1][name] = tf.stop_gradient(value)

    def share(self, tensor: tf.Tensor) -> tf.Tensor:
        """Marks features that several losses are computed from, for combiners that compare gradients; returns them.

        For `compute_losses`: with a trunk and heads, `features = self.share(trunk(x))` makes PCGrad and its like
        nearly as cheap as a sum. Not inside a loop.

        >>> class TwoHeads(Trainer):
        ...     def compute_losses(self, batch, training):
        ...         recurrent, readout = self.model.layers
        ...         features = self.share(recurrent(batch[0]))
        ...         outputs = readout(features)
        ...         return {"error": tf.square(outputs - batch[1])[..., 0], "size": tf.abs(outputs)[..., 0]}
        >>> both = TwoHeads(trainer.model, "adam", combiner=losses.PCGrad())
        >>> history = both.fit(data.repeat(), steps=2, progress=False)
        """
        features = self.tracing.features
        return tensor if features is None else features.add(tensor)

    def update_metrics(self, targets: Any, outputs: Any, sample_weight: Any = None) -> None:
        """Updates every metric with a batch. With several outputs a metric takes that of its name.

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
            mask = objective.keras_mask(output)
            metric.update_state(target, output, sample_weight=objective.WeightCache().get(mask, weight))


Engine.base = Hooks
