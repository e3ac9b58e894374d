"""The loss of each time step, as a share of the update's loss; the shares sum to it."""

import tensorflow as tf

from looptape.losses.reduction import Summed
from looptape.trainer.evaluation import forward_only
from looptape.trainer.step.forward.loss_terms import safe_mean


class StepLosses:
    """The losses of one batch by time step, from the hooks of a trainer. Traced.

    The time axis of a loss [batch, time, ...] is its second axis. In a model with recurrent layers, the axis must be as
    long as one of them, or the outputs must have such an axis (a decoder that is not recurrent). A loss without a time
    axis (one value per example, a scalar, the regularization) counts towards the last time step.

    Attributes after `run`: `terms`, {name: Term}; `examples`; `vectors`, {name: [time] or a scalar}, weighted.
    """

    def __init__(self, owner):
        self._owner = owner
        self._raw = {}

    def run(self, batch):
        """Runs the forward pass in training mode. Changes no state."""
        hook = self._owner.hook("compute_losses")

        def noted(batch):
            self._raw = hook(batch, True)
            return self._raw

        self.terms, _, self.examples, _, _ = forward_only.forward_only(noted, self._owner, batch)
        weights = self._owner.loss_weights.scalars(list(self.terms), self._owner.step)
        pairs = zip(self.terms.items(), weights, strict=True)
        self.vectors = {name: self._vector(name, term, weight) for (name, term), weight in pairs}
        return self

    def _vector(self, name, term, weight):
        """Returns the weighted share of each time step, in the precision of the loss."""
        loss = self._raw.get(name)
        values, mask = loss if isinstance(loss, tuple | Summed) else (loss, None)
        if values is None or tf.convert_to_tensor(values).shape.rank < 2:
            return weight * safe_mean(term) if values is None else self._whole(values, mask, term, weight)
        values = _at_least_float32(tf.convert_to_tensor(values))
        if mask is not None:
            values *= _expanded(mask, values)
        sums = tf.reduce_sum(values, axis=[0, *range(2, values.shape.rank)])
        return tf.math.divide_no_nan(sums, tf.cast(term.divisor, sums.dtype)) * tf.cast(weight, sums.dtype)

    def _whole(self, values, mask, term, weight):
        values = _at_least_float32(tf.convert_to_tensor(values))
        if values.shape.rank == 0:
            # A scalar's sum is the scalar times the examples that it is divided by; a sum stands for itself.
            scale = 1.0 if term.divisor_key == ("one",) else self.examples / term.divisor
            return values * tf.cast(scale * weight, values.dtype)
        if mask is not None:
            values *= _expanded(mask, values)
        total = tf.reduce_sum(values)
        return tf.math.divide_no_nan(total, tf.cast(term.divisor, total.dtype)) * tf.cast(weight, total.dtype)

    def length(self, loops=()):
        """Returns the number of time steps as a Python int. `loops` are the recurrent layers that ran."""
        shown = {name: tuple(self._raw_values(name).shape) for name in self.vectors if name in self._raw}
        lengths = [vector.shape[0] for vector in self.vectors.values() if vector.shape.rank]
        if None in lengths:
            raise ValueError(
                f"The number of time steps is not known when tracing; the losses have the shapes {shown}. "
                "Use `tf.ensure_shape` on them."
            )
        own = set(lengths) - {1} or set(lengths)
        possible = {loop.length for loop in loops} or own
        found = possible & set(lengths) or {length for length in own if self._outputs_have(length)} or possible
        if not found:
            raise ValueError(
                f"No loss has a time axis: their shapes are {shown}. Return losses of shape [batch, time] from "
                "`compute_losses`, unreduced."
            )
        if len(found) > 1:
            raise ValueError(
                f"The time axis is ambiguous: the losses have the shapes {shown}, and the time steps could be any of "
                f"{sorted(found)}. Return [batch, time] from `compute_losses` with the same time for all, or [batch]."
            )
        return found.pop()

    def _outputs_have(self, length):
        """Returns whether an output [batch, time, ...] may have this length; True if the outputs are unknown."""
        outputs = getattr(self._owner.model, "outputs", None)
        shapes = [tuple(output.shape) for output in tf.nest.flatten(outputs)] if outputs else [(None, None, None)]
        return any(len(shape) > 2 and shape[1] in (None, length) for shape in shapes)

    def _raw_values(self, name):
        loss = self._raw[name]
        return tf.convert_to_tensor(loss[0] if isinstance(loss, tuple | Summed) else loss)

    def total(self, length):
        """Returns [time]: the loss of each time step over all terms; it sums to the loss of the update."""
        dtype = tf.float64 if any(v.dtype == tf.float64 for v in self.vectors.values()) else tf.float32
        parts = []
        for vector in self.vectors.values():
            vector = tf.cast(vector, dtype)
            if vector.shape != [length]:
                vector = tf.pad(tf.reshape(tf.reduce_sum(vector), [1]), [[length - 1, 0]])
            parts.append(vector)
        return tf.add_n(parts)


def _at_least_float32(values):
    return tf.cast(values, tf.float32) if values.dtype.size < 4 else values


def _expanded(mask, values):
    mask = tf.stop_gradient(tf.cast(mask, values.dtype))
    if mask.shape.rank > values.shape.rank:
        mask = mask[..., 0]  # of size 1, which the reduction has checked
    return tf.reshape(mask, tf.concat([tf.shape(mask), [1] * (values.shape.rank - mask.shape.rank)], axis=0))
