"""Base class of combiners that change the direction of the update, using only the Gramian of the gradients."""

import tensorflow as tf

from looptape.losses.combiners.base import Combiner


class DirectionCombiner(Combiner):
    """Needs the gradients of every loss in every update, for shared variables or a shared feature tensor.

    Cost: one backward pass per loss; with shared features, one per head and one through the trunk. No buffers. The
    guards are `warmup_steps` (a plain sum at first), `moving_average` of the coefficients (CR-MOGM, Zhou 2022: with
    noisy gradients the methods converge only with it; it starts from the first coefficients), and `freeze` (keeps the
    last coefficients). An absent loss takes no part.

    Coefficients are float64, and so is the sum of the gradients: those of nearly opposed gradients are large and
    cancel. Kept ones (`moving_average`, `freeze`) are float32.

    Args:
        warmup_steps: Number of updates with all coefficients 1 before the method starts.
        moving_average: Share of the old coefficients in the new ones, in [0, 1); 0 for none.
    """

    needs = "gradients"
    minimum_losses = 2
    precision = tf.float64

    def __init__(self, warmup_steps=0, moving_average=0.0):
        super().__init__(warmup_steps=warmup_steps, moving_average=moving_average)

    def create(self, count):
        if self.moving_average:
            self.add("averaged", tf.zeros([count], tf.bool), tf.bool)

    def learn(self, losses, present, measured):
        if self.moving_average:
            self.averaged.assign(self.averaged | self.moving(present))

    def _scaled(self, weights, present):
        return weights  # their sum is the method's own business

    def _bound(self, weights, present, old):
        bounded = super()._bound(weights, present, old)
        return tf.where(self.averaged, bounded, weights) if self.moving_average else bounded
