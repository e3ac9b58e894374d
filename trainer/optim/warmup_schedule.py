"""A learning rate that rises to its peak and then stays or goes down."""

import math
import numbers

import keras
import tensorflow as tf

SHAPES = ("constant", "cosine", "exponential")
_COSINE_END = 0.01  # of the peak
_DECAY, _DECAY_STEPS = 0.9, 1000


@keras.saving.register_keras_serializable(package="looptape")
class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Rises in a straight line to the peak, then stays there or goes down.

    Args:
        peak: the highest learning rate.
        warmup_steps: updates over which it rises: the first of n has peak/n, the last has the peak.
        shape: the course after the warm-up: "constant", half a "cosine", or "exponential", 10 % less every 1,000
            updates.
        steps: the update at which the cosine reaches a hundredth of the peak.

    >>> schedule = WarmupSchedule(0.1, warmup_steps=10, shape="cosine", steps=1000)
    >>> round(float(schedule(4)), 6), round(float(schedule(1000)), 6)
    (0.05, 0.001)
    """

    def __init__(self, peak, warmup_steps=0, shape="constant", steps=None):
        if isinstance(peak, bool) or not isinstance(peak, numbers.Real) or not math.isfinite(peak) or peak <= 0:
            raise ValueError(f"`peak` is {peak!r}; it must be a positive number, the highest learning rate.")
        if shape not in SHAPES:
            raise ValueError(f"`shape` is {shape!r}; it must be one of {', '.join(SHAPES)}.")
        if not _is_integer(warmup_steps) or warmup_steps < 0:
            raise ValueError(
                f"`warmup_steps` is {warmup_steps!r}; it must be an integer of at least 0. Use 0 for none."
            )
        if shape == "cosine" and (not _is_integer(steps) or steps <= warmup_steps):
            raise ValueError(
                f"`steps` is {steps!r}; a cosine must know the update at which it ends, an integer above "
                f"`warmup_steps` ({warmup_steps}). Pass the `steps` of `fit`."
            )
        self.peak, self.warmup_steps, self.shape = float(peak), int(warmup_steps), shape
        self.steps = int(steps) if _is_integer(steps) else steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        rate = tf.constant(self.peak, tf.float32)
        if self.shape == "cosine":
            done = tf.clip_by_value((step - self.warmup_steps) / (self.steps - self.warmup_steps), 0.0, 1.0)
            rate *= _COSINE_END + (1 - _COSINE_END) * 0.5 * (1 + tf.cos(3.14159265 * done))
        if self.shape == "exponential":
            rate *= _DECAY ** (tf.maximum(step - self.warmup_steps, 0.0) / _DECAY_STEPS)
        if self.warmup_steps:
            rate = tf.where(step < self.warmup_steps, self.peak * (step + 1) / self.warmup_steps, rate)
        return rate

    def get_config(self):
        names = ("peak", "warmup_steps", "shape", "steps")
        return {name: getattr(self, name) for name in names}


def _is_integer(value):
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
