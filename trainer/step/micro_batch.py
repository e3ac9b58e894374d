"""One micro-batch: forward, named losses, one backward pass. A pure function of the batch and the state."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from looptape.losses import reduction
from looptape.trainer.data import batches
from looptape.trainer.distribution import replica_sums
from looptape.trainer.step.forward import loss_terms
from looptape.trainer.step.forward.forward_state import ForwardScope, SeveralGroups, StateDiscovered
from looptape.trainer.step.forward.loss_terms import safe_mean
from looptape.trainer.step.gradients import combination, missing_gradients, shared_features, stages
from looptape.trainer.step.plan import Backward, LossPlan, MicroResult, Plan
from looptape.trainer.step.reports import health_report, probe_report
from looptape.trainer.variables import creating_variables, is_seed, raw

# Folded into the first half of a dropout seed so that replicas draw different masks; any odd constant will do.
_REPLICA_SEED = 0x9E3779B1


class _Observers(NamedTuple):
    """Work that follows a forward pass; None for what is not wanted."""

    session: Any = None  # `ProbeSession`
    features: Any = None  # `shared_features.Features`
    outputs: Any = None  # `LayerOutputs`


class _Forward(NamedTuple):
    """Results of a forward pass."""

    terms: dict  # {name: Term}
    logged: dict  # {name: value}
    examples: Any  # scalar
    scope: Any  # holds the new values of the state
    plan: LossPlan


class _Pass(NamedTuple):
    """A forward pass with all that its gradients are taken from."""

    tape: Any
    forward: _Forward
    observers: _Observers
    targets: list  # scalars to differentiate, times the loss scale
    scale: Any  # the loss scale, or 1.0
    step: Any
    replica: Any
    again: Callable  # computes the terms once more


class _Found(NamedTuple):
    """Results of the backward passes of the update."""

    gradients: list  # [groups][live variables]
    asked: Any  # gradients of what the observers asked for, or None
    live: list
    shared: Any
    products: Any = None
    coefficients: Any = None
    measured: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class MicroStep:
    """Computes losses and gradients of one micro-batch, and what its trace tells about them.

    Args:
        compute_losses: the hook, `(batch, training) -> {name: loss}`.
        owner: the trainer (its model's losses, its `log` calls).
        variables: function that lists the trainable variables.
        weights: `LossWeights`.
        combiner: a built or unbuilt combiner.
        backward: how the losses are differentiated.
        dense: turn sparse gradients into dense ones, so that they can be summed.
        reports: what to report: "probes" (the gradients of every time step, and those of each loss), "health" (the
            layers' outputs), "noise" (of the gradient, from the parts of an update; with "health").
        persistent: several gradients are taken. A persistent tape keeps more of a loop: a fifth of an LSTM's time.
    """

    compute_losses: Callable
    owner: Any
    variables: Callable
    weights: Any
    combiner: Any
    backward: Backward
    dense: bool
    reports: frozenset
    persistent: bool

    def __call__(self, batch, state_values, step, loss_scale, replica=None):
        """(`MicroResult`, `Plan`). Traced or eager, in a replica context.

        `state_values` belong to `owner.forward_state.variables()`.
        """
        variables = self.variables()
        scale = 1.0 if loss_scale is None else loss_scale
        with tf.GradientTape(persistent=self.persistent, watch_accessed_variables=False) as tape:
            tape.watch([raw(variable) for variable in variables])
            observers = self._observers(batch, tape)
            forward = self._forward(batch, state_values, replica, observers)
            self._require_persistent(forward.plan)
            coefficients, objectives = self._objectives(forward, self.weights.at(step))
            targets = objectives if loss_scale is None else [target * loss_scale for target in objectives]
            again = lambda: self._forward(batch, state_values, replica).terms  # noqa: E731
            made = _Pass(tape, forward, observers, targets, scale, step, replica, again)
            looks = self._looks(made)
        cut = self.backward is Backward.CUT and observers.features is not None and bool(observers.features.shared)
        if cut:
            made = made._replace(tape=shared_features.CutTape(tape, observers.features))
            found = self._cut_gradients(made, variables)
        else:
            found = self._gradients(made, variables)._replace(coefficients=coefficients)
        moved = forward.plan.moved
        result = MicroResult(
            gradients=found.gradients,
            sums=[term.sum for term in forward.terms.values()],
            divisors=[term.divisor for term in forward.terms.values()],
            examples=forward.examples,
            logged=[value * forward.examples for value in forward.logged.values()],
            products=found.products,
            total=objectives[0] if self.backward is Backward.FOLDED else None,
            coefficients=found.coefficients,
            measured=found.measured,
            state=_unfold_replica(moved, [forward.scope.get_current_value(v) for v in moved], replica),
            report=self._report(made, found, looks, variables) if self.reports else None,
        )
        session = observers.session
        shapes, reverse, cells = ({}, (), {}) if session is None else _about_layers(session)
        return result, Plan(forward.plan, found.live, found.shared, cut, shapes, frozenset(reverse), cells)

    def outline(self, batch):
        """Learns the names of the losses and makes the variables that go with them. Traced, outside replicas."""
        self._forward(batch, self.owner.read_state(), None)

    def losses_only(self, batch, state_values, replica=None):
        """([sums], [divisors]) of a micro-batch in training mode, with the state and the seeds given. Nothing moves.

        Of a micro-batch without examples they are zeros: means over no example are NaN.
        """
        forward = self._forward(batch, state_values, replica)
        terms = forward.terms.values()
        found = [term.sum for term in terms], [term.divisor for term in terms]
        return tf.nest.map_structure(lambda x: tf.where(forward.examples > 0, x, tf.zeros_like(x)), found)

    # ---- The forward pass.

    def _observers(self, batch, tape):
        return _Observers(
            probe_report.open_session(self.owner, batch, tape) if "probes" in self.reports else None,
            shared_features.open_features(tape, self.backward, self.combiner),
            health_report.open_outputs(self.owner, tape) if "health" in self.reports else None,
        )

    def _forward(self, batch, state_values, replica, observers=_Observers()):  # noqa: B008 (immutable)
        self.owner.steering.begin_forward()
        state_variables = self.owner.forward_state.variables()
        regularized = [v for v in self.variables() if getattr(v, "regularizer", None) is not None]
        # Keras looks regularized variables up in the scope and finds nothing there unless they are mapped.
        scope = ForwardScope(
            [*regularized, *state_variables],
            [tf.convert_to_tensor(raw(variable)) for variable in regularized]
            + _fold_replica(state_variables, state_values, replica),
        )
        session, features, outputs = observers
        probing, watching = (contextlib.nullcontext() if one is None else one for one in (session, outputs))
        collecting = contextlib.nullcontext() if features is None else shared_features.collecting(self.owner, features)
        with scope, self.owner.collecting_logs() as logged:
            running = self.owner.recurrent_core.running(), self.owner.carrying.running(replica)
            with running[0], running[1], probing, watching, collecting:
                losses = self.compute_losses(batch, True)
            model_losses = list(getattr(self.owner.model, "losses", ()))
        examples = batches.count_examples(batch)
        losses = loss_terms.with_regularization(losses, model_losses)
        terms = loss_terms.make_terms(losses, examples, not self.owner.jit_compile)
        plan = self._loss_plan(terms, logged, scope, state_variables)
        if features is not None:
            features.check(self.combiner)
        return _Forward(terms, logged, examples, scope, plan)

    def _loss_plan(self, terms, logged, scope, state_variables):
        """The `LossPlan`; makes the variables of weights and combiner. Raises if state was found that is not known."""
        known = {id(variable) for variable in state_variables}
        discovered = [variable for key, variable in scope.assigned.items() if key not in known]
        if self.owner.carrying.wanted:
            with creating_variables(self.owner.strategy):
                discovered += self.owner.carrying.make()
        if discovered:
            raise StateDiscovered(discovered)
        names = list(terms)
        moved = [variable for variable in state_variables if id(variable) in scope.assigned]
        groups, ratios = loss_terms.group_by_divisor(terms)
        if self.backward.per_loss:
            groups = [[index] for index in range(len(terms))]
        elif self.backward is Backward.FOLDED:
            groups = [list(range(len(terms)))]
        self.weights.build(names)
        if self.combiner.names is None:
            with creating_variables(self.owner.strategy):
                self.combiner.build(names)
        self.combiner.build(names)  # complains if the names have changed
        return LossPlan(names, list(logged), groups, ratios, moved, loss_terms.which_are_sums(terms))

    def _require_persistent(self, plan):
        several = len(plan.groups) > 1 or ("probes" in self.reports and len(plan.names) > 1)
        if several and not self.persistent:
            raise SeveralGroups

    # ---- The backward passes.

    def _objectives(self, forward, weights):
        """(the combiner's coefficients if they are known here, the scalars to differentiate, one per group)."""
        terms, plan = list(forward.terms.values()), forward.plan
        if self.backward.per_loss:
            return None, [term.sum for term in terms]
        coefficients = self._coefficients(terms, weights)
        if coefficients is not None:
            weights = [w * c for w, c in zip(weights, tf.unstack(tf.stop_gradient(coefficients)), strict=True)]
        if self.backward is Backward.FOLDED:
            parts = [[w * safe_mean(term) for w, term in zip(weights, terms, strict=True)]]
        else:
            parts = [self._group_parts(group, terms, plan, weights) for group in plan.groups]
        return coefficients, [group[0] if len(group) == 1 else tf.add_n(group) for group in parts]

    def _group_parts(self, group, terms, plan, weights):
        own = [[values[i] for i in group] for values in (plan.names, terms, plan.ratios)]
        sums = reduction.sums_of_group(*own, raising=not self.owner.jit_compile)
        return [weights[i] * total for i, total in zip(group, sums, strict=True)]

    def _coefficients(self, terms, weights):
        """The combiner's coefficients [K], or None where they are all 1."""
        if combination.is_plain_sum(self.combiner):
            return None
        if self.combiner.needs == "weights":
            return self.combiner.coefficients(None, None, None)
        divisors = tf.stack([term.divisor for term in terms])
        means = tf.math.divide_no_nan(tf.stack([term.sum for term in terms]), divisors)
        inputs = combination.inputs(self.combiner, tf.stop_gradient(means), divisors, weights)
        return self.combiner.coefficients(*inputs, None)

    def _gradients(self, made, variables):
        """A `_Found`: one backward pass for each target."""
        owner, targets, features = self.owner, made.targets, made.observers.features
        sources = [raw(variable) for variable in variables]
        several = len(targets) > 1 or self.backward.per_loss
        asked = [] if several else self._asked(made)
        shared = [] if features is None else features.shared
        units, gradients = self._units(made), []
        for target, unit in zip(targets, units, strict=True):
            owner.steering.set(made.step, unit)
            gradients.append(made.tape.gradient(target, sources + asked + shared))
        products = None
        if shared:
            rows = [stages.fill_missing(group[len(sources) + len(asked) :], shared) for group in gradients]
            products = shared_features.products(shared_features.rows_of(rows), [1.0 / made.scale] * len(rows))
        through = made.tape.gradient(shared, sources) if shared and owner.head_gradients == "own" else None
        own = gradients[0][len(sources) : len(sources) + len(asked)] if asked else None
        gradients = [group[: len(sources)] for group in gradients]
        live, mask = self._reach(variables, gradients, through, made.again)
        finished = []
        for group in gradients:
            kept = [(g, v) for g, v, reached in zip(group, sources, live, strict=True) if reached]
            kept = [(tf.zeros_like(v) if g is None else g, v) for g, v in kept]
            finished.append([stages.to_dense(g, v.shape) if self.dense else g for g, v in kept])
        return _Found(finished, own, live, mask, products)

    def _cut_gradients(self, made, variables):
        """A `_Found` of the whole update: passes through the heads, then one through the trunk."""
        owner, tape = self.owner, made.tape
        factors = shared_features.Factors(made.forward.terms.values(), self.weights.at(made.step), made.scale)
        owner.steering.set(made.step, made.forward.examples / made.scale)
        sources = [raw(variable) for variable in variables]
        features, heads = zip(*(tape.heads(target, sources) for target in made.targets), strict=True)
        rows = shared_features.rows_of(features)
        measured = shared_features.products(rows, factors.unscaled_means)
        coefficients = self.combiner.coefficients(*factors.inputs(self.combiner), measured)
        weighted = tf.cast(tf.stack(factors.means), tf.float64) * tf.cast(coefficients, tf.float64)
        trunk = tape.trunk(shared_features.weighted_sum(rows, weighted, features[0]), sources)
        live, mask = self._reach(variables, [*heads, trunk], trunk, made.again)
        own = owner.head_gradients == "own"
        gradients = []
        for through, *parts in zip(trunk, *heads, strict=True):
            by = factors.means if own and through is None else tf.unstack(weighted)
            reached = [(part, factor) for part, factor in zip(parts, by, strict=True) if part is not None]
            head = stages.weigh(*zip(*reached, strict=True)) if reached else None
            if head is not None or through is not None:
                gradients.append(stages.to_dense(shared_features.add(head, through)))
        return _Found([gradients], None, live, mask, None, tf.cast(coefficients, tf.float32), measured)

    def _reach(self, variables, gradients, through, again):
        """(which variables some loss reaches, which of those are shared or None). Complains about the others."""
        live = [any(group[index] is not None for group in gradients) for index in range(len(variables))]
        mask = None
        if self.backward.per_loss and self.combiner.gradients_every:
            mask = shared_features.shared_mask(self.owner, variables)
            if mask is not None:
                shared_features.check_reached(variables, mask, live)
            elif through is not None and self.owner.head_gradients == "own":
                mask = [gradient is not None for gradient in through]
        missing_gradients.check(variables, live, again, self.owner.on_none_gradient)
        return live, None if mask is None else [shared for shared, reached in zip(mask, live, strict=True) if reached]

    def _units(self, made):
        """Factors that turn the gradient of each target into that of an example's own loss; for limits of actions."""
        plan, examples = made.forward.plan, made.forward.examples
        if not self.owner.steering.needs_units:
            return [1.0] * len(plan.groups)
        if self.backward is Backward.FOLDED:
            return [examples / made.scale]
        examples, divisors = self._averages(made)
        if len(plan.groups) > 1 and not self.backward.per_loss:
            raise ValueError(
                f"The losses {plan.names} have different masks or weights, which accumulation and replicas keep apart; "
                "an action on the gradient of time steps would act on each by itself. Give the losses the same mask, "
                "or use one micro-batch on one device."
            )
        ratios = [1.0 if self.backward.per_loss else plan.ratios[group[0]] for group in plan.groups]
        each = [divisors[group[0]] / ratio for group, ratio in zip(plan.groups, ratios, strict=True)]
        return [tf.math.divide_no_nan(examples, divisor * made.scale) for divisor in each]

    # ---- Reports of probed and examined updates.

    def _asked(self, made):
        """The tensors whose gradients the observers ask for."""
        session, _, outputs = made.observers
        return [*(() if session is None else session.sources), *(() if outputs is None else outputs.sources)]

    def _averages(self, made):
        """(examples, divisors of the losses) of this micro-batch; the averages of all replicas' shares of it.

        Shares with different masks have different divisors, but an example's gradient is that of the whole loss. XLA
        has no way to ask the other replicas: there, each share counts as a whole.
        """
        examples, divisors = made.forward.examples, [term.divisor for term in made.forward.terms.values()]
        if made.replica is None or self.owner.jit_compile:
            return examples, divisors
        averages = [x / self.owner.replicas for x in replica_sums.all_reduce([examples, *divisors])]
        return averages[0], averages[1:]

    def _looks(self, made):
        """The `probe_report.Looks` of a report: its targets and divisors; None where no gradient is asked for."""
        session, _, outputs = made.observers
        if session is None and (outputs is None or not outputs.sources):
            return None
        plan, terms = made.forward.plan, list(made.forward.terms.values())
        examples, divisors = self._averages(made)
        mean = divisor = None
        if len(made.targets) > 1 or self.backward.per_loss:
            weights = self.weights.at(self.owner.step.value())
            means = [safe_mean(term._replace(divisor=d)) for term, d in zip(terms, divisors, strict=True)]
            mean = made.scale * tf.add_n([w * each for w, each in zip(weights, means, strict=True)])
        elif self.backward is Backward.GROUPED:
            first = plan.groups[0][0]
            divisor = divisors[first] / plan.ratios[first]
        losses = [made.scale * term.sum for term in terms] if len(terms) > 1 else []
        return probe_report.Looks(mean, losses, examples, divisor, made.scale)

    def _report(self, made, found, looks, variables):
        """The `probe_report.Report` of this micro-batch."""
        session, _, outputs = made.observers
        report = probe_report.NOTHING
        probes = 0 if session is None else len(session.sources)
        if session is not None:
            own = None if found.asked is None else found.asked[:probes]
            sources = [raw(variable) for variable in variables]
            alone = not self.owner.overrides("train_step")
            with self.owner.steering.paused():  # each loss by itself is shown as it is
                report = probe_report.measure(session, made.tape, sources, own, looks, alone)
        if outputs is None:
            return report
        watched, asked = [], found.asked
        if outputs.sources:
            watched = made.tape.gradient(looks.mean, outputs.sources) if asked is None else asked[probes:]
        factor = 1.0 / (made.scale if looks is None else looks.factor)
        examples = made.forward.examples if looks is None else looks.examples
        layers = outputs.totals(watched, factor, examples)
        each = [[g for g, live in zip(group, found.live, strict=True) if live] for group in report.loss_gradients]
        noisy = "noise" in self.reports
        health = health_report.measure(layers, found.gradients, made.forward.examples, each, noisy)
        return report._replace(health=health)


def _fold_replica(variables, values, replica, sign=1):
    if replica is None:
        return list(values)
    offset = sign * tf.stack([tf.cast(replica, tf.int64) * _REPLICA_SEED, tf.zeros([], tf.int64)])
    return [x + tf.cast(offset, x.dtype) if is_seed(v) else x for v, x in zip(variables, values, strict=True)]


def _unfold_replica(variables, values, replica):
    return _fold_replica(variables, values, replica, sign=-1)


def _about_layers(session):
    """(shapes of probes, layers that go backwards, classes of cells) of a probed update."""
    return dict(session.shapes), session.backward, session.cells
