"""Loss scaling for float16: gradients too small for it are lifted before the backward pass and lowered after."""

import numpy as np
import tensorflow as tf

from looptape.trainer.variables import all_layers

INITIAL, FLOOR, CEILING, GROWTH_INTERVAL = 2.0**15, 1.0, 2.0**24, 2000


class LossScale:
    """A dynamic loss scale: doubled after 2,000 good updates, halved (to 1 at least) by a non-finite one.

    Inactive, and free, unless a layer of the model computes in float16.
    """

    def __init__(self, model, make_variable):
        self.active = needs_loss_scale(model)
        self._scale = self._good = None
        if self.active:
            self._scale = make_variable(np.float32(INITIAL), "loss_scale")
            self._good = make_variable(np.int64(0), "good_updates")

    @property
    def variables(self):
        return [self._scale, self._good] if self.active else []

    def value(self):
        """The scale as a tensor, or None. Traced."""
        return tf.convert_to_tensor(self._scale) if self.active else None

    def grow(self):
        """Counts a good update. Traced."""
        if not self.active:
            return
        due = self._good >= GROWTH_INTERVAL - 1
        self._scale.assign(tf.where(due, tf.minimum(self._scale * 2.0, CEILING), self._scale))
        self._good.assign(tf.where(due, tf.zeros([], tf.int64), self._good + 1))

    def shrink(self):
        """Halves the scale after a non-finite update. On the host. Returns whether there was room to."""
        if not self.active or float(self._scale.numpy()) <= FLOOR:
            return False
        self._scale.assign(max(float(self._scale.numpy()) / 2.0, FLOOR))
        self._good.assign(0)
        return True


def needs_loss_scale(model):
    """Whether a layer of the model computes in float16."""
    return any(getattr(layer, "compute_dtype", None) == "float16" for layer in all_layers(model))
