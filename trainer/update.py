"""One update, traced: micro-batches → all-reduce → divide → finite check → combine → clip → apply → average.

A non-finite update is not skipped by a conditional, which costs 10–45 % of a small update, but by an assertion that
ends the call before anything was written. The host (`trainer.calls`) sees the error, counts the skip and goes on
with the next data. What the forward pass moved (BatchNorm statistics, metrics) is written after the check, too.

With several replicas an aborted call would leave their collective operations out of step, and a probed update would
lose its report: there the check is a conditional, and a call ends after the update that was not finite. Replicas
compute micro-batches and sum them up; everything after that happens once, outside them.
"""

import numpy as np
import tensorflow as tf

from trainer import batches, fused, microstep, probed, stages
from trainer.sources import timed
from trainer.state import is_seed, raw

NONFINITE = "looptape: non-finite update"
END_OF_DATA = "looptape: end of data"


class Minimizer:
    """Minimizes one set of named losses over one set of variables with one optimizer.

    A trainer has one of these; a trainer that overrides `train_step` may have several (a GAN has two).

    Args:
        owner: the trainer.
        name: tells several of them apart in logs and errors; "" for the trainer's own.
        compute_losses: `(batch, training) -> {name: loss}`.
        optimizer: a built Keras optimizer.
        variables: function that lists the trainable variables.
        weights: `LossWeights`.
        combiner: from `losses`.
    """

    def __init__(self, owner, name, compute_losses, optimizer, variables, weights, combiner):
        self.name = name
        self._owner = owner
        self.optimizer = optimizer
        self._variables = variables
        self.weights = weights
        self.combiner = combiner
        self.last = None
        self._averages = None
        self._one_part = owner.replicas == 1 and owner.accumulation_steps == 1
        if combiner.needs_losses_after and owner.replicas > 1:
            raise ValueError(
                f"{type(combiner).__name__} evaluates the losses a second time after each update, which is not done on "
                "several replicas. Use one device, or another combiner."
            )
        per_loss = bool(combiner.gradients_every) or (combiner.needs == "losses" and not self._one_part)
        options = {
            "fold": self._one_part and not per_loss,
            "per_loss": per_loss,
            "densify": not self._one_part or per_loss,
        }

        def make(probing):
            return microstep.MicroStep(compute_losses, owner, variables, weights, combiner, probing=probing, **options)

        self._make_micro = make
        self._micros = {}

    def _micro_of(self, probing):
        """(micro-step, the same as a traced function) without or with probes: all micro-batches share one trace."""
        if probing not in self._micros:
            micro = self._make_micro(probing)
            micro.persistent |= probing and len(self.names or ()) > 1
            compiled = tf.function(micro, autograph=False, jit_compile=self._owner.jit_compile or None)
            self._micros[probing] = micro, compiled
        return self._micros[probing]

    @property
    def _micro(self):
        return self._micro_of(self._owner.probing)[0]

    @property
    def _compiled(self):
        return self._micro_of(self._owner.probing)[1]

    def forget_probes(self):
        """Makes the next probed update trace anew."""
        self._micros.pop(True, None)

    def forget(self, optimizer):
        """Makes every next update trace anew: other variables are trained. The trainer's own optimizer may be new."""
        self._micros.clear()
        if not self.name:
            self.optimizer = optimizer
        if self._averages is not None:
            raise ValueError(
                "Layers were frozen or unfrozen after averaged weights were begun. Make a new trainer for the second "
                "phase: its averages begin with the weights reached."
            )

    @property
    def probe_shapes(self):
        return self._micro_of(True)[0].shapes

    @property
    def names(self):
        return next((micro.names for micro, _ in self._micros.values() if micro.names), None)

    @property
    def averages(self):
        return self._averages or []

    def from_iterator(self, iterator):
        """One update on the next `accumulation_steps` micro-batches, or as many as are left. Traced, one device."""

        def fetch(_):
            optional, seconds = timed(iterator.get_next_as_optional)
            return optional.has_value(), optional.get_value, seconds

        return self._finish(self._accumulate(fetch, iterator.element_spec))

    def from_batch(self, batch):
        """One update on a batch that is split into `accumulation_steps` micro-batches. Traced, one device."""
        count = self._owner.accumulation_steps

        def fetch(index):
            return tf.constant(True), lambda: batches.slice_for_replica(batch, index, count), tf.zeros([])

        spec = tf.nest.map_structure(tf.type_spec_from_value, batches.slice_for_replica(batch, tf.constant(0), count))
        return self._finish(self._accumulate(fetch, spec))

    def from_parts(self, parts):
        """One update on a list of micro-batches, each split over the replicas. Traced or eager."""
        owner = self._owner
        if owner.replicas == 1:
            result, states = self._sum_parts(parts, None)
            again = (lambda: self._losses_of(parts, states)) if self.combiner.needs_losses_after else None
            return self._finish(result, again)
        if self._micro.names is None:
            self._micro.plan(parts[0])
        result = owner.strategy.run(self._replica, args=(parts,))
        result = tf.nest.map_structure(lambda x: owner.strategy.experimental_local_results(x)[0], result)
        metric_ids = {id(variable) for variable in owner.forward_state.metric_variables()}
        state = [
            raw(variable).read_value() + value if id(variable) in metric_ids else value
            for variable, value in zip(self._micro.moved, result.state, strict=True)
        ]
        return self._finish(result._replace(state=state))

    def _losses_of(self, parts, states):
        """[K] losses of the parts with the present weights and the state and seeds each had. Traced or eager."""
        found = [self._micro.losses_only(part, state) for part, state in zip(parts, states, strict=True)]
        sums, divisors = (tf.add_n([tf.stack(part[index]) for part in found]) for index in (0, 1))
        return tf.math.divide_no_nan(sums, divisors)

    def _sum_parts(self, parts, replica):
        """(the sum of the parts' results, the state each of them began with)."""
        owner, totals, states = self._owner, None, []
        state = owner.read_state()
        micro = self._compiled if owner.jit_compile and not owner.run_eagerly else self._micro
        for part in parts:
            states.append(list(state))
            result = micro(part, state, owner.step.value(), owner.loss_scale.value(), replica)
            totals = result if totals is None else _add(totals, result)
            for index, value in zip(self._moved_indices(), result.state, strict=True):
                state[index] = value
        return totals, states

    def _replica(self, parts):
        """The sums of one replica's share of the parts, over all replicas. In a replica context."""
        owner = self._owner
        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group
        before = dict(zip(map(id, owner.forward_state.variables()), owner.read_state(), strict=True))
        shares = [batches.slice_for_replica(part, replica, owner.replicas) for part in parts]
        result = _replace_empty(self._sum_parts(shares, replica)[0], self._micro.moved, before)
        result = _replace_additive(result, stages.all_reduce(_additive(result)))
        if result.report:
            result = result._replace(report=stages.all_reduce(result.report))
        metric_ids = {id(variable) for variable in owner.forward_state.metric_variables()}
        state = [
            _merge_replicas(variable, before[id(variable)], after, id(variable) in metric_ids)
            for variable, after in zip(self._micro.moved, result.state, strict=True)
        ]
        return result._replace(state=state)

    def _moved_indices(self):
        positions = {id(v): index for index, v in enumerate(self._owner.forward_state.variables())}
        return [positions[id(variable)] for variable in self._micro.moved]

    def _accumulate(self, fetch, spec):
        owner = self._owner
        step, scale = owner.step.value(), owner.loss_scale.value()
        state = owner.read_state()
        outputs = self._compiled.get_concrete_function(spec, state, step, scale).structured_outputs
        # Compiled by XLA it is one operation. Otherwise it is better in line: a function gives all its gradients at
        # once, at its end, which costs memory and the overlap of the sums with the backward pass.
        micro = self._compiled if owner.jit_compile else self._micro
        zeros = tf.nest.map_structure(lambda x: tf.zeros(x.shape, x.dtype), _additive(outputs))
        empty = probed.zeros_like(outputs.report)
        moved = self._moved_indices()

        def body(count, ended, waited, totals, report, moving):
            available, get_batch, seconds = fetch(count)
            waited = waited + seconds

            def run():
                present = list(state)
                for index, value in zip(moved, moving, strict=True):
                    present[index] = value
                result = micro(get_batch(), present, step, scale)
                summed = tf.nest.map_structure(tf.add, totals, _additive(result))
                found = probed.add(report, result.report) if result.report else ()
                return count + 1, tf.constant(False), waited, summed, found, list(result.state)

            def end():
                return count, tf.constant(True), waited, totals, report, moving

            return tf.cond(available, run, end)

        initial = (tf.constant(0), tf.constant(False), tf.zeros([]), zeros, empty, [state[index] for index in moved])
        shapes = tf.nest.map_structure(lambda x: x.shape, initial)
        shapes = (*shapes[:4], tf.nest.map_structure(lambda x: x.shape, outputs.report), shapes[5])
        count, _, waited, totals, report, moving = tf.while_loop(
            lambda count, ended, *_: (count < owner.accumulation_steps) & ~ended,
            body,
            initial,
            shape_invariants=shapes,
            parallel_iterations=2,
        )
        owner.ledger.waited(waited)
        with tf.control_dependencies([tf.debugging.Assert(count > 0, [END_OF_DATA])]):
            totals = tf.nest.map_structure(tf.identity, totals)
        coefficients = ()
        if not self._micro.per_loss and not microstep.is_plain_sum(self.combiner):
            coefficients = self.combiner.coefficients(None, None, None)
        return microstep.MicroResult(*totals, (), coefficients, moving, report)

    def _finish(self, result, losses_after=None):
        """Everything after the backward passes, once per update."""
        owner, micro = self._owner, self._micro
        variables = [v for v, live in zip(self._variables(), micro.live, strict=True) if live]
        gradients, total, coefficients, advance = self._combine(result)
        norm = tf.linalg.global_norm(gradients)
        if owner.ema_decay is not None:
            self._make_averages(variables)

        clipped = gradients if owner.clip_norm is None else stages.clip(gradients, norm, owner.clip_norm)

        def write():
            transformed = owner.transform_gradients(clipped, variables)
            if owner.replicas == 1:
                fused.apply(self.optimizer, transformed, variables)
            else:
                self.optimizer.apply(transformed, variables)
            for variable, value in zip(micro.moved, result.state, strict=True):
                raw(variable).assign(value)
            if owner.ema_decay is not None:
                stages.average(self._averages, [raw(v) for v in variables], owner.ema_decay)
            advance()
            if losses_after is not None:
                divisors = tf.stack(result.divisors)
                before = tf.math.divide_no_nan(tf.stack(result.sums), divisors)
                self.combiner.advance_after(before, losses_after(), divisors > 0)
            return tf.constant(True)

        if owner.probing:
            owner.tracing.reports[self.name] = self._conclude(result, coefficients, gradients)
        noted = self._note(result, total, norm, coefficients)
        if owner.aborting:
            with tf.control_dependencies([noted]):
                check = tf.debugging.check_numerics(total + norm, NONFINITE)
            with tf.control_dependencies([check]):
                write()
            owner.tracing.checks.append(check)
        else:
            owner.tracing.checks.append(tf.cond(tf.math.is_finite(total + norm), write, lambda: tf.constant(False)))
        losses = [tf.math.divide_no_nan(s, d) for s, d in zip(result.sums, result.divisors, strict=True)]
        return dict(zip(micro.names, losses, strict=True))

    def _combine(self, result):
        """(gradients, total, coefficients, function that advances the combiner) from the sums of a whole update."""
        micro, combiner = self._micro, self.combiner
        scale = self._owner.loss_scale.value()
        if micro.fold:
            groups = [[stages.deduplicate(gradient) for gradient in group] for group in result.gradients]
            groups = stages.unscale(groups, scale)
        else:
            divisors = [result.divisors[group[0]] / micro.ratios[group[0]] for group in micro.groups]
            if micro.per_loss:
                divisors = result.divisors
            groups = stages.divide(result.gradients, divisors, scale)
        if micro.fold and microstep.is_plain_sum(combiner):
            return stages.combine(groups), result.total, (), lambda: None
        weights = self.weights.at(self._owner.step.value())
        divisors = tf.stack(result.divisors)
        losses, present = tf.math.divide_no_nan(tf.stack(result.sums), divisors), divisors > 0
        measured, coefficients = None, result.coefficients
        if micro.per_loss:
            groups = [[stages.scale_gradient(g, w) for g in group] for group, w in zip(groups, weights, strict=True)]
            if combiner.gradients_every:
                measured = combiner.measure(groups)
            coefficients = combiner.coefficients(losses, present, measured)
            gradients = stages.combine(groups, tf.unstack(coefficients))
        else:
            gradients = stages.combine(groups)
        used = tf.ones([len(weights)]) if isinstance(coefficients, tuple) else coefficients
        total = combiner.total(losses, used, tf.stack(weights), present)
        return gradients, total, coefficients, lambda: combiner.advance(losses, present, measured)

    def _conclude(self, result, coefficients, gradients):
        weights = tf.stack(self.weights.at(self._owner.step.value()))
        weights = weights if isinstance(coefficients, tuple) else weights * coefficients
        scale = self._owner.loss_scale.value()
        factors = tf.math.divide_no_nan(weights, tf.stack(result.divisors) * (1.0 if scale is None else scale))
        return probed.conclude(result.report, factors, gradients)

    def _note(self, result, total, norm, coefficients):
        """Keeps this update's numbers for the log, and for the error if they are not finite."""
        row = [*result.sums, *result.divisors, *result.logged, result.examples, total * result.examples, norm]
        if not isinstance(coefficients, tuple):
            row += tf.unstack(coefficients)
        row = tf.stack(row)
        self._owner.ledger.record(self, row, self._micro.logged, not isinstance(coefficients, tuple))
        if self.last is None:
            self.last = self._owner.make_variable(np.zeros(row.shape, np.float32), "last")
        return self.last.assign(row)

    def _make_averages(self, variables):
        if self._averages is None:
            self._averages = [self._owner.make_variable(raw(v), "average") for v in variables]
            self.averaged_variables = list(variables)


def _additive(result):
    return [result.gradients, result.sums, result.divisors, result.examples, result.logged]


def _add(totals, result):
    summed = tf.nest.map_structure(tf.add, _additive(totals), _additive(result))
    report = probed.add(totals.report, result.report) if result.report else ()
    return _replace_additive(result, summed)._replace(report=report)


def _replace_additive(result, parts):
    return result._replace(**dict(zip(microstep.MicroResult._fields[:5], parts, strict=True)))


def _replace_empty(result, moved, before):
    """A replica without examples has moved nothing: statistics of an empty batch are NaN."""
    present = result.examples > 0
    state = [tf.where(present, after, before[id(v)]) for v, after in zip(moved, result.state, strict=True)]
    return result._replace(state=state)


def _merge_replicas(variable, before, after, is_metric):
    """New state of several replicas as one: statistics are averaged, seeds are equal; of metrics the sum of changes.

    A metric's value in a replica is a part of the whole, so only its change means something there.
    """
    context = tf.distribute.get_replica_context()
    if is_seed(variable) or not after.dtype.is_floating:
        return after
    if is_metric:
        return context.all_reduce(tf.distribute.ReduceOp.SUM, after - before)
    return context.all_reduce(tf.distribute.ReduceOp.SUM, after) / context.num_replicas_in_sync
