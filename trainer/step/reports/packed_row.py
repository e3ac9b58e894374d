"""The numbers of one update of one minimizer, packed into one vector: its layout, how it is written and read."""

import numpy as np
import tensorflow as tf


def pack(result, total, norm, coefficients):
    """The vector that `Entry` describes. Traced or eager.

    Args:
        result: the `MicroResult` of the whole update.
        total: what was optimised.
        norm: of the gradient, before clipping.
        coefficients: [K] by the combiner, or None.
    """
    row = [*result.sums, *result.divisors, *result.logged, result.examples, total * result.examples, norm]
    return tf.stack(row if coefficients is None else row + tf.unstack(coefficients))


def pack_logged(values, examples):
    """The vector of an `Entry` that has no losses: means that a hook logged. Traced or eager.

    Args:
        values: tensors, one for each name in `Entry.logged`.
        examples: number of examples that they are about.
    """
    sums = [tf.cast(tf.reduce_mean(value), tf.float32) * examples for value in values]
    return tf.stack([*sums, examples, tf.zeros([]), tf.zeros([])])


class Entry:
    """The place of one minimizer's numbers in the vector.

    [sums K, divisors K, logged M, examples, total · examples, gradient norm, coefficients K if the combiner has any]
    """

    def __init__(self, minimizer, names, logged, adaptive=False):
        self.minimizer = minimizer
        self.names = list(names)
        self.logged = list(logged)
        self._adaptive = adaptive
        self.length = (3 if adaptive else 2) * len(self.names) + len(self.logged) + 3

    def layout(self):
        return (self.names, self.logged, self._adaptive)

    def read(self, row, updates):
        """Means of a row of sums over some updates: {"loss": {name: value}, "logged", "total", "norm", "coefficient"}.

        Losses without a valid element are left out; if all are, the total is NaN: nothing was measured.
        """
        count, extra = len(self.names), 2 * len(self.names) + len(self.logged)
        sums, divisors, logged = row[:count], row[count : 2 * count], row[2 * count : extra]
        examples, total, norm = row[extra : extra + 3]
        coefficients = row[extra + 3 :] / updates if self._adaptive else np.ones(count)
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "loss": {n: float(s / d) for n, s, d in zip(self.names, sums, divisors, strict=True) if d != 0},
                "logged": {n: float(x / examples) for n, x in zip(self.logged, logged, strict=True)},
                "total": float(total / examples) if not count or np.any(divisors) else float("nan"),
                "norm": float(norm / updates),
                "coefficient": dict(zip(self.names, coefficients.tolist(), strict=True)),
            }

    @property
    def examples_at(self):
        """Where the number of examples stands."""
        return 2 * len(self.names) + len(self.logged)

    def examples(self, row):
        return float(row[self.examples_at])
