"""Gradient noise scale (McCandlish et al. 2018): is the batch too small, and for which loss?

An update is the mean over m parts (micro-batches, replicas) of n_i examples each, N in all. With gᵢ the mean gradient
of part i, G = Σ nᵢ gᵢ / N, the true gradient Γ and the covariance Σ of one example's gradient:

    E ‖gᵢ‖² = ‖Γ‖² + tr Σ / nᵢ        E ‖G‖² = ‖Γ‖² + tr Σ / N

    S = (Σᵢ nᵢ ‖gᵢ‖² − N ‖G‖²) / (m − 1)      is unbiased for tr Σ,
    Q = ‖G‖² − S / N                          is unbiased for ‖Γ‖²,

also for parts of different sizes. S and Q are averaged over health rows, each with the same decay; their ratio is the
noise scale in examples. The ratio itself is not averaged: the mean of a ratio is not the ratio of the means.
"""

from typing import Any, NamedTuple

import tensorflow as tf

DECAY = 0.9  # per health row, of the averages of S and Q


class Parts(NamedTuple):
    """Contributions of one micro-batch. All are summed over micro-batches and replicas."""

    count: Any  # parts with examples
    products: Any  # [groups, groups]: ⟨h_k, h_l⟩ / n of the summed gradients of each group
    losses: Any  # [losses]: ‖h‖² / n of each loss, where it is not a group by itself; else ()


def part(groups, examples, loss_gradients=()):
    """`Parts` of one micro-batch. Traced.

    Args:
        groups: [groups][variables], dense gradients of Σ w·l.
        examples: their number n.
        loss_gradients: [losses][variables], where they were taken as well.
    """
    rows = [[tf.reshape(tf.cast(g, tf.float32), [-1]) for g in group] for group in groups]
    products = [[_inner(a, b) if k <= j else None for j, b in enumerate(rows)] for k, a in enumerate(rows)]
    full = tf.stack([tf.stack([products[min(k, j)][max(k, j)] for j in range(len(rows))]) for k in range(len(rows))])
    losses = tf.stack([_square(gradients) for gradients in loss_gradients]) if loss_gradients else ()
    divided = tf.nest.map_structure(lambda x: tf.math.divide_no_nan(x, examples), (full, losses))
    return Parts(tf.cast(examples > 0, tf.float32), *divided)


def conclude(parts, factors, gradients, groups, examples, loss_gradients=()):
    """Values of one update for the host: {"parts", "examples", "scatter" [1 + K], "square" [1 + K]}. Traced.

    The first entry is the whole update, the others are the losses, where their gradients are known.

    Args:
        parts: `Parts` of the whole update.
        factors: [groups], what the summed gradients were multiplied by to be the update.
        gradients: of the update.
        groups: [groups][variables], summed gradients; each is a loss if there are no `loss_gradients`.
        examples: N of the whole update.
        loss_gradients: [losses][variables], summed.
    """
    weighted = factors * tf.linalg.matvec(parts.products, factors)
    scatter, square = [examples**2 * tf.reduce_sum(weighted)], [_square(gradients)]
    # The scale of a loss cancels in its ratio: sums stand for means.
    if loss_gradients:
        each = zip(tf.unstack(parts.losses), loss_gradients, strict=True)
    else:
        each = zip(tf.unstack(tf.linalg.diag_part(parts.products)), groups, strict=True) if len(groups) > 1 else ()
    for products, own in each:
        scatter.append(products * examples**2)
        square.append(_square(own))
    return {
        "parts": parts.count,
        "examples": tf.cast(examples, tf.float32),
        "scatter": tf.stack(scatter),
        "square": tf.stack(square),
    }


def _square(gradients):
    return _inner(*[[tf.reshape(tf.cast(tf.convert_to_tensor(g), tf.float32), [-1]) for g in gradients]] * 2)


def _inner(first, second):
    return tf.add_n([tf.tensordot(a, b, 1) for a, b in zip(first, second, strict=True)])


def estimate(parts, examples, scatter, square):
    """(S, Q): unbiased estimates of tr Σ and ‖Γ‖² from one update of at least two parts."""
    spread = (scatter - examples * square) / (parts - 1)
    return spread, square - spread / examples


class Averages:
    """Smoothed S and Q of the whole update and of each loss. On the host."""

    def __init__(self):
        self._sums = {}  # {name: [weight, S, Q, rows]}

    def add(self, name, spread, square):
        weight, known_spread, known_square, rows = self._sums.get(name, (0.0, 0.0, 0.0, 0))
        self._sums[name] = [
            DECAY * weight + 1 - DECAY,
            DECAY * known_spread + (1 - DECAY) * float(spread),
            DECAY * known_square + (1 - DECAY) * float(square),
            rows + 1,
        ]

    def scales(self):
        """{name: noise scale in examples}; "" is the whole update. Inf where no gradient stands out of the noise."""
        found = {}
        for name, (weight, spread, square, _) in self._sums.items():
            if weight > 0:
                found[name] = spread / square if square > 0 else float("inf")
        return found

    def rows(self, name=""):
        """How many updates an average is made of."""
        return self._sums.get(name, (0, 0, 0, 0))[3]

    def state(self):
        return {name: list(values) for name, values in self._sums.items()}

    def restore(self, state):
        self._sums = {name: list(values) for name, values in state.items()}
