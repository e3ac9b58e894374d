"""The health of one update after the optimizer: what it did to every variable. Traced."""

import tensorflow as tf

from looptape.trainer.health import histograms, noise_scale, update_norms
from looptape.trainer.step.gradients import combination


class ExaminedUpdate:
    """Measures what a minimizer's update does to its variables. Made before the update is written, concluded after it.

    Args:
        owner: the trainer.
        variables: that are trained.
        gradients: of the whole update, before clipping.
    """

    def __init__(self, owner, variables, gradients):
        self._owner, self._variables, self._gradients = owner, variables, gradients
        self._before = update_norms.copies(owner.read, variables)

    def conclude(self, written, result, minimizer, coefficients):
        """{"norms": [4, variables], "examples", "noise", "positions", "units", "histograms"}, what there is of it.

        Args:
            written: a tensor or an operation that stands for the update.
            result: the `MicroResult` of the whole update.
            minimizer: whose update it is.
            coefficients: of its combiner, or None.
        """
        with tf.control_dependencies([written]):
            after = update_norms.copies(self._owner.read, self._variables)
        sums = result.report.health
        found = {
            "norms": update_norms.measure(self._gradients, self._before, after),
            "examples": tf.cast(result.examples, tf.float32),
            **sums["layers"],
        }
        if "noise" in sums:
            each = result.report.loss_gradients
            factors = combination.factors(minimizer, result, coefficients)
            found["noise"] = noise_scale.conclude(
                sums["noise"], factors, self._gradients, result.gradients, result.examples, each
            )
        if "histograms" in self._owner.health_parts:
            found["histograms"] = histograms.count([*self._gradients, *self._before])
        return found
