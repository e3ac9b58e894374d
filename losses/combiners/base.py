"""Base class of all combiners: the interface that the trainer calls, the guards, and the state.

A combiner turns K named losses into K coefficients. The gradient of the update is always the sum over the losses
of static weight x coefficient x gradient. The trainer decides how to compute the gradients.
"""

import inspect
from collections.abc import Sequence

import tensorflow as tf

from looptape.losses.combiners.numerics.gramian import gramian
from looptape.losses.convention import require, whole

LARGEST = 1e38  # of a coefficient


class Combiner:
    """Base class of combiners: computes coefficients for K named losses from state, loss values or gradients.

    The trainer makes these calls in one update, in this order. All but `build` may be traced, even under XLA:

        combiner.build(names)                                  # once, eager, in the strategy's scope
        measured = combiner.measure(gradients)                 # if `gradients_every` is 1, or `due()` says so
        c = combiner.coefficients(losses, present, measured)   # pure: reads state, writes none
        total = combiner.total(losses, c)                      # the number to log
        combiner.allows(losses, present)                       # if `requires_positive`: False stops the run
        combiner.advance(losses, present, measured, c)         # once per update, after the finite check
        combiner.advance_after(before, after, present)         # only if `needs_losses_after`

    A subclass implements `propose` (its rule). If it has state, it also implements `create` (its variables) and
    `learn` (how they change). The guards then modify the proposal, in this order: `normalize` scales it so that the
    weights of the present losses sum to their number; `moving_average` averages it with the weights last used; `clip`
    bounds it; `update_every` keeps it for several updates; and `warmup_steps` sets the coefficients to 1 at first.
    During the warm-up, learned weights do not move, but losses are already recorded. `freeze()` holds the weights last
    used, and all state except the update counter, until `unfreeze()`.

    An absent loss (`present[k]` is False: no valid element in this update, or a static weight of 0) keeps its state. If
    the coefficients need losses or gradients, it keeps its last weight, and the others are weighted as if it did not
    exist.
    Coefficients that come from state alone do not depend on which losses are absent.

    Args:
        update_every: Number of updates between new weights.
        warmup_steps: Number of updates with all coefficients 1 before the method starts.
        moving_average: Share of the old weights in the new ones, in [0, 1); 0 for none.
        clip: `(low, high)` bounds of each coefficient, or None.
        normalize: Whether to scale the coefficients to sum to the number of present losses.
    """

    name = ""
    needs = "weights"  # to know the coefficients: state alone, or this update's "losses", or its "gradients"
    minimum_losses = 1
    needs_losses_after = False
    rewrites = False  # other gradients take the place of the losses' own, see `by_gradient.rewriting`
    in_turns = False  # each update differentiates one loss; `rewrite` makes K gradients of it, `mixture` weights them
    weighs_losses = False  # its `losses` are the statically weighted ones, as the gradients always are
    requires_positive = False  # losses that are not above zero are refused
    precision = tf.float32  # of the coefficients
    positive_because = "takes logarithms of the losses"
    # Made by `build`.
    weights: tf.Variable
    updates: tf.Variable
    frozen: tf.Variable

    def __init__(self, *, update_every=1, warmup_steps=0, moving_average=0.0, clip=None, normalize=False):
        average = f"`moving_average` is {moving_average}"
        require(0 <= moving_average < 1, average, "in [0, 1)", "Use 0 for no average.")
        ordered = clip is None or (len(clip) == 2 and 0 <= clip[0] < clip[1])
        require(ordered, f"`clip` is {clip}", "(low, high) with 0 <= low < high", "Use None for no bounds.")
        self.update_every = whole("update_every", update_every, 1, "Use 1 for each update.")
        self.warmup_steps = whole("warmup_steps", warmup_steps, 0, "Use 0 for no warm-up.")
        self.moving_average = moving_average
        self.clip = None if clip is None else (float(clip[0]), float(clip[1]))
        self.normalize = normalize
        self.names = None
        self._variables = {}

    # What the trainer calls.

    @property
    def gradients_every(self):
        """The number of updates between measurements of the per-loss gradients: 0 for never, 1 for every update."""
        return 1 if self.needs == "gradients" else 0

    @property
    def variables(self):
        """All state variables in a fixed order, as a checkpoint saves them."""
        return list(self._variables.values())

    def build(self, names: Sequence[str]) -> None:
        """Creates the variables for these losses, unless they exist. Eager, or in a first trace."""
        names, kind = tuple(names), type(self).__name__
        if self.names is not None:
            received = f"This {kind} was built for the losses {list(self.names)}, not {list(names)}"
            advice = "Make a new combiner for each trainer."
            require(names == self.names, received, "used with one set of losses", advice)
            return
        received = f"{kind} was given {len(names)} loss(es), {list(names)}"
        enough = len(names) >= self.minimum_losses
        single = [cls.__name__ for cls in self.exported() if cls.minimum_losses == 1]
        advice = f"For one loss use one of {', '.join(single)}."
        require(enough, received, f"given at least {self.minimum_losses}", advice)
        unique = len(set(names)) == len(names)
        require(unique, f"The loss names are {list(names)}", "unique", "Rename the repeated ones.")
        self.names = names
        try:
            self._build_state()
        except ValueError:  # an argument that does not fit the names: not built
            self.names = None
            self._variables.clear()
            raise

    def measure(self, gradients):
        """Returns the [K, K] float64 Gramian of K lists of gradients (dense, `tf.IndexedSlices` or None). Pure."""
        return gramian(gradients)

    def due(self):
        """Returns a bool tensor: whether `advance` needs `measured` in this update."""
        if self.gradients_every <= 1:
            return tf.constant(self.gradients_every == 1)
        return tf.equal(self.updates % self.gradients_every, 0)

    def coefficients(self, losses, present, measured):
        """Returns the [K] coefficients of this update, in the class's `precision`. Reads state and writes none.

        `losses` are the [K] values, statically weighted if `weighs_losses` (None is allowed if `needs` is "weights").
        `present` is [K] bool, or None for all. `measured` is the result of `measure` on the statically weighted
        gradients, or None.
        """
        present = self._mask(present)
        return self._weights_now(self._clean(losses, present), present, measured)

    def total(self, losses, coefficients, static=None, present=None):
        """Returns the optimised scalar, for the log. `static` are the [K] static weights, or None."""
        losses = self._clean(losses, self._mask(present))
        return tf.reduce_sum(self._static(static, present) * tf.cast(coefficients, tf.float32) * losses)

    def advance(self, losses, present, measured, used=None) -> None:
        """Advances the state by one update. Arguments as for `coefficients`, the same on every replica.

        `used` are the coefficients of this update; None recomputes them.
        """
        present = self._mask(present)
        losses = self._clean(losses, present)
        used = self._weights_now(losses, present, measured) if used is None else used
        self.learn(losses, present, measured)
        self.weights.assign(tf.where(present, tf.cast(used, tf.float32), self.weights))
        self.updates.assign_add(1)

    def advance_after(self, losses_before, losses_after, present) -> None:
        """Advances the state from the losses before and after the update, on the same data. For FAMO only."""
        raise NotImplementedError(f"{type(self).__name__} does not use the losses after the update.")

    def build_buffers(self, gradients) -> None:
        """Creates the state that has the shapes of one loss's gradients. Called only if `rewrites`."""
        return

    def rewrite(self, gradients, losses, present):
        """Returns K lists of gradients that replace the losses' own, and the argument of `remember`.

        Pure; called only if `rewrites`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not rewrite gradients.")

    def remember(self, kept) -> None:
        """Stores what `rewrite` kept, after the finite check. Called only if `rewrites` and something was kept."""
        return

    def allows(self, losses, present):
        """Returns a bool tensor: whether all present losses are allowed. Traced.

        NaN is allowed here; the finite check handles it.
        """
        heights = self.above(tf.cast(losses, tf.float32))
        # Not `~(heights <= 0)`: TensorFlow's graph optimizer makes `heights > 0` of it, which NaN is not.
        taken = (heights > 0) | tf.math.is_nan(heights) | ~present
        return tf.reduce_all(taken) | (not self.requires_positive)

    def above(self, losses):
        """Returns the [K] arguments of the logarithms: the losses, or their distance from their lower bounds."""
        return losses

    def validate(self, losses, present=None) -> None:
        """Raises an error that names the losses whose values are not allowed. Eager.

        `losses` are K numbers, None where absent.
        """
        present = [True] * len(self.names) if present is None else present
        known = tf.constant([float(v) if p else 1.0 for v, p in zip(losses, present, strict=True)])
        if bool(self.allows(known, tf.constant(present))):
            return
        heights = zip(self.names, known.numpy().tolist(), self.above(known).numpy(), present, strict=True)
        bad = {name: value for name, value, height, there in heights if there and height <= 0}
        kinds = [cls.__name__ for cls in self.exported() if not cls.requires_positive]
        received = f"{type(self).__name__} {self.positive_because}, but got {bad}"
        advice = f"Shift or square these losses, or choose a combiner without logarithms: {', '.join(kinds)}."
        require(False, received, f"given losses above {self.bound()}", advice)

    def bound(self):
        """Returns the lower bound of the losses in words."""
        return "zero"

    @staticmethod
    def exported():
        """Returns all combiner classes, for errors that list the choices."""
        from looptape.losses.combiners.names import exported  # it imports the package

        return exported()

    def freeze(self) -> None:
        """Keeps the weights last used, starting with the next update. Eager or traced; does not retrace."""
        self.frozen.assign(True)

    def unfreeze(self) -> None:
        """Lets the weights change again."""
        self.frozen.assign(False)

    def get_config(self):
        """The constructor's arguments, as a plain dict."""
        return {name: getattr(self, name) for name in self.arguments()}

    @classmethod
    def from_config(cls, config):
        """A new, unbuilt combiner from `get_config`'s dict."""
        return cls(**config)

    @classmethod
    def arguments(cls):
        """Returns the names of all constructor arguments, including those of the guards."""
        names = []
        for owner in cls.__mro__:
            if "__init__" in vars(owner):
                parameters = list(inspect.signature(owner.__init__).parameters.values())[1:]
                names += [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
                if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                    break
        return list(dict.fromkeys(names))

    # What a subclass implements.

    def propose(self, losses, present, measured):
        """Returns the method's [K] weights before the guards. Pure; `losses` is 1 where absent."""
        raise NotImplementedError

    def create(self, count) -> None:
        """Creates the method's own variables with `self.add`."""
        return

    def learn(self, losses, present, measured) -> None:
        """Assigns the method's own variables. `moving` and `observing` return which may change."""
        return

    # Helpers.

    def add(self, name, value, dtype=tf.float32):
        """Creates one state variable, equal on all replicas, as the attribute `name`."""
        same = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self._variables[name] = tf.Variable(value, trainable=False, dtype=dtype, name=name, aggregation=same)
        setattr(self, name, self._variables[name])

    def moving(self, present):
        """Returns [K] bool: the losses whose learned weights may change now (present, not frozen, past the warm-up)."""
        past = self.updates >= self.warmup_steps if self.warmup_steps else True
        return present & past & ~self.frozen

    def observing(self, present):
        """Returns [K] bool: the losses whose values may be recorded now (present, not frozen)."""
        return present & ~self.frozen

    def _build_state(self):
        count = len(self.names)
        self.add("updates", 0, tf.int64)
        self.add("frozen", False, tf.bool)
        self.add("weights", tf.ones([count]))
        self.create(count)

    def _mask(self, present):
        return tf.ones([len(self.names)], tf.bool) if present is None else tf.convert_to_tensor(present)

    def _clean(self, losses, present):
        return None if losses is None else tf.where(present, tf.cast(losses, tf.float32), 1.0)

    def _static(self, static, present):
        static = tf.ones([len(self.names)]) if static is None else tf.cast(static, tf.float32)
        return static if present is None else tf.where(present, static, 0.0)

    def _weights_now(self, losses, present, measured):
        if self.needs == "weights":
            present = self._mask(None)
        return self._guard(tf.cast(bounded(self.propose(losses, present, measured)), self.precision), present)

    def _guard(self, proposed, present):
        old = tf.cast(self.weights, proposed.dtype)
        weights = self._bound(proposed, present, old)
        held = self.frozen | ~present
        if self.update_every > 1:
            held |= tf.not_equal(self.updates % self.update_every, 0)
        return self._after_warmup(tf.where(held, old, weights))

    def _after_warmup(self, weights):
        if not self.warmup_steps:
            return weights
        return tf.where(self.updates < self.warmup_steps, tf.ones_like(weights), weights)

    def _scaled(self, weights, present):
        return normalized(weights, present) if self.normalize else weights

    def _bound(self, weights, present, old):
        weights = self._scaled(weights, present)
        if self.moving_average:
            weights = self.moving_average * old + (1.0 - self.moving_average) * weights
        return weights if self.clip is None else tf.clip_by_value(weights, *self.clip)


def bounded(weights):
    """Clips weights of other types to the range of float32."""
    return weights if weights.dtype == tf.float32 else tf.clip_by_value(weights, -LARGEST, LARGEST)


def single(weights):
    """Casts weights to float32, clipped to its range."""
    return tf.cast(bounded(weights), tf.float32)


def normalized(weights, present):
    """Scales the present weights to sum to their number; all zero stays zero.

    >>> normalized(tf.constant([1.0, 3.0, 9.0]), tf.constant([True, True, False])).numpy().tolist()
    [0.5, 1.5, 4.5]
    """
    share = tf.where(present, weights, 0.0)
    count = tf.reduce_sum(tf.cast(present, tf.float32))
    return weights * tf.math.divide_no_nan(count, tf.reduce_sum(share))
