"""One micro-batch: forward, named losses, one backward pass. A pure function of the batch and the state."""

import contextlib
import warnings
from typing import Any, NamedTuple

import tensorflow as tf

from trainer import batches, diagnosis, objective, probed, sharing, stages
from trainer.state import ForwardScope, SeveralGroups, StateDiscovered, creating_variables, is_seed, raw

# Folded into the first half of a dropout seed so that replicas draw different masks; any odd constant will do.
_REPLICA_SEED = 0x9E3779B1


class MicroResult(NamedTuple):
    """What a micro-batch adds to the update. The first six are sums over micro-batches."""

    gradients: Any  # [groups][variables]
    sums: Any  # K scalars
    divisors: Any  # K scalars
    examples: Any  # scalar
    logged: Any  # M scalars: value · examples of each `log` call
    products: Any  # [K, K] of the shared features' gradients, where they are summed up; else ()
    total: Any  # what was differentiated, where that is the whole update; else ()
    coefficients: Any  # [K] from the combiner, or ()
    measured: Any  # by the combiner, where that is the whole update; else ()
    state: Any  # new values of `moved`
    report: Any  # `trainer.probed.Report` of a probed update, else ()


class MicroStep:
    """Computes losses and gradients of one micro-batch.

    `names`, `logged`, `groups`, `moved` and `live` describe the result; they are known after the first trace.

    Args:
        compute_losses: the hook, `(batch, training) -> {name: loss}`.
        owner: the trainer (its model's losses, its `log` calls).
        variables: function that lists the trainable variables.
        weights: `LossWeights`.
        combiner: a built or unbuilt combiner.
        fold: divide by the divisors before the backward pass: one micro-batch on one device is the whole update.
        per_loss: a gradient for each loss by itself.
        densify: turn sparse gradients into dense ones, so that they can be summed.
        probing: report the gradients of every time step, and those of each loss.
        cut: this is the whole update: if features are shared, one backward pass through what made them will do.
    """

    def __init__(
        self,
        compute_losses,
        owner,
        variables,
        weights,
        combiner,
        *,
        fold,
        per_loss,
        densify,
        probing=False,
        cut=False,
    ):
        self._compute_losses = compute_losses
        self._owner = owner
        self._variables = variables
        self._weights = weights
        self._combiner = combiner
        self.fold, self.per_loss, self._densify, self._probing, self._cut = fold, per_loss, densify, probing, cut
        self.shapes = {}  # of `probe` calls in nested loops
        self.backward = set()  # probed layers that read their sequence from its end
        # A persistent tape keeps more of a recurrent loop than one gradient needs: a fifth of an LSTM's time.
        self.persistent = per_loss
        self.names = self.logged = self.groups = self.ratios = self.moved = self.live = None
        self.planned = False  # see `plan`
        self.featured = False  # the gradients are combined already, by one backward pass through shared features
        self.shared = None  # [bool] of the live variables: the combiner's coefficients are for these; None for all

    def __call__(self, batch, state_values, step, loss_scale, replica=None):
        """Traced or eager, in a replica context. `state_values` belong to `owner.forward_state.variables()`."""
        variables = self._variables()
        with tf.GradientTape(persistent=self.persistent, watch_accessed_variables=False) as tape:
            tape.watch([raw(variable) for variable in variables])
            session = probed.open_session(self._owner, batch, tape) if self._probing else None
            features = sharing.Features(tape, self._cut) if self.per_loss and self._combiner.gradients_every else None
            terms, logged, examples, scope = self._forward(batch, state_values, replica, session, features)
            if self._probing and len(terms) > 1:
                self._need_persistent()
            coefficients, targets = self._objectives(list(terms.values()), self._weights.at(step))
            total = targets[0] if self.fold else ()
            scale = 1.0 if loss_scale is None else loss_scale
            if loss_scale is not None:
                targets = [target * loss_scale for target in targets]
            probed_examples, divisors = self._averages(terms, examples, replica) if self._probing else (None, None)
            extra = self._probe_targets(terms, divisors, targets, scale) if self._probing else ()
        again = lambda: self._forward(batch, state_values, replica)[0]  # noqa: E731
        products = measured = report = ()
        self.featured = features is not None and self._cut and bool(features.shared)
        if self.featured:
            tape, found = sharing.CutTape(tape, features), None
            factors = sharing.Factors(terms.values(), self._weights.at(step), scale)
            gradients, coefficients, measured = self._cut_gradients(tape, targets, factors, variables, again)
        else:
            gradients, found, products = self._gradients(tape, targets, variables, session, features, scale, again)
        if self._probing:
            self.shapes, self.backward = dict(session.shapes), session.backward
            sources = [raw(variable) for variable in variables]
            divisor = None if self.per_loss or len(targets) > 1 or self.fold else self._group_divisor(divisors)
            alone = not self._owner.overrides("train_step")
            report = probed.measure(session, tape, sources, found, extra, probed_examples, divisor, scale, alone)
        return MicroResult(
            gradients,
            [term.sum for term in terms.values()],
            [term.divisor for term in terms.values()],
            examples,
            [value * examples for value in logged.values()],
            products,
            total,
            coefficients,
            measured,
            _unfold_replica(self.moved, [scope.get_current_value(v) for v in self.moved], replica),
            report,
        )

    def _averages(self, terms, examples, replica):
        """(examples, divisors of the losses) of this micro-batch; the averages of all replicas' shares of it.

        Shares with different masks have different divisors, but an example's gradient is that of the whole loss. XLA
        has no way to ask the other replicas: there, each share counts as a whole.
        """
        divisors = [term.divisor for term in terms.values()]
        if replica is None or self._owner.jit_compile:
            return examples, divisors
        averages = [x / self._owner.replicas for x in stages.all_reduce([examples, *divisors])]
        return averages[0], averages[1:]

    def _probe_targets(self, terms, divisors, targets, scale):
        """(the mean over this micro-batch, if no target is that; each loss, if there are several), to differentiate."""
        ordered = list(terms.values())
        mean = None
        if len(targets) > 1 or self.per_loss:
            weights = self._weights.at(self._owner.step.value())
            means = [safe_mean(term._replace(divisor=d)) for term, d in zip(ordered, divisors, strict=True)]
            mean = scale * tf.add_n([w * each for w, each in zip(weights, means, strict=True)])
        return mean, [scale * term.sum for term in ordered] if len(ordered) > 1 else []

    def _group_divisor(self, divisors):
        first = self.groups[0][0]
        return divisors[first] / self.ratios[first]

    def _need_persistent(self):
        if not self.persistent:
            self.persistent = True
            raise SeveralGroups

    def plan(self, batch):
        """Learns the names of the losses and makes the variables that go with them. Traced, outside replicas."""
        self._forward(batch, self._owner.read_state(), None)
        self.planned = True

    def losses_only(self, batch, state_values, replica=None):
        """([sums], [divisors]) of a micro-batch in training mode, with the state and the seeds given. Nothing moves.

        Of a micro-batch without examples they are zeros: means over no example are NaN.
        """
        terms, _, examples, _ = self._forward(batch, state_values, replica)
        found = [term.sum for term in terms.values()], [term.divisor for term in terms.values()]
        return tf.nest.map_structure(lambda x: tf.where(examples > 0, x, tf.zeros_like(x)), found)

    def _forward(self, batch, state_values, replica, session=None, features=None):
        state_variables = self._owner.forward_state.variables()
        regularized = [v for v in self._variables() if getattr(v, "regularizer", None) is not None]
        # Keras looks regularized variables up in the scope and finds nothing there unless they are mapped.
        scope = ForwardScope(
            [*regularized, *state_variables],
            [tf.convert_to_tensor(raw(variable)) for variable in regularized]
            + _fold_replica(state_variables, state_values, replica),
        )
        probing = contextlib.nullcontext() if session is None else session
        collecting = contextlib.nullcontext() if features is None else sharing.collecting(self._owner, features)
        with scope, self._owner.collecting_logs() as logged:
            with probing, collecting:
                losses = self._compute_losses(batch, True)
            model_losses = list(getattr(self._owner.model, "losses", ()))
        examples = batches.count_examples(batch)
        terms = objective.make_terms(_with_regularization(losses, model_losses), examples)
        self._describe(terms, logged, scope, state_variables)
        if features is not None:
            features.check(self._combiner)
        return terms, logged, examples, scope

    def _describe(self, terms, logged, scope, state_variables):
        known = {id(variable) for variable in state_variables}
        discovered = [variable for key, variable in scope.assigned.items() if key not in known]
        if discovered:
            raise StateDiscovered(discovered)
        self.names, self.logged = list(terms), list(logged)
        self.moved = [variable for variable in state_variables if id(variable) in scope.assigned]
        self.groups, self.ratios = objective.group_by_divisor(terms)
        if self.per_loss:
            self.groups = [[index] for index in range(len(terms))]
        elif self.fold:
            self.groups = [list(range(len(terms)))]
        if len(self.groups) > 1:
            self._need_persistent()
        self._weights.build(self.names)
        if self._combiner.names is None:
            with creating_variables(self._owner.strategy):
                self._combiner.build(self.names)
        self._combiner.build(self.names)  # complains if the names have changed

    def _objectives(self, terms, weights):
        """The scalars to differentiate, one per group, and the combiner's coefficients if they are known here."""
        if self.per_loss:
            return (), [term.sum for term in terms]
        coefficients = self._coefficients(terms)
        if not isinstance(coefficients, tuple):
            weights = [w * c for w, c in zip(weights, tf.unstack(tf.stop_gradient(coefficients)), strict=True)]
        if self.fold:
            parts = [[w * safe_mean(term) for w, term in zip(weights, terms, strict=True)]]
        else:
            parts = [[weights[i] * (terms[i].sum / self.ratios[i]) for i in group] for group in self.groups]
        return coefficients, [group[0] if len(group) == 1 else tf.add_n(group) for group in parts]

    def _coefficients(self, terms):
        """The combiner's coefficients [K], or () where they are all 1."""
        if is_plain_sum(self._combiner):
            return ()
        if self._combiner.needs == "weights":
            return self._combiner.coefficients(None, None, None)
        divisors = tf.stack([term.divisor for term in terms])
        means = tf.math.divide_no_nan(tf.stack([term.sum for term in terms]), divisors)
        return self._combiner.coefficients(tf.stop_gradient(means), divisors > 0, None)

    def _check_live(self, variables, forward):
        policy = self._owner.on_none_gradient
        if not variables:
            raise ValueError(
                "The model has no trainable variables. Set `trainable = True` on the layers to train, or build the "
                "model before training it."
            )
        dead = [variable for variable, live in zip(variables, self.live, strict=True) if not live]
        if not dead or policy == "ignore":
            return
        message = diagnosis.explain(dead, forward, policy)
        if policy == "error" or not any(self.live):
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=2)

    def _gradients(self, tape, targets, variables, session, features, scale, again):
        """([groups][variables] gradients, those of the session's sources if there is one group, inner products)."""
        sources = [raw(variable) for variable in variables]
        probes = [] if session is None or len(targets) > 1 else session.sources
        shared = [] if features is None else features.shared
        gradients = [tape.gradient(target, sources + probes + shared) for target in targets]
        found = gradients[0][len(sources) :] if probes else None
        products = ()
        if shared:
            rows = [stages.fill_missing(group[len(sources) + len(probes) :], shared) for group in gradients]
            products = sharing.products(rows, [1.0 / scale] * len(rows))
        gradients = [group[: len(sources)] for group in gradients]
        through = tape.gradient(shared, sources) if shared and self._owner.head_gradients == "own" else None
        self._describe_variables(variables, gradients, through, again)
        finished = []
        for group in gradients:
            kept = [(g, v) for g, v, live in zip(group, sources, self.live, strict=True) if live]
            kept = [(tf.zeros_like(v) if g is None else g, v) for g, v in kept]
            finished.append([stages.to_dense(g, v.shape) if self._densify else g for g, v in kept])
        return finished, found, products

    def _cut_gradients(self, tape, targets, factors, variables, again):
        """([1][variables] gradients of the whole update, coefficients, what the combiner measured)."""
        sources = [raw(variable) for variable in variables]
        features, heads = zip(*(tape.heads(target, sources) for target in targets), strict=True)
        measured = sharing.products(features, factors.unscaled_means)
        coefficients = self._combiner.coefficients(factors.losses, factors.present, measured)
        weighted = [factor * c for factor, c in zip(factors.means, tf.unstack(coefficients), strict=True)]
        trunk = tape.trunk([stages.weigh(column, weighted) for column in zip(*features, strict=True)], sources)
        self._describe_variables(variables, [*heads, trunk], trunk, again)
        own = self._owner.head_gradients == "own"
        gradients = []
        for through, *parts in zip(trunk, *heads, strict=True):
            by = factors.means if own and through is None else weighted
            reached = [(part, factor) for part, factor in zip(parts, by, strict=True) if part is not None]
            head = stages.weigh(*zip(*reached, strict=True)) if reached else None
            if head is not None or through is not None:
                gradients.append(stages.to_dense(sharing.add(head, through)))
        return [gradients], coefficients, measured

    def _describe_variables(self, variables, gradients, through, again):
        """Notes which variables some loss reaches, and which of them are shared."""
        self.live = [any(group[index] is not None for group in gradients) for index in range(len(variables))]
        if self.per_loss and self._combiner.gradients_every:
            mask = sharing.shared_mask(self._owner, variables)
            if mask is not None:
                sharing.check_reached(variables, mask, self.live)
            elif through is not None and self._owner.head_gradients == "own":
                mask = [gradient is not None for gradient in through]
            self.shared = mask and [shared for shared, live in zip(mask, self.live, strict=True) if live]
        self._check_live(variables, again)


def is_plain_sum(combiner):
    """Whether a combiner's coefficients are 1 for ever: then they need not be computed."""
    return combiner.needs == "weights" and not combiner.variables


def safe_mean(term):
    # A divisor that is a number of elements is never 0; one that is a sum of weights may be.
    if term.divisor_key[0] in ("examples", "one"):
        return term.sum / term.divisor
    return tf.math.divide_no_nan(term.sum, term.divisor)


def _with_regularization(losses, model_losses):
    if not model_losses or not isinstance(losses, dict):
        return losses
    if objective.REGULARIZATION in losses:
        raise ValueError(
            f"`compute_losses` returned a loss named {objective.REGULARIZATION!r}, and the model has losses of its own "
            "(regularizers or `add_loss`), which take that name. Rename yours."
        )
    total = tf.add_n([tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in model_losses])
    return {**losses, objective.REGULARIZATION: total}


def _fold_replica(variables, values, replica, sign=1):
    if replica is None:
        return list(values)
    offset = sign * tf.stack([tf.cast(replica, tf.int64) * _REPLICA_SEED, tf.zeros([], tf.int64)])
    return [x + tf.cast(offset, x.dtype) if is_seed(v) else x for v, x in zip(variables, values, strict=True)]


def _unfold_replica(variables, values, replica):
    return _fold_replica(variables, values, replica, sign=-1)


def forward_only(hook, owner, batch, session=None):
    """Losses of a batch without gradients: {name: Term}, logs, number of examples, and what moved with new values.

    Args:
        hook: `batch -> {name: loss}`.
        owner: the trainer.
        batch: of tensors.
        session: a `ProbeSession` to run the hook in, or None.
    """
    regularized = [
        v for v in getattr(owner.model, "trainable_variables", ()) if getattr(v, "regularizer", None) is not None
    ]
    mapped = [*regularized, *owner.forward_state.variables()]
    scope = ForwardScope(mapped, [owner.read(variable) for variable in mapped])
    with scope, owner.collecting_logs() as logged:
        with contextlib.nullcontext() if session is None else session:
            losses = hook(batch)
        model_losses = list(getattr(owner.model, "losses", ()))
    examples = batches.count_examples(batch)
    terms = objective.make_terms(_with_regularization(losses, model_losses), examples)
    moved = list(scope.assigned.values())
    return terms, logged, examples, moved, [scope.get_current_value(v) for v in moved]


def probed_terms(owner, batch, session):
    """{name: Term} of a batch in training mode, in a probe session. Nothing moves."""
    hook = owner.hook("compute_losses")
    return forward_only(lambda batch: hook(batch, True), owner, batch, session)[0]
