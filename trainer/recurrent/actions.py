"""Actions on λ_t, the gradient of the state at time step t, while it travels back through time.

    Trainer(model, …, timestep_actions=[looptape.timesteps.ClipNorm(1.0)])
    Trainer(model, …, timestep_actions={"lstm": [looptape.timesteps.Detach(0.25), looptape.timesteps.ClipNorm(1.0)]})

λ_t is the sum of the *carried* gradient, which time step t + 1 sends back, and the gradient that arrives at t from the
losses. In a layer that goes backwards, time step t − 1 sends it.
`Cut` and `Detach` act on the carried gradient; the others act on the sum, which then travels on. Limits are in the
units of the logs: the norm over the features of dL/d(state), times the number of examples.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

_TRIED_STEPS = (0, *(10**power for power in range(7)))  # of a schedule, before the first update
STATES = {"hidden": 0, "h": 0, "cell": 1, "c": 1}


class Moment(NamedTuple):
    """When and where an action acts."""

    t: Any  # time step of the input, an int32 tensor
    step: Any  # updates made so far, an int64 tensor
    units: Any  # turns λ_t into the gradient of an example's own loss, a float32 scalar
    layer: str
    sender: Any = None  # time step that sent the carried gradient, a scalar or [batch, 1]; None for t + 1


@dataclasses.dataclass(frozen=True)
class Action:
    """One action. A subclass overrides `change`.

    Args:
        state: the state it acts on: "hidden" (the first one), "cell" (the second one) or a number; all by default.
    """

    state: str | int | None = dataclasses.field(default=None, kw_only=True)

    carried = False  # whether it acts on the gradient that time step t + 1 sent back, not on λ_t

    def __post_init__(self):
        known = self.state is None or (isinstance(self.state, int) and not isinstance(self.state, bool))
        if not known and self.state not in STATES:
            raise ValueError(
                f"`state` is {self.state!r}; it must be 'hidden', 'cell', the number of a state, or None for all. "
                "Use state='cell' for the second state of an LSTM."
            )
        self.check()

    def check(self):
        """Raises an error if an argument is wrong."""

    def change(self, gradients, moment):
        """Returns the changed gradients, as a list of the same shapes [batch, …]. Traced, once for all time steps."""
        raise TypeError(f"{type(self).__name__} has no `change`. Override it.")

    def __call__(self, gradients, moment):
        """Applies `change` to the state that the action is for; others stay as they are."""
        index = STATES.get(self.state, self.state)
        if index is None:
            return checked(f"The action {self}", self.change(list(gradients), moment), gradients)
        if not -len(gradients) <= index < len(gradients):
            raise ValueError(
                f"The action {self} is for state {self.state!r} of layer {moment.layer!r}, which has "
                f"{len(gradients)} state(s). Leave `state` out, or name one of them."
            )
        changed = list(gradients)
        own = [gradients[index]]
        changed[index] = checked(f"The action {self}", self.change(own, moment), own)[0]
        return changed


@dataclasses.dataclass(frozen=True)
class ClipNorm(Action):
    """Scales λ_t of an example down to a norm of `limit` where it is larger (Graves 2013 clips each value).

    >>> clip = ClipNorm(1.0)
    """

    limit: float

    def check(self):
        if isinstance(self.limit, bool) or not isinstance(self.limit, numbers.Real) or not self.limit > 0:
            raise ValueError(
                f"`limit` of ClipNorm is {self.limit!r}; it must be a number above 0. The quantity `state` in the logs "
                "shows which norms there are."
            )

    def change(self, gradients, moment):
        norm = example_norms(gradients, moment.units)
        factor = tf.cast(self.limit, tf.float32) / norm
        return [tf.where(_spread(norm > self.limit, g), _times(g, factor), g) for g in gradients]


@dataclasses.dataclass(frozen=True)
class Scale(Action):
    """Multiplies λ_t by a factor, a number or a schedule of the training step. 0 stops the gradient, 1 does nothing.

    >>> half = Scale(0.5)
    """

    factor: float | Callable

    def check(self):
        if callable(self.factor):
            tried = {step: _tried(self.factor, step) for step in _TRIED_STEPS}
        elif isinstance(self.factor, numbers.Real) and not isinstance(self.factor, bool):
            tried = {0: float(self.factor)}
        else:
            raise TypeError(
                f"`factor` of Scale is {self.factor!r}; it must be a number or a schedule: a callable that takes the "
                "step and returns a number."
            )
        for step, factor in tried.items():
            if math.isfinite(factor) and factor >= 0:
                continue
            raise ValueError(
                f"`factor` of Scale is {factor} at step {step}; it must be finite and not negative. Use 1 for no "
                "change and 0 to stop the gradient."
            )

    def change(self, gradients, moment):
        factor = self.factor(moment.step) if callable(self.factor) else self.factor
        return [_times(g, tf.cast(factor, tf.float32)) for g in gradients]


@dataclasses.dataclass(frozen=True)
class Cut(Action):
    """Stops the carried gradient every `every` time steps, or at the time steps `at`. The losses there still count.

    `Cut(every=k)` divides a sequence into windows of k time steps, the first from 0 to k − 1, for truncated
    back-propagation. No gradient passes from one window to another, in either direction. `Cut(at=[t])` stops the
    gradient that time step t receives from t + 1, or from t − 1 in a layer that goes backwards.

    >>> windows, once = Cut(every=20), Cut(at=[49])
    """

    every: int | None = None
    at: Sequence[int] | None = None

    carried = True

    def check(self):
        if (self.every is None) == (self.at is None):
            raise ValueError(
                f"Cut has every={self.every!r} and at={self.at!r}; it needs one of the two. Use Cut(every=20) or "
                "Cut(at=[49])."
            )
        given = [self.every] if self.at is None else list(self.at) if isinstance(self.at, Iterable) else []
        least = 1 if self.at is None else 0
        wrong = [x for x in given if isinstance(x, bool) or not isinstance(x, numbers.Integral) or x < least]
        if wrong or not given:
            raise ValueError(
                f"Cut has every={self.every!r} and at={self.at!r}; `every` must be an integer of at least 1 and `at` "
                "a list of time steps from 0 on. Leave the action out for no cut."
            )

    def change(self, gradients, moment):
        t = moment.t
        sender = t + 1 if moment.sender is None else moment.sender
        if self.every is not None:
            every = tf.cast(self.every, t.dtype)
            cut = tf.not_equal(t // every, sender // every)
        else:
            # With a mask the sender may be further away: what passes a time step that is cut is stopped.
            at = tf.constant(list(self.at), t.dtype)
            passed = tf.where(sender > t, (t <= at) & (at < sender), (sender < at) & (at <= t))
            cut = tf.reduce_any(passed, axis=-1, keepdims=sender.shape.rank > 0)
        return [tf.where(_spread(cut, g), tf.zeros_like(g), g) for g in gradients]


@dataclasses.dataclass(frozen=True)
class Detach(Action):
    """Stops the carried gradient with a probability, drawn for every time step and update (h-detach, Arpit 2018).

    By default it acts on the hidden state only, so that an LSTM's gradient flows through its cell. The draw depends on
    `seed`, the layer's name, the step and t: a resumed run, all micro-batches and all replicas draw the same numbers.
    Name the layer if one process makes the model several times: Keras numbers layers without a name.

    >>> detach = Detach(0.25, seed=1)
    """

    probability: float
    seed: int = 0
    state: str | int | None = dataclasses.field(default="hidden", kw_only=True)

    carried = True

    def check(self):
        if not isinstance(self.probability, numbers.Real) or not 0 <= self.probability <= 1:
            raise ValueError(
                f"`probability` of Detach is {self.probability!r}; it must lie between 0 and 1. The paper uses 0.25 "
                "and 0.5."
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, numbers.Integral) or not 0 <= self.seed < 2**31:
            raise ValueError(
                f"`seed` of Detach is {self.seed!r}; it must be an integer from 0 to 2³¹ − 1. The default is 0."
            )

    def change(self, gradients, moment):
        layer = sum(place * byte for place, byte in enumerate(moment.layer.encode(), 1))
        stopped = _draw(self.seed, layer, moment.step, moment.t) < self.probability
        return [tf.where(stopped, tf.zeros_like(g), g) for g in gradients]


@dataclasses.dataclass(frozen=True)
class Normalize(Action):
    """Gives λ_t of every example the same norm; a gradient of 0 stays 0.

    >>> unit = Normalize()
    """

    norm: float = 1.0

    def check(self):
        if not isinstance(self.norm, numbers.Real) or not 0 < self.norm < math.inf:
            raise ValueError(f"`norm` of Normalize is {self.norm!r}; it must be a number above 0. The default is 1.")

    def change(self, gradients, moment):
        factor = tf.math.divide_no_nan(tf.cast(self.norm, tf.float32), example_norms(gradients, moment.units))
        return [_times(g, factor) for g in gradients]


def example_norms(gradients, units=1.0):
    """[batch, 1]: the norm of each example over all states given, in float32."""
    flat = [tf.cast(tf.reshape(g, [tf.shape(g)[0], -1]), tf.float32) * units for g in gradients]
    return tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(g), axis=1, keepdims=True) for g in flat]))


def _tried(schedule, step):
    """The value of a schedule at a step, as a number."""
    try:
        value = np.asarray(schedule(tf.constant(step, tf.int64)))
    except Exception as error:
        raise ValueError(
            f"`factor` of Scale failed at step {step}: {type(error).__name__}: {error}. A schedule takes the step, an "
            "int64 tensor, and returns a number, e.g. `lambda step: 1.0 / (1.0 + tf.cast(step, tf.float32))`."
        ) from error
    if value.ndim or not np.issubdtype(value.dtype, np.number):
        raise ValueError(
            f"`factor` of Scale is {value!r} at step {step}; a schedule must return one number. Return a scalar."
        )
    return float(value)


def _draw(*integers):
    """A number in [0, 1) that depends on all the integers (MurmurHash3's mixing), the same with XLA and without.

    TensorFlow's stateless generators are not: for some seeds XLA draws another number.
    """
    mixed = tf.constant(0x9E3779B9, tf.uint32)
    for integer in integers:
        mixed = tf.bitwise.bitwise_xor(mixed, tf.cast(integer, tf.uint32))
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            shifted = tf.bitwise.right_shift(mixed, tf.constant(shift, tf.uint32))
            mixed = tf.bitwise.bitwise_xor(mixed, shifted) * tf.constant(factor, tf.uint32)
    return tf.cast(tf.bitwise.right_shift(mixed, tf.constant(8, tf.uint32)), tf.float32) / 2.0**24


def _times(gradient, factor):
    """A gradient [batch, …] times a scalar or [batch, 1], by way of float32."""
    return tf.cast(tf.cast(gradient, tf.float32) * _spread(factor, gradient), gradient.dtype)


def _spread(values, like):
    """A scalar, or [batch, 1] with as many axes as `like`."""
    return tf.reshape(values, [-1, *[1] * (like.shape.rank - 1)]) if values.shape.rank else values


def checked(who, changed, given):
    """`changed` as a list, if it may stand for the gradients that `who` was given."""
    if not isinstance(changed, list | tuple):
        got = "None" if changed is None else f"a {type(changed).__name__}"
        raise ValueError(
            f"{who} returned {got} for {len(given)} gradient(s); it must return a list of as many. Let it end with "
            "e.g. `return [0.5 * gradient for gradient in gradients]`."
        )
    changed = list(changed)
    for new, old in zip(changed, given, strict=False):
        if not tf.is_tensor(new) or new.dtype != old.dtype or not new.shape.is_compatible_with(old.shape):
            got = f"{new.shape} {new.dtype.name}" if tf.is_tensor(new) else repr(new)
            raise ValueError(
                f"{who} returned {got} for a gradient {old.shape} {old.dtype.name}; shape and type must stay. Cast the "
                "result, or keep the batch axis."
            )
    if len(changed) != len(given):
        raise ValueError(f"{who} returned {len(changed)} gradients for {len(given)}. Return all of them.")
    return changed
