"""Combiners that replace the gradients of the losses: GradDrop, DBMTL and MomentumConFIG.

The trainer calls `rewrite` after it accumulated the gradients and before it measures them. It calls `remember` with
what `rewrite` kept, once the update is known to be finite. These combiners need gradients of weights: gradients of
features differ from batch to batch and cannot be averaged over time.
"""

import tensorflow as tf

from looptape.losses.combiners.by_gradient.direction import DirectionCombiner
from looptape.losses.combiners.by_gradient.inverse import config
from looptape.losses.combiners.numerics.gramian import directions
from looptape.losses.combiners.numerics.random import uniform
from looptape.losses.convention import require, whole

EPSILON = 1e-30  # added to a loss before its logarithm; the paper's 1e-8 would make losses below it count less


class GradDrop(DirectionCombiner):
    """Gradient sign dropout (Chen 2020): where losses disagree about the sign of an element, picks one at random.

    The probability of the positive sign is `(1 + sum g / sum |g|) / 2` for each element; gradients of the other sign
    are dropped there. All coefficients are 1. Cost: one backward pass per loss, no buffers. The draws depend only on
    `seed` and the update counter.

    Args:
        leak: Share of a dropped gradient to keep, in [0, 1): one number, or a dict by loss name (0 for missing names).
        seed: Seed of the draws.

    >>> combiner = GradDrop()
    >>> combiner.build(["error", "penalty"])
    >>> rewritten, _ = combiner.rewrite([[tf.constant([1.0, 2.0])], [tf.constant([3.0, -2.0])]], None, None)
    >>> sum(float(row[0][0]) for row in rewritten), abs(sum(float(row[0][1]) for row in rewritten))
    (4.0, 2.0)
    """

    name = "graddrop"
    rewrites = True

    def __init__(self, leak=0.0, seed=0, warmup_steps=0):
        super().__init__(warmup_steps=warmup_steps)
        shares = leak.values() if isinstance(leak, dict) else [leak]
        fine = all(0 <= share < 1 for share in shares)
        require(fine, f"`leak` is {leak}", "in [0, 1), one number or by loss", "The default is 0.")
        self.leak = dict(leak) if isinstance(leak, dict) else leak
        self.seed = whole("seed", seed, 0, "Any non-negative integer will do.")

    def create(self, count):
        super().create(count)
        unknown = [name for name in (self.leak if isinstance(self.leak, dict) else {}) if name not in self.names]
        require(not unknown, f"`leak` names {unknown}", f"among the losses {list(self.names)}", "Correct the names.")

    def propose(self, losses, present, measured):
        return tf.ones([len(self.names)])

    def rewrite(self, gradients, losses, present):
        by_name = self.leak if isinstance(self.leak, dict) else dict.fromkeys(self.names, self.leak)
        leaks = [float(by_name.get(name, 0.0)) for name in self.names]
        columns = []
        for index, column in enumerate(zip(*gradients, strict=True)):
            draw = uniform(self.seed * 1_000_003 + index, self.updates, column[0].shape)
            dropped = graddrop(tf.stack(column), tf.cast(draw, column[0].dtype), leaks)
            if self.warmup_steps:
                dropped = tf.where(self.updates < self.warmup_steps, tf.stack(column), dropped)
            columns.append(tf.unstack(dropped, num=len(gradients)))
        return [list(row) for row in zip(*columns, strict=True)], ()


def graddrop(gradients, draw, leaks):
    """Returns [K, ...] gradients, 0 where their sign was not drawn. `draw` [...] is in (0, 1).

    >>> rows = tf.constant([[1.0, 2.0], [3.0, -2.0]])
    >>> graddrop(rows, tf.constant([0.5, 0.9]), [0.0, 0.0]).numpy()
    array([[ 1.,  0.],
           [ 3., -2.]], dtype=float32)
    """
    total, size = tf.reduce_sum(gradients, 0), tf.reduce_sum(tf.abs(gradients), 0)
    positive = 0.5 * (1.0 + tf.math.divide_no_nan(total, size)) > draw
    kept = tf.where(positive, gradients > 0, gradients < 0)
    shares = tf.reshape(tf.constant(leaks, gradients.dtype), [-1] + [1] * (gradients.shape.rank - 1))
    return tf.where(kept, gradients, shares * gradients)


class BufferedCombiner(DirectionCombiner):
    """Base class of combiners that average the gradients of each loss over time: one buffer per loss and variable."""

    rewrites = True

    def __init__(self, warmup_steps=0):
        super().__init__(warmup_steps=warmup_steps)
        self._shapes = None

    def create(self, count):
        super().create(count)
        self.add("counts", tf.zeros([count]))

    def build_buffers(self, gradients):
        """Creates buffers for K losses in the shapes of these gradients. Eager, or in a first trace."""
        shapes = [tuple(gradient.shape) for gradient in gradients]
        if self._shapes is None:
            self._shapes = shapes
            for index, gradient in enumerate(gradients):
                self.add(
                    f"buffer_{index}", tf.zeros([len(self.names), *gradient.shape], gradient.dtype), gradient.dtype
                )
        received = f"{type(self).__name__} averages gradients of shapes {self._shapes}, but now got {shapes}"
        advice = "Make a new trainer after you freeze or unfreeze layers."
        require(shapes == self._shapes, received, "given the same variables in every update", advice)

    @property
    def buffers(self):
        """[variables] of shape [K, ...]."""
        return [self._variables[f"buffer_{index}"] for index in range(len(self._shapes))]

    def remember(self, kept):
        buffers, counts = kept
        for variable, value in zip(self.buffers, buffers, strict=True):
            variable.assign(value)
        self.counts.assign(counts)

    def _waiting(self):
        return self.updates < self.warmup_steps


def columns_of(mask, like):
    """Reshapes a [K] tensor to the rank of `like`, [K, ...]."""
    return tf.reshape(mask, [-1] + [1] * (like.shape.rank - 1))


class DBMTL(BufferedCombiner):
    """Dual balancing (Lin 2023): averages gradients of the log losses over time and scales all to the longest.

    Losses must be above 0; their scale does not matter down to 1e-30. An absent loss adds nothing to that update, and
    its average does not change. Cost: one backward pass per loss, and one buffer of the size of the gradients per loss
    (none with `beta=0`).

    Args:
        beta: Share of the old average in the new one, in [0, 1).
        decay: At least 0; beta is divided by (updates so far)^decay.

    >>> combiner = DBMTL()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, tf.constant([[9.0, 0.0], [0.0, 1.0]])).numpy()
    array([1., 3.])
    """

    name = "db_mtl"
    requires_positive = True

    def __init__(self, beta=0.9, decay=0.5, warmup_steps=0):
        super().__init__(warmup_steps)
        require(0 <= beta < 1, f"`beta` is {beta}", "in [0, 1)", "The paper's is 0.9; use 0 for no average.")
        require(decay >= 0, f"`decay` is {decay}", "at least 0", "The paper's is 0.5; use 0 for a constant share.")
        self.beta = beta
        self.decay = decay

    def propose(self, losses, present, measured):
        norms, _, alive, _ = directions(measured, present)
        return tf.where(alive, 1.0 / norms, tf.ones_like(norms))

    def build_buffers(self, gradients):
        if self.beta:
            super().build_buffers(gradients)

    def rewrite(self, gradients, losses, present):
        present = self._mask(present)
        inverse = 1.0 / (tf.maximum(self._clean(losses, present), 0.0) + EPSILON)
        moving = self.moving(present)
        earlier = tf.maximum(self.counts, 1.0)
        share = tf.where(self.counts > 0, self.beta * tf.pow(earlier, -float(self.decay)), 0.0)
        columns, buffers = [], []
        for index, column in enumerate(zip(*gradients, strict=True)):
            own = tf.stack(column)
            logs = own * tf.cast(columns_of(inverse, own), own.dtype)
            if self.beta:
                old = tf.convert_to_tensor(self.buffers[index])
                logs += tf.cast(columns_of(share, own), own.dtype) * (old - logs)
                buffers.append(tf.where(columns_of(moving, own), logs, old))
            logs = tf.where(columns_of(present, own), logs, tf.zeros_like(logs))
            columns.append(tf.unstack(tf.where(self._waiting(), own, logs), num=len(self.names)))
        kept = (buffers, tf.where(moving, self.counts + 1.0, self.counts)) if self.beta else ()
        return [list(row) for row in zip(*columns, strict=True)], kept


class MomentumConFIG(BufferedCombiner):
    """ConFIG with momentum (Liu 2024, M-ConFIG): differentiates one loss per update, and applies ConFIG to all momenta.

    Cost: one backward pass per update for any number of losses, and one buffer of the size of the gradients per loss.
    The update already has momentum, so use an optimizer without it, such as SGD, or Adam with `beta_1=0`. A loss that
    is absent in its turn keeps its momentum. While frozen, updates are plain sums.

    Args:
        beta: Decay of the momenta, in [0, 1).

    >>> combiner = MomentumConFIG()
    >>> combiner.build(["error", "penalty"])
    >>> combiner.coefficients(None, None, None).numpy()
    array([1., 0.], dtype=float32)
    """

    name = "momentum_config"
    needs = "weights"  # of the losses that are differentiated; those of the momenta need the gradient
    in_turns = True

    def __init__(self, beta=0.9, warmup_steps=0):
        super().__init__(warmup_steps)
        require(0 <= beta < 1, f"`beta` is {beta}", "in [0, 1)", "The paper's is 0.9.")
        self.beta = beta

    def propose(self, losses, present, measured):
        return self._turn()

    def coefficients(self, losses, present, measured):
        """Returns [K]: 1 for the loss that this update differentiates, 0 for the others."""
        ones = tf.ones([len(self.names)])
        return tf.where(self._waiting() | self.frozen, ones, self._turn())

    def mixture(self, measured, wanted):
        """Returns the [K] coefficients of the rewritten gradients, from their Gramian; 0 where `wanted` is False."""
        mixed = config(measured, wanted)
        mixed = tf.where(wanted, mixed, tf.zeros_like(mixed))
        return tf.where(self._waiting() | self.frozen, tf.ones_like(mixed), mixed)

    def rewrite(self, gradients, losses, present):
        """Returns K rows of momenta. The update has one row: the gradient of the loss whose turn it is."""
        turn = tf.cast(self._turn(), tf.bool) & self.moving(self._mask(present))
        counts = tf.where(turn, self.counts + 1.0, self.counts)
        corrections = tf.math.divide_no_nan(1.0, 1.0 - tf.pow(tf.constant(float(self.beta)), counts))
        first = tf.one_hot(0, len(self.names))
        plain = self._waiting() | self.frozen
        columns, buffers = [], []
        for variable, gradient in zip(self.buffers, gradients[0], strict=True):
            old = tf.convert_to_tensor(variable)
            new = tf.where(columns_of(turn, old), self.beta * old + (1.0 - self.beta) * gradient[None], old)
            buffers.append(new)
            momenta = new * tf.cast(columns_of(tf.where(counts > 0, corrections, 0.0), new), new.dtype)
            alone = tf.cast(columns_of(first, old), old.dtype) * gradient[None]
            columns.append(tf.unstack(tf.where(plain, alone, momenta), num=len(self.names)))
        return [list(row) for row in zip(*columns, strict=True)], (buffers, counts)

    @property
    def gradients_every(self):
        return 0

    def _turn(self):
        return tf.one_hot(self.updates % len(self.names), len(self.names))
