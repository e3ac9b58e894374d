"""One update, traced: the sums of its micro-batches and replicas, combined to one gradient for the `pipeline`.

A non-finite update is not skipped by a conditional, which costs 10–45 % of a small update, but by an assertion that
ends the call before anything was written. The host (`train_function`) sees the error, counts the skip and
continues with the next data. What the forward pass moved (BatchNorm statistics, metrics) is written after it, too.

With several replicas an aborted call would leave their collective operations out of step, and a probed update would
lose its report: there the check is a conditional, and a call ends after the update that was not finite. Replicas
compute micro-batches and sum them up; everything after that happens once, outside them.
"""

import tensorflow as tf

from looptape.trainer.data import batches
from looptape.trainer.data.source import timed
from looptape.trainer.distribution import replica_sums
from looptape.trainer.health.spikes import SpikeGuard
from looptape.trainer.step import accumulation
from looptape.trainer.step.forward.forward_state import SeveralGroups
from looptape.trainer.step.gradients import combination, shared_features
from looptape.trainer.step.micro_batch import MicroStep
from looptape.trainer.step.pipeline import Pipeline
from looptape.trainer.step.plan import Asked, Backward, MicroResult
from looptape.trainer.step.reports import probe_report

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
        self.owner = owner
        self.compute_losses = compute_losses  # renewed in each trace: it may hold that trace's tensors
        self._variables = variables
        self.weights = weights
        self.combiner = combiner
        self.asked = Asked(None, None, None, None)
        self.refrozen = False  # since the latest call of `minimize`
        self.pipeline = Pipeline(owner, optimizer, combiner)
        self.spikes = SpikeGuard.of(owner)
        shared_features.check_options(owner, combiner)
        # The combiner measures gradients of each loss now and then: an update has two variants, see `_sometimes`.
        self._alternating = combiner.gradients_every > 1 and owner.head_gradients == "weighted"
        self._measuring = bool(combiner.gradients_every)
        self._micros = {}  # {form of the update: (`MicroStep`, the same as a traced function)}
        self._plans = {}  # {form of the update: `Plan` of its latest trace}
        self._persistent = set()  # forms whose trace needs a persistent tape

    @property
    def _form(self):
        """Which form of the update is being traced: (probing, examining, measuring)."""
        mode = self.owner.mode
        return mode.probing, mode.examining, self._measuring

    def _make_micro(self, form):
        """The `MicroStep` of a form."""
        probing, examining, measuring = form
        combiner, whole = self.combiner, self._one_part
        if measuring:
            backward = Backward.CUT if whole else Backward.PER_LOSS
        elif whole:
            backward = Backward.FOLDED
        else:
            backward = Backward.PER_LOSS if combiner.needs == "losses" else Backward.GROUPED
        reports = {"probes"} if probing else set()
        if examining:
            noisy = not (whole or self._alternating or combiner.rewrites or combiner.in_turns)
            reports |= {"health", "noise"} if noisy else {"health"}
        several = probing and len(self.names or ()) > 1
        return MicroStep(
            lambda *arguments: self.compute_losses(*arguments),
            self.owner,
            self._variables,
            self.weights,
            combiner,
            backward,
            dense=not whole or backward.per_loss or self._alternating or combiner.rewrites,
            reports=frozenset(reports),
            persistent=backward.per_loss or several or form in self._persistent,
        )

    @property
    def _one_part(self):
        """Whether an update is one forward pass: nothing is summed up."""
        return self.owner.replicas == 1 and self.owner.micro_batches == 1

    def _traced_micro(self):
        """(the micro-step of the present form, the same as a traced function that all micro-batches share)."""
        form = self._form
        if form not in self._micros:
            jit_compile = self.owner.jit_compile or None
            compiled = tf.function(self.run_micro, autograph=False, jit_compile=jit_compile)
            self._micros[form] = self._make_micro(form), compiled
        return self._micros[form]

    def run_micro(self, *arguments):
        """The `MicroResult` of the present form; keeps the plan that its trace yields."""
        form = self._form
        try:
            result, self._plans[form] = self.micro(*arguments)
        except SeveralGroups:
            self._persistent.add(form)
            self._micros.pop(form, None)
            raise
        return result

    @property
    def micro(self):
        return self._traced_micro()[0]

    @property
    def _compiled(self):
        return self._traced_micro()[1]

    @property
    def plan(self):
        """The `Plan` of the present form. After its trace."""
        return self._plans[self._form]

    @property
    def divided_ahead(self):
        """Whether the sums of gradients over the replicas come divided: each worker divides what it adds up.

        An examined update needs the sums themselves.
        """
        return self.owner.replicas > 1 and self.owner.replica_sums.connected and not self.owner.mode.examining

    def forget_probes(self):
        """Makes the next probed update trace anew."""
        self._micros = {form: made for form, made in self._micros.items() if not form[0]}

    def retrace(self):
        """Makes every next update trace anew: its batches are divided otherwise."""
        self._micros.clear()

    def forget(self, optimizer):
        """Makes every next update trace anew: other variables are trained. The trainer's own optimizer may be new."""
        self._micros.clear()
        self._plans.clear()
        self.refrozen = True
        self.pipeline.optimizer = optimizer if self.asked.optimizer is None else self.optimizer

    def renew(self, variables):
        """Trains these variables from now on: layers were frozen or unfrozen since the latest call of `minimize`."""
        self._variables, self.refrozen = lambda: variables, False

    @property
    def probed(self):
        """The `Plan` of the latest trace with probes."""
        return next(plan for form, plan in reversed(self._plans.items()) if form[0])

    @property
    def trained(self):
        """The variables that some loss reaches, in the order of the gradients. After the first trace."""
        live = next(iter(self._plans.values())).live
        return [variable for variable, reached in zip(self._variables(), live, strict=True) if reached]

    @property
    def names(self):
        """The names of the losses; None before the first trace."""
        return next((plan.losses.names for plan in self._plans.values()), None)

    @property
    def moved(self):
        """The variables that the forward pass assigns, as far as it was traced."""
        return next((plan.losses.moved for plan in self._plans.values()), [])

    @property
    def optimizer(self):
        return self.pipeline.optimizer

    @property
    def last(self):
        """A vector with the numbers of the latest update, see `packed_row`; None before the first trace."""
        return self.pipeline.last

    def from_iterator(self, iterator):
        """One update on the next `accumulation_steps` micro-batches, or as many as are left. Traced, one device."""

        def fetch(_):
            optional, seconds = timed(iterator.get_next_as_optional)
            return optional.has_value(), optional.get_value, seconds

        return self._accumulated(fetch, iterator.element_spec)

    def from_batch(self, batch):
        """One update on a batch that is split into its `micro_batches`. Traced, one device."""
        count = batches.most_parts(batch, self.owner.micro_batches)

        def fetch(index):
            return index < count, lambda: batches.slice_for_replica(batch, index, count), tf.zeros([])

        first = batches.slice_for_replica(batch, tf.constant(0), count)
        return self._accumulated(fetch, tf.nest.map_structure(tf.type_spec_from_value, first))

    def _accumulated(self, fetch, spec):
        return self.pipeline.run(self, *self._combined(lambda: self._accumulate(fetch, spec), lambda: spec))

    def from_parts(self, parts):
        """One update on a list of micro-batches, each split over the replicas. Traced or eager."""
        spec = lambda: tf.nest.map_structure(tf.type_spec_from_value, parts[0])  # noqa: E731
        if self.owner.replicas > 1:
            batches.check_divisible(parts[0], self.owner.replicas)
            if self._form not in self._plans:
                self.micro.outline(batches.with_all_rows(parts[0], self.owner.workers.count, self.owner.calls.own_rows))
            sum_up, look_again = self._distributed, self._distributed_losses
        else:
            sum_up, look_again = lambda parts: self._sum_parts(parts, None), self._losses_of
        if not self.combiner.needs_losses_after:
            return self.pipeline.run(self, *self._combined(lambda: (sum_up(parts)[0], None), spec))
        result, states = sum_up(parts)
        result = self._whole(result)
        return self.pipeline.run(self, result, combination.combine(self, result), lambda: look_again(parts, states))

    def _distributed(self, parts):
        """(the sums of all replicas' shares of the parts, the state with which each replica began each part)."""
        result, states = self.owner.strategy.run(self._replica, args=(parts,))
        return self._first(result), states

    def _distributed_losses(self, parts, states):
        """As `_losses_of`, with each replica's states; the losses are those of all replicas."""
        return self._first(self.owner.strategy.run(self._losses_of_replica, args=(parts, states)))

    def _first(self, results):
        """The value of the first replica of this process; all replicas have the same."""
        return tf.nest.map_structure(lambda x: self.owner.strategy.experimental_local_results(x)[0], results)

    def _combined(self, make, spec):
        """(the sums of an update, what the combiner makes of them).

        Args:
            make: gives the sums, and the seconds that it waited for data or None.
            spec: function that gives the specification of a micro-batch.
        """
        if self._alternating:
            return self._sometimes(make, spec)
        result, waited = make()
        if waited is not None:
            self.owner.ledger.waited(waited)
        result = self._whole(result)
        return result, combination.combine(self, result)

    def _whole(self, result):
        return result._replace(divisors=self.plan.losses.whole(result.divisors))

    def _sometimes(self, make, spec):
        """As `_combined`, with a gradient for each loss only in updates in which the combiner measures them."""
        if self.combiner.names is None:
            self._outline(spec())
        like = []

        def variant(measuring):
            self._measuring = measuring
            result, waited = make()
            result = self._whole(result)
            combined = combination.combine(self, result)
            losses, present, measured = combined.seen
            if measuring:
                like.append(measured)
            elif like:
                measured = tf.zeros(like[0].shape, like[0].dtype)
            kept = result._replace(gradients=None, products=None, total=None, coefficients=None, measured=None)
            return kept, combined._replace(seen=(losses, present, measured)), waited

        due = self.combiner.due()
        if tf.executing_eagerly():
            result, combined, waited = variant(bool(due))
        else:
            result, combined, waited = tf.cond(due, lambda: variant(True), lambda: variant(False))
        if waited is not None:
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
            sums, divisors = replica_sums.all_reduce((sums, divisors))
        return tf.math.divide_no_nan(sums, tf.stack(self.plan.losses.whole(tf.unstack(divisors))))

    def _losses_of_replica(self, parts, states):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return self._losses_of(self._shares(parts, replica), states, replica)

    def _shares(self, parts, replica):
        return [batches.share_of_replica(part, replica, self.owner, self.owner.calls.own_rows) for part in parts]

    def _sum_parts(self, parts, replica):
        """(the sum of the parts' results, the state each of them began with)."""
        owner, totals, states = self.owner, None, []
        state = owner.read_state()
        micro = self._compiled if owner.jit_compile and not owner.run_eagerly else self.run_micro
        for part in parts:
            states.append(list(state))
            result = micro(part, state, owner.step.value(), owner.loss_scale.value(), replica)
            if replica is not None or len(parts) > 1:  # a share, or what is past the end of the data, may be empty
                result = accumulation.leave_out_empty(result, [state[index] for index in self._moved_indices()])
            totals = result if totals is None else accumulation.add(totals, result)
            for index, value in zip(self._moved_indices(), result.state, strict=True):
                state[index] = value
        return totals, states

    def _replica(self, parts):
        """As `_distributed`, for one replica and its share of the parts. In a replica context."""
        owner, replica = self.owner, tf.distribute.get_replica_context().replica_id_in_sync_group
        before = owner.read_state()
        own, states = self._sum_parts(self._shares(parts, replica), replica)
        before = [before[index] for index in self._moved_indices()]
        kinds = owner.kinds_of_state(self.plan.losses.moved)
        others = accumulation.additive(own)
        gradients = others.pop("gradients")
        early, factors = {}, None
        if self.divided_ahead:
            early = {"divisors": owner.replica_sums.ahead(others.pop("divisors"))}
            factors = combination.divisions(self, self.plan.losses.whole(early["divisors"]))
        others = others, () if own.report is None else own.report
        changes = accumulation.changes_of_replica(before, own.state, *kinds, own.examples)
        gradients, ((sums, report), changes) = owner.replica_sums(gradients, (others, changes), factors)
        result = own._replace(gradients=gradients, **sums, **early, report=None if own.report is None else report)
        state = accumulation.merged(before, changes, *kinds, result.examples)
        return result._replace(state=state), states if self.combiner.needs_losses_after else None

    def _moved_indices(self):
        positions = {id(v): index for index, v in enumerate(self.owner.forward_state.variables())}
        return [positions[id(variable)] for variable in self.plan.losses.moved]

    def _accumulate(self, fetch, spec):
        owner = self.owner
        step, scale = owner.step.value(), owner.loss_scale.value()
        state = owner.read_state()
        outputs = self._compiled.get_concrete_function(spec, state, step, scale).structured_outputs
        # Compiled by XLA it is one operation. Otherwise it is better in line: a function gives all its gradients at
        # once, at its end, which costs memory and the overlap of the sums with the backward pass.
        micro = self._compiled if owner.jit_compile else self.run_micro
        zeros = tf.nest.map_structure(lambda x: tf.zeros(x.shape, x.dtype), accumulation.additive(outputs))
        empty = [] if outputs.report is None else [probe_report.zeros_like(outputs.report)]  # a loop holds no None
        moved = self._moved_indices()

        def body(count, ended, waited, totals, report, moving):
            available, get_batch, seconds = fetch(count)
            waited = waited + seconds

            def run():
                present = list(state)
                for index, value in zip(moved, moving, strict=True):
                    present[index] = value
                result = micro(get_batch(), present, step, scale)
                summed = tf.nest.map_structure(tf.add, totals, accumulation.additive(result))
                found = [probe_report.add(report[0], result.report)] if report else []
                return count + 1, tf.constant(False), waited, summed, found, list(result.state)

            def end():
                return count, tf.constant(True), waited, totals, report, moving

            return tf.cond(available, run, end)

        initial = (tf.constant(0), tf.constant(False), tf.zeros([]), zeros, empty, [state[index] for index in moved])
        shapes = tf.nest.map_structure(lambda x: x.shape, initial)
        if outputs.report is not None:  # lengths of time that are not known may grow
            shapes = (*shapes[:4], [tf.nest.map_structure(lambda x: x.shape, outputs.report)], shapes[5])
        count, _, waited, totals, report, moving = tf.while_loop(
            lambda count, ended, *_: (count < owner.micro_batches) & ~ended,
            body,
            initial,
            shape_invariants=shapes,
            parallel_iterations=2,
        )
        with tf.control_dependencies([tf.debugging.Assert(count > 0, [END_OF_DATA])]):
            totals = tf.nest.map_structure(tf.identity, totals)
        coefficients = None
        if not self.micro.backward.per_loss and not combination.is_plain_sum(self.combiner):
            coefficients = self.combiner.coefficients(None, None, None)
        absent = dict.fromkeys(MicroResult._fields)
        rest = {"coefficients": coefficients, "state": moving, "report": report[0] if report else None}
        return MicroResult(**{**absent, **totals, **rest}), waited

    def explain_refusal(self):
        """Raises an error about the losses of the latest update, if the combiner cannot take them. On the host."""
        losses = self.owner.ledger.last(self)["loss"]
        self.combiner.validate([losses.get(name) for name in self.names], [name in losses for name in self.names])
