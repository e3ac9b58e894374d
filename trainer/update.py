"""One update, traced: micro-batches → all-reduce → divide → combine → finite check → clip → apply → average.

A non-finite update is not skipped by a conditional, which costs 10–45 % of a small update, but by an assertion that
ends the call before anything was written. The host (`trainer.calls`) sees the error, counts the skip and goes on
with the next data. What the forward pass moved (BatchNorm statistics, metrics) is written after the check, too.

With several replicas an aborted call would leave their collective operations out of step, and a probed update would
lose its report: there the check is a conditional, and a call ends after the update that was not finite. Replicas
compute micro-batches and sum them up; everything after that happens once, outside them.
"""

import numpy as np
import tensorflow as tf

from trainer import batches, combining, fused, merging, microstep, probed, sharing, stages
from trainer.sources import timed
from trainer.state import raw

NONFINITE = "looptape: non-finite update"
END_OF_DATA = "looptape: end of data"
NOT_ALLOWED = "looptape: a loss that the combiner does not take"


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
        self.owner = owner
        self.optimizer = optimizer
        self._variables = variables
        self.weights = weights
        self.combiner = combiner
        self.last = None
        self._averages = None
        self._one_part = owner.replicas == 1 and owner.accumulation_steps == 1
        sharing.check_options(owner, combiner)
        # Gradients of each loss are wanted now and then: an update has two variants, see `_sometimes`.
        self._alternating = combiner.gradients_every > 1 and owner.head_gradients == "weighted"
        self._measuring = bool(combiner.gradients_every)

        def make(probing, measuring):
            per_loss = measuring or (combiner.needs == "losses" and not self._one_part)
            return microstep.MicroStep(
                compute_losses,
                owner,
                variables,
                weights,
                combiner,
                fold=self._one_part and not per_loss,
                per_loss=per_loss,
                densify=not self._one_part or per_loss or self._alternating,
                probing=probing,
                cut=self._one_part and measuring,
            )

        self._make_micro = make
        self._micros = {}

    def _micro_of(self, probing):
        """(micro-step, the same as a traced function) without or with probes: all micro-batches share one trace."""
        key = probing, self._measuring
        if key not in self._micros:
            micro = self._make_micro(*key)
            micro.persistent |= probing and len(self.names or ()) > 1
            compiled = tf.function(micro, autograph=False, jit_compile=self.owner.jit_compile or None)
            self._micros[key] = micro, compiled
        return self._micros[key]

    @property
    def micro(self):
        return self._micro_of(self.owner.probing)[0]

    @property
    def _compiled(self):
        return self._micro_of(self.owner.probing)[1]

    def forget_probes(self):
        """Makes the next probed update trace anew."""
        self._micros = {key: made for key, made in self._micros.items() if not key[0]}

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
    def probed_backward(self):
        """Names of the probed layers that read their sequence from its end."""
        return self._micro_of(True)[0].backward

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

        spec = iterator.element_spec
        return self._finish(*self._combined(lambda: self._accumulate(fetch, spec), lambda: spec))

    def from_batch(self, batch):
        """One update on a batch that is split into `accumulation_steps` micro-batches. Traced, one device."""
        count = self.owner.accumulation_steps

        def fetch(index):
            return tf.constant(True), lambda: batches.slice_for_replica(batch, index, count), tf.zeros([])

        spec = tf.nest.map_structure(tf.type_spec_from_value, batches.slice_for_replica(batch, tf.constant(0), count))
        return self._finish(*self._combined(lambda: self._accumulate(fetch, spec), lambda: spec))

    def from_parts(self, parts):
        """One update on a list of micro-batches, each split over the replicas. Traced or eager."""
        spec = lambda: tf.nest.map_structure(tf.type_spec_from_value, parts[0])  # noqa: E731
        if self.owner.replicas > 1:
            batches.check_divisible(parts[0], self.owner.replicas)
            if not self.micro.planned:
                self.micro.plan(parts[0])
            sum_up, look_again = self._distributed, self._distributed_losses
        else:
            sum_up, look_again = lambda parts: self._sum_parts(parts, None), self._losses_of
        if not self.combiner.needs_losses_after:
            return self._finish(*self._combined(lambda: (sum_up(parts)[0], ()), spec))
        result, states = sum_up(parts)
        return self._finish(result, combining.combine(self, result), lambda: look_again(parts, states))

    def _distributed(self, parts):
        """(the sums of all replicas' shares of the parts, the state with which each replica began each part)."""
        result, states = self.owner.strategy.run(self._replica, args=(parts,))
        return self._first(result), states

    def _distributed_losses(self, parts, states):
        """As `_losses_of`, with each replica's states; the losses are those of all replicas."""
        return self._first(self.owner.strategy.run(self._losses_of_replica, args=(parts, states)))

    def _first(self, results):
        """What the first replica of this process has: all of them have the same."""
        return tf.nest.map_structure(lambda x: self.owner.strategy.experimental_local_results(x)[0], results)

    def _combined(self, make, spec):
        """(the sums of an update, what the combiner makes of them).

        Args:
            make: gives the sums, and the seconds that it waited for data or ().
            spec: function that gives the specification of a micro-batch.
        """
        if self._alternating:
            return self._sometimes(make, spec)
        result, waited = make()
        if not isinstance(waited, tuple):
            self.owner.ledger.waited(waited)
        return result, combining.combine(self, result)

    def _sometimes(self, make, spec):
        """As `_combined`, with a gradient for each loss only in updates in which the combiner measures them."""
        if self.combiner.names is None:
            self._outline(spec())
        shape = []

        def variant(measuring):
            self._measuring = measuring
            result, waited = make()
            combined = combining.combine(self, result)
            losses, present, measured = combined.seen
            if measuring:
                shape.append(measured.shape)
            elif shape:
                measured = tf.zeros(shape[0])
            kept = result._replace(gradients=(), products=(), total=(), coefficients=(), measured=())
            return kept, combined._replace(seen=(losses, present, measured)), waited

        due = self.combiner.due()
        if tf.executing_eagerly():
            result, combined, waited = variant(bool(due))
        else:
            result, combined, waited = tf.cond(due, lambda: variant(True), lambda: variant(False))
        if not isinstance(waited, tuple):
            self.owner.ledger.waited(waited)
        return result, combined

    def _outline(self, spec):
        """Traces a micro-step that is not run, to learn the losses and make the variables that go with them."""
        owner = self.owner
        self._compiled.get_concrete_function(spec, owner.read_state(), owner.step.value(), owner.loss_scale.value())

    def _losses_of(self, parts, states, replica=None):
        """[K] losses of the parts with the present weights and the state and seeds each had. Traced or eager."""
        found = [self.micro.losses_only(part, state, replica) for part, state in zip(parts, states, strict=True)]
        sums, divisors = (tf.add_n([tf.stack(part[index]) for part in found]) for index in (0, 1))
        if replica is not None:
            sums, divisors = stages.all_reduce((sums, divisors))
        return tf.math.divide_no_nan(sums, divisors)

    def _losses_of_replica(self, parts, states):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return self._losses_of(self._shares(parts, replica), states, replica)

    def _shares(self, parts, replica):
        return [batches.slice_for_replica(part, replica, self.owner.replicas) for part in parts]

    def _sum_parts(self, parts, replica):
        """(the sum of the parts' results, the state each of them began with)."""
        owner, totals, states = self.owner, None, []
        state = owner.read_state()
        micro = self._compiled if owner.jit_compile and not owner.run_eagerly else self.micro
        for part in parts:
            states.append(list(state))
            result = micro(part, state, owner.step.value(), owner.loss_scale.value(), replica)
            if replica is not None or len(parts) > 1:  # a share, or what is past the end of the data, may be empty
                result = merging.leave_out_empty(result, [state[index] for index in self._moved_indices()])
            totals = result if totals is None else merging.add(totals, result)
            for index, value in zip(self._moved_indices(), result.state, strict=True):
                state[index] = value
        return totals, states

    def _replica(self, parts):
        """As `_distributed`, for one replica and its share of the parts. In a replica context."""
        owner = self.owner
        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group
        before = owner.read_state()
        own, states = self._sum_parts(self._shares(parts, replica), replica)
        result = merging.replace_additive(own, stages.all_reduce(merging.additive(own)))
        if result.report:
            result = result._replace(report=stages.all_reduce(result.report))
        before = [before[index] for index in self._moved_indices()]
        metrics = owner.forward_state.are_metrics(self.micro.moved)
        state = merging.merge_replicas(before, own.state, metrics, own.examples, result.examples)
        return result._replace(state=state), states if self.combiner.needs_losses_after else ()

    def _moved_indices(self):
        positions = {id(v): index for index, v in enumerate(self.owner.forward_state.variables())}
        return [positions[id(variable)] for variable in self.micro.moved]

    def _accumulate(self, fetch, spec):
        owner = self.owner
        step, scale = owner.step.value(), owner.loss_scale.value()
        state = owner.read_state()
        outputs = self._compiled.get_concrete_function(spec, state, step, scale).structured_outputs
        # Compiled by XLA it is one operation. Otherwise it is better in line: a function gives all its gradients at
        # once, at its end, which costs memory and the overlap of the sums with the backward pass.
        micro = self._compiled if owner.jit_compile else self.micro
        zeros = tf.nest.map_structure(lambda x: tf.zeros(x.shape, x.dtype), merging.additive(outputs))
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
                summed = tf.nest.map_structure(tf.add, totals, merging.additive(result))
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
        with tf.control_dependencies([tf.debugging.Assert(count > 0, [END_OF_DATA])]):
            totals = tf.nest.map_structure(tf.identity, totals)
        coefficients = ()
        if not self.micro.per_loss and not microstep.is_plain_sum(self.combiner):
            coefficients = self.combiner.coefficients(None, None, None)
        return microstep.MicroResult(*totals, (), coefficients, (), moving, report), waited

    def _finish(self, result, combined, losses_after=None):
        """Everything after the backward passes, once per update."""
        owner, micro = self.owner, self.micro
        variables = [v for v, live in zip(self._variables(), micro.live, strict=True) if live]
        gradients, total, coefficients, seen = combined
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
            if seen:
                self.combiner.advance(*seen, None if isinstance(coefficients, tuple) else coefficients)
            if losses_after is not None:
                divisors = tf.stack(result.divisors)
                before = tf.math.divide_no_nan(tf.stack(result.sums), divisors)
                self.combiner.advance_after(before, losses_after(), divisors > 0)
            return tf.constant(True)

        if owner.probing:
            owner.tracing.reports[self.name] = self._conclude(result, coefficients, gradients)
        noted = self._note(result, total, norm, coefficients)
        refusals = self._refuse(seen, noted)
        if owner.aborting:
            with tf.control_dependencies([noted, *refusals]):
                check = tf.debugging.check_numerics(total + norm, NONFINITE)
            with tf.control_dependencies([check]):
                write()
            owner.tracing.checks.append(check)
        else:
            with tf.control_dependencies(refusals):
                finite = tf.math.is_finite(total + norm)
            owner.tracing.checks.append(tf.cond(finite, write, lambda: tf.constant(False)))
        losses = [tf.math.divide_no_nan(s, d) for s, d in zip(result.sums, result.divisors, strict=True)]
        return dict(zip(micro.names, losses, strict=True))

    def _refuse(self, seen, noted):
        """[an assertion that ends the run where the combiner cannot take the losses], or []."""
        if not self.combiner.requires_positive:
            return []
        losses, present, _ = seen
        with tf.control_dependencies([noted]):  # for `explain_refusal`
            check = tf.raw_ops.Assert(condition=self.combiner.allows(losses, present), data=[NOT_ALLOWED])
        return [] if check is None else [check]

    def explain_refusal(self):
        """Raises an error about the losses of the latest update, if the combiner cannot take them. On the host."""
        losses = self.owner.ledger.last(self)["loss"]
        self.combiner.validate([losses.get(name) for name in self.names], [name in losses for name in self.names])

    def _conclude(self, result, coefficients, gradients):
        weights = tf.stack(self.weights.at(self.owner.step.value()))
        coefficients = tf.ones_like(weights) if isinstance(coefficients, tuple) else coefficients
        scale = self.owner.loss_scale.value()
        factors = tf.math.divide_no_nan(weights, tf.stack(result.divisors) * (1.0 if scale is None else scale))
        return probed.conclude(result.report, factors, coefficients, gradients)

    def _note(self, result, total, norm, coefficients):
        """Keeps this update's numbers for the log, and for the error if they are not finite."""
        row = [*result.sums, *result.divisors, *result.logged, result.examples, total * result.examples, norm]
        if not isinstance(coefficients, tuple):
            row += tf.unstack(coefficients)
        row = tf.stack(row)
        self.owner.ledger.record(self, row, self.micro.logged, not isinstance(coefficients, tuple))
        if self.last is None:
            self.last = self.owner.make_variable(np.zeros(row.shape, np.float32), "last")
        return self.last.assign(row)

    def _make_averages(self, variables):
        if self._averages is None:
            self._averages = [self.owner.make_variable(raw(v), "average") for v in variables]
            self.averaged_variables = list(variables)
