"""Combiners that periodically measure the size of the per-loss gradients: GradNorm, GradientBalance, NTKBalance."""

import tensorflow as tf

from looptape.losses.combiners.base import Combiner, normalized, single
from looptape.losses.combiners.by_value.adam import Learned
from looptape.losses.combiners.by_value.history import safe_ratio
from looptape.losses.combiners.numerics.gramian import dense
from looptape.losses.convention import require

SMALLEST = 1e-3  # weight of GradNorm, so that a loss can come back
STATISTICS = ("max_mean", "mean_mean", "norm")


class StatisticsCombiner(Combiner):
    """Measures gradients every `update_every` updates and sets the weights of the updates that follow.

    A subclass implements `balanced`: new weights from the old ones and the measurement. The guards `normalize`,
    `moving_average` (with the weights of the last measurement) and `clip` apply to its result.
    """

    @property
    def gradients_every(self):
        return self.update_every

    def create(self, count):
        self.add("balance", tf.ones([count]))

    def propose(self, losses, present, measured):
        return self.balance

    def balanced(self, losses, moving, measured):
        """Returns the new [K] weights. Entries where `moving` is False are ignored."""
        raise NotImplementedError

    def learn(self, losses, present, measured):
        if measured is None:
            return
        moving = self.moving(present) & self.due()
        weights = self._bound(self.balanced(losses, moving, measured), moving, self.balance)
        self.balance.assign(tf.where(moving, weights, self.balance))

    def _guard(self, proposed, present):
        return self._after_warmup(tf.where(self.frozen, self.weights, proposed))


class GradNorm(Learned, StatisticsCombiner):
    """GradNorm (Chen 2018): balances weighted gradient norms, and gives larger ones to losses that train slowly.

    A separate Adam minimises `sum |w_i n_i - mean(w n) r_i^alpha|` over the weights, with a closed-form gradient; then
    the weights are rescaled to sum to K. n_i are the norms of the (statically weighted) gradients of the shared
    variables. r_i are the losses relative to their first values, divided by the mean of these ratios.

    In the published method, Adam sees the norms themselves and remembers them for a thousand measurements. Once the
    norms have shrunk by orders of magnitude, the weights hardly move: when norms fell from 1 to 1e-3 and swapped
    places, the published weights had moved by only 0.02 after 200 more measurements. So here Adam sees the norms
    divided by the largest of them. `relative=False` gives the published method.

    Args:
        alpha: Strength of the pull towards equal training rates; 0 for equal norms.
        learning_rate: Learning rate of the weights.
        relative: Whether to divide the norms by the largest one before Adam sees them.

    >>> combiner = GradNorm(learning_rate=0.1)
    >>> combiner.build(["error", "penalty"])
    >>> combiner.advance(tf.constant([1.0, 1.0]), None, tf.constant([[9.0, 0.0], [0.0, 1.0]]))
    >>> combiner.coefficients(None, None, None).numpy().round(4).tolist()
    [0.8999999761581421, 1.100000023841858]
    """

    name = "gradnorm"
    minimum_losses = 2

    def __init__(self, alpha=1.5, learning_rate=0.025, relative=True, **guards):
        super().__init__(**guards)
        require(alpha >= 0, f"`alpha` is {alpha}", "at least 0", "The paper uses 0.12 to 1.5.")
        require(learning_rate > 0, f"`learning_rate` is {learning_rate}", "above 0", "The paper's is 0.025.")
        self.alpha = alpha
        self.learning_rate = learning_rate
        self.relative = relative

    def create(self, count):
        super().create(count)
        self.create_adam(count)
        self.add("first_losses", tf.ones([count]))
        self.add("seen", tf.zeros([count], tf.bool), tf.bool)

    def learn(self, losses, present, measured):
        observed = self.observing(present)
        self.first_losses.assign(tf.where(observed & ~self.seen, losses, self.first_losses))
        self.seen.assign(self.seen | observed)
        super().learn(losses, present, measured)

    def balanced(self, losses, moving, measured):
        norms = gradient_norms(measured)
        ratios = safe_ratio(losses, self.first_losses, self.seen)
        _, _, gradient = gradnorm(self.balance, norms, ratios, self.alpha, moving)
        if self.relative:
            gradient = tf.math.divide_no_nan(gradient, tf.reduce_max(tf.where(moving, norms, 0.0)))
        weights = tf.maximum(self.balance + self.adam_step(gradient, moving), SMALLEST)
        # All weights sum to K: those that may not move keep their share of it.
        rest = tf.reduce_sum(tf.where(moving, self.balance, 0.0))
        count = tf.reduce_sum(tf.cast(moving, tf.float32))
        return normalized(weights, moving) * tf.math.divide_no_nan(rest, count)


def gradient_norms(matrix):
    """[K] float32 norms from a Gramian."""
    return tf.cast(tf.sqrt(tf.maximum(tf.linalg.diag_part(matrix), 0.0)), tf.float32)


def gradnorm(weights, norms, ratios, alpha, present):
    """Returns relative rates r, targets mean(w n) r^alpha, and d/dw of sum |w n - target| with constant targets.

    `ratios` are L / L(0). Means are over the present losses.

    >>> norms, ratios = tf.constant([3.0, 1.0]), tf.constant([0.5, 0.9])
    >>> rates, targets, gradient = gradnorm(tf.ones([2]), norms, ratios, 1.5, tf.ones([2], tf.bool))
    >>> rates.numpy().round(4), targets.numpy().round(4)
    (array([0.7143, 1.2857], dtype=float32), array([1.2074, 2.9157], dtype=float32))
    >>> gradient.numpy().tolist()
    [3.0, -1.0]
    """
    mask = tf.cast(present, tf.float32)
    share = tf.math.divide_no_nan(mask, tf.reduce_sum(mask))
    ratios = tf.maximum(ratios, 0.0)
    mean = tf.reduce_sum(share * ratios)
    rates = tf.where(mean > 0, ratios / tf.where(mean > 0, mean, 1.0), 1.0)
    weighted = weights * norms
    targets = tf.reduce_sum(share * weighted) * tf.pow(rates, alpha)
    return rates, targets, mask * tf.sign(weighted - targets) * norms


class GradientBalance(StatisticsCombiner):
    """Weights each loss by the inverse of a statistic of its gradient, measured periodically and averaged.

    - `"max_mean"` (Wang 2020): max|g_reference| / mean|w_i g_i| over the weight matrices. The current weight w_i is in
      the denominator, as in the authors' code; without it, as printed in the paper, the weights diverge. Its fixed
      point is the square root of max/mean.
    - `"mean_mean"`: mean|g_reference| / mean|g_i| over the weight matrices.
    - `"norm"`: mean of all norms / norm of g_i; with a `reference`, its norm / norm of g_i.

    The reference has the weight 1. Means are taken over all elements of all weight matrices; if no variable has two or
    more axes, over all variables. A loss without a gradient keeps its weight.

    Args:
        statistic: One of the three above.
        reference: Name of a loss. For the first two statistics the default is the first loss.

    >>> combiner = GradientBalance("norm", moving_average=0.0)
    >>> combiner.build(["error", "penalty"])
    >>> measured = combiner.measure([[tf.constant([3.0, 0.0])], [tf.constant([0.0, 1.0])]])
    >>> combiner.advance(tf.constant([1.0, 1.0]), None, measured)
    >>> combiner.coefficients(None, None, None).numpy().round(4).tolist()
    [0.666700005531311, 2.0]
    """

    name = "gradient_balance"
    minimum_losses = 2

    def __init__(
        self,
        statistic="max_mean",
        reference=None,
        *,
        update_every=10,
        moving_average=0.9,
        clip=(1e-3, 1e3),
        **guards,
    ):
        super().__init__(update_every=update_every, moving_average=moving_average, clip=clip, **guards)
        require(
            statistic in STATISTICS,
            f"`statistic` is {statistic!r}",
            f"one of {list(STATISTICS)}",
            "Choose one.",
        )
        self.statistic = statistic
        self.reference = reference

    def create(self, count):
        super().create(count)
        known = self.reference is None or self.reference in self.names
        require(
            known,
            f"`reference` is {self.reference!r}",
            f"one of the losses {list(self.names)}",
            "Correct the name.",
        )

    def measure(self, gradients):
        """Returns [3, K] float64: max and mean absolute value over the weight matrices, and norm over all variables."""
        return tf.stack([gradient_statistics(row) for row in gradients], axis=1)

    def balanced(self, losses, moving, measured):
        numerator = measured[STATISTIC_ROW[self.statistic][0]]
        denominator = measured[STATISTIC_ROW[self.statistic][1]]
        if self.statistic == "max_mean":
            denominator *= tf.cast(self.balance, denominator.dtype)
        live = moving & (denominator > 0)
        reference = self._reference()
        weights = gradient_balance(numerator, denominator, live, reference)
        if reference is not None:
            live &= live[reference]  # without it there is nothing to compare with
        return tf.where(live, weights, self.balance)

    def _reference(self):
        if self.reference is None:
            return None if self.statistic == "norm" else 0
        return self.names.index(self.reference)


STATISTIC_ROW = {"max_mean": (0, 1), "mean_mean": (1, 1), "norm": (2, 2)}


def gradient_balance(numerator, denominator, live, reference):
    """stat(reference) / stat(g_i) in float32 for the live losses, 1 for the reference itself.

    `reference` is an index, or None for the mean over the live losses.

    >>> stat = tf.constant([3.0, 1.0])
    >>> gradient_balance(stat, stat, tf.constant([True, True]), 0).numpy().tolist()
    [1.0, 3.0]
    """
    safe = tf.where(live, denominator, tf.ones_like(denominator))
    if reference is None:
        mask = tf.cast(live, numerator.dtype)
        own = tf.where(live, numerator, tf.zeros_like(numerator))
        return single(tf.math.divide_no_nan(tf.reduce_sum(own), tf.reduce_sum(mask)) / safe)
    own = tf.one_hot(reference, live.shape[0], on_value=True, off_value=False)
    return single(tf.where(own, tf.ones_like(safe), numerator[reference] / safe))


def gradient_statistics(row):
    """Returns [3] float64: max, mean and norm of one loss's gradients. Variables without one (None) do not count.

    Float64 holds the squares of all float32 numbers.
    """
    reached = [dense(g) for g in row if g is not None]
    if not reached:
        return tf.zeros([3], tf.float64)
    matrices = [g for g in reached if g.shape.rank >= 2] or reached
    largest = tf.cast(tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(g)) for g in matrices])), tf.float64)
    size = tf.add_n([tf.cast(tf.size(g), tf.float64) for g in matrices])
    mean = tf.add_n([tf.reduce_sum(tf.abs(tf.cast(g, tf.float64))) for g in matrices]) / size
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(tf.cast(g, tf.float64))) for g in reached]))
    return tf.stack([largest, mean, norm])


class NTKBalance(StatisticsCombiner):
    """Balances losses by the neural tangent kernel (Wang 2022): the faster a loss falls by itself, the less weight.

    The weights are sum_j t_j / t_i, where t_i is the trace of the kernel of loss i. For a squared error L, the gradient
    of the root of L gives the trace along the current residuals, `t = |grad L|^2 / (4 L)`, without per-example
    gradients (as in NVIDIA PhysicsNeMo, which takes its root). A loss that is 0 or has no gradient keeps its weight.

    >>> combiner = NTKBalance(moving_average=0.0)
    >>> combiner.build(["error", "penalty"])
    >>> combiner.advance(tf.constant([1.0, 1.0]), None, tf.constant([[3.0, 0.0], [0.0, 1.0]]))
    >>> combiner.coefficients(None, None, None).numpy().round(4).tolist()
    [1.333299994468689, 4.0]
    """

    name = "ntk_balance"
    minimum_losses = 2
    weighs_losses = True

    def __init__(self, *, update_every=10, moving_average=0.9, clip=(1e-3, 1e3), **guards):
        super().__init__(update_every=update_every, moving_average=moving_average, clip=clip, **guards)

    def balanced(self, losses, moving, measured):
        weights, live = ntk_balance(tf.linalg.diag_part(measured), losses, moving)
        return tf.where(live, weights, self.balance)


def ntk_balance(squares, losses, present):
    """sum_j t_j / t_i with t = |g|^2 / (4 L) over the losses that have both, and which these are.

    >>> weights, _ = ntk_balance(tf.constant([3.0, 1.0]), tf.constant([1.0, 1.0]), tf.constant([True, True]))
    >>> weights.numpy().round(4)
    array([1.3333, 4.    ], dtype=float32)
    """
    squares, losses = tf.cast(squares, tf.float64), tf.cast(losses, tf.float64)
    live = present & (squares > 0) & (losses > 0)
    traces = squares / tf.where(live, 4.0 * losses, 1.0)
    total = tf.reduce_sum(tf.where(live, traces, 0.0))
    return single(tf.where(live, total / tf.where(live, traces, 1.0), 1.0)), live
