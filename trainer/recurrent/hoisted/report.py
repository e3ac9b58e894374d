"""Reports a probed run of a hoisted layer from the results of its two loops. Traced or eager.

The part of a weight's gradient that time step t adds is a product of two thin matrices, aᵀ δ. Its norm needs no such
product: ‖aᵀ δ‖² = Σ_{b,b'} (a_b · a_b')(δ_b · δ_b') over the pairs of examples.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from looptape.trainer.recurrent.hoisted import scan

# Sums of squares below this are not trusted in float32, whose smallest normal number is 1.2e-38.
_TINY = 1e-30
_LIFT = 2.0**63  # brings the least normal number's square into the range


class Found(NamedTuple):
    """Results of a backward pass at all time steps: [time, batch, …] in the order of the iterations."""

    sent: Any  # to the states before each time step
    changed: Any  # adjoints after the action, or ()
    external: Any  # what arrives at the outputs, where they are the hidden state
    final: Any  # what arrives at the final states
    mask: Any  # [time, batch, 1] or None
    factorised: Any  # function that gives a list of (left, delta) for each weight that is reported on


def read(keys, found):
    """The tensors for the keys of a `LoopRecord`.

    - `recurrent/<j>`: what a time step sends back to state j before it;
    - `state/<j>`, `after/<j>`: λ of state j before and after the action;
    - `external`: what arrives at the output of a time step and at those masked ones after it that repeat it;
    - `weights`: [time, weights], norms of what the time steps add to each that is reported on; `weight/<k>`: all of it.
    """
    states: Any = None
    values: list[Any] = []
    factorised: Any = None
    for key in keys:
        kind, _, rest = key.partition("/")
        if kind == "recurrent":
            values.append(found.sent[int(rest)])
        elif kind == "after":
            values.append(found.changed[int(rest)])
        elif kind == "state":
            states = states or scan.adjoints(found.sent, found.final, found.external)
            values.append(states[int(rest)])
        elif kind == "external":
            values.append(_gathered(found.external, found.mask))
        else:
            factorised = factorised or found.factorised()
            values.append(norms(factorised) if kind == "weights" else whole(factorised[int(rest)]))
    return values


def _gathered(external, mask):
    """Hands what arrives at a masked time step to the one whose output it repeats. Zero at masked time steps."""
    if mask is None:
        return external
    length, batch = tf.shape(external)[0], tf.shape(external)[1]
    ordinal = tf.cumsum(tf.cast(mask[..., 0], tf.int32), 0)  # of the latest valid time step
    place = ordinal * batch + tf.range(batch)
    rows = tf.reshape(external, [length * batch, external.shape[-1]])
    sums = tf.math.unsorted_segment_sum(rows, tf.reshape(place, [-1]), (length + 1) * batch)
    return tf.where(mask, tf.gather(sums, place), tf.zeros_like(external))


def norms(weights):
    """[time, weights]: norms of what the time steps add to each weight, float32.

    Args:
        weights: a list of (left, delta) for each, see `Recurrence.factorised`.
    """
    grams: dict = {}

    def gram(tensor):
        key = id(tensor[1] if isinstance(tensor, tuple) else tensor)
        if key not in grams:
            grams[key] = tensor, _gram(tensor)
        return grams[key][1]

    deltas = list({id(delta): delta for own in weights for _, delta in own}.values())
    within = tf.add_n([tf.linalg.trace(gram(delta)) for delta in deltas])
    quick = _norms(weights, gram)
    trusted = (within > _TINY) & tf.reduce_all(tf.math.is_finite(quick), 1)
    return tf.cond(tf.reduce_all(trusted), lambda: quick, lambda: _repaired(weights, gram, quick, trusted))


def _norms(weights, gram):
    squares = [
        [tf.reduce_sum(gram(delta) if left is None else gram(left) * gram(delta), [1, 2]) for left, delta in own]
        for own in weights
    ]
    return tf.stack([tf.sqrt(tf.maximum(tf.add_n(own), 0.0)) for own in squares], 1)


def _repaired(weights, gram, quick, trusted):
    """`quick`, computed again from larger numbers at the time steps where the squares are too small for float32."""
    places = tf.where(~trusted)[:, 0]
    again: dict = {}

    def larger(tensor):
        if isinstance(tensor, tuple) or not any(tensor is delta for own in weights for _, delta in own):
            return tf.gather(gram(tensor), places)
        if id(tensor) not in again:
            again[id(tensor)] = _gram(tf.gather(tensor, places), _LIFT)
        return again[id(tensor)]

    found = _norms(weights, larger) / _LIFT
    return tf.tensor_scatter_nd_update(quick, places[:, tf.newaxis], found)


def _gram(tensor, factor=None):
    """[time, batch, batch]: inner products of the examples. A pair (first, after) stands for the states before."""
    if isinstance(tensor, tuple):
        first, after = tensor
        return tf.concat([_gram(first[tf.newaxis]), _gram(after[:-1])], 0)
    tensor = tf.cast(tensor, tf.float32)
    tensor = tensor if factor is None else tensor * factor
    return tf.matmul(tensor, tensor, transpose_b=True)


def whole(parts):
    """[time, *weight]: what the time steps add to a weight, from its list of (left, delta)."""
    if parts[0][0] is None:
        sums = [tf.reduce_sum(delta, 1) for _, delta in parts]
        return sums[0] if len(sums) == 1 else tf.stack(sums, 1)
    return tf.concat([tf.matmul(_whole(left), delta, transpose_a=True) for left, delta in parts], -1)


def _whole(tensor):
    if not isinstance(tensor, tuple):
        return tensor
    first, after = tensor
    return tf.concat([first[tf.newaxis], after[:-1]], 0)
