"""How far the truncated gradient is from the whole one, on the same batch with the same weights."""

import contextlib

import tensorflow as tf

from looptape.trainer.data.batches import concatenate, count_examples
from looptape.trainer.data.windows import Window
from looptape.trainer.evaluation.forward_only import forward_only
from looptape.trainer.recurrent.omega import Omega
from looptape.trainer.variables import raw, traced

TAGS = ("optimizer/bptt/relative_error", "optimizer/bptt/cosine")


class TruncationBias:
    """Compares the two gradients of a batch; one traced function, kept between calls.

    With `bptt_updates` the batch is the whole one that the window was cut from, and its sequences begin with it.

    Args:
        owner: the engine.
    """

    def __init__(self, owner):
        penalties = [name for name, loss in owner.losses.items() if isinstance(loss, Omega)]
        if penalties and owner.bptt_compare_every:
            raise ValueError(
                f"`bptt_compare_every` is {owner.bptt_compare_every} and {penalties} is an `Omega`, which needs the "
                "gradient as it is, not a truncated one. Leave one of the two out."
            )
        self._owner = owner
        self._function = traced(self._compare)

    def before(self, iterator, due, rows):
        """An iterator to take the next update from; if one is `due`, the comparison is written to `rows` first."""
        if not due:
            return iterator
        again, parts = self._owner.calls.take(iterator)
        if parts:
            rows.scalars(self._owner.counters.step + 1, self.measure(parts))
        return again

    def measure(self, parts):
        """{tag: number} for a list of micro-batches, as the training's iterator gives them. Eager."""
        batches = [part.whole if isinstance(part, Window) else part for part in parts]
        function = self._compare if self._owner.run_eagerly else self._function
        return dict(zip(TAGS, (float(x) for x in function(concatenate(batches))), strict=True))

    def _compare(self, batch):
        """(‖truncated − whole‖ / ‖whole‖, their cosine): float32 scalars."""
        truncated, whole = (self._gradient(batch, window) for window in (self._owner.bptt_window, None))
        difference, norms = tf.norm(truncated - whole), (tf.norm(truncated), tf.norm(whole))
        cosine = tf.math.divide_no_nan(tf.tensordot(truncated, whole, 1), norms[0] * norms[1])
        return tf.math.divide_no_nan(difference, norms[1]), cosine

    @contextlib.contextmanager
    def _anew(self):
        """A context in which stateful layers, too, begin with the batch if the trainer cuts it into windows."""
        carrying, begins = self._owner.carrying, tf.constant(True) if self._owner.bptt_updates else None
        with carrying.beginning(begins), carrying.running():
            yield

    def _gradient(self, batch, window):
        """The gradient of the weighted sum of the losses' means, times the loss scale, as one vector, in float32."""
        owner, scale = self._owner, self._owner.loss_scale.value()
        scale = 1.0 if scale is None else scale
        owner.steering.begin_forward()
        sources = [raw(variable) for variable in owner.trainable_variables]
        hook = owner.hook("compute_losses")
        with owner.steering.cutting(window), tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            with owner.recurrent_core.running(), self._anew():
                terms = forward_only(lambda batch: hook(batch, True), owner, batch)[0]
            weights = owner.loss_weights.scalars(list(terms), owner.step.value())
            means = [tf.math.divide_no_nan(term.sum, term.divisor) for term in terms.values()]
            total = scale * tf.add_n([weight * mean for weight, mean in zip(weights, means, strict=True)])
        owner.steering.set(owner.step.value(), count_examples(batch) / scale)
        found = tape.gradient(total, sources, unconnected_gradients="zero")
        return tf.concat([tf.reshape(tf.cast(tf.convert_to_tensor(g), tf.float32), [-1]) for g in found], axis=0)
