"""Evaluation and prediction: forward passes only, which leave the training's state and metrics alone."""

import contextlib
import time

import numpy as np
import tensorflow as tf

from looptape.trainer.arguments import check_batch_count, check_integer
from looptape.trainer.data import batches
from looptape.trainer.data.adapters import as_dataset, as_inputs, check_data
from looptape.trainer.data.by_worker.indexed_data import IndexedData
from looptape.trainer.data.source import end
from looptape.trainer.distribution import replica_sums
from looptape.trainer.evaluation import forward_only
from looptape.trainer.evaluation.evaluation_sets import evaluate_sets, named_sets
from looptape.trainer.evaluation.results import metric_results, own_tag, static_sum
from looptape.trainer.step import accumulation
from looptape.trainer.step.forward import loss_terms
from looptape.trainer.step.forward.loss_weights import refuse_metrics_named_like_losses
from looptape.trainer.variables import raw, recurrent_states, traced

# Batches of the first call, and seconds that later ones take: bounds the time in which a signal waits.
_FIRST_BATCHES, _SECONDS_PER_CALL = 8, 0.5
_SAMPLES = 8  # examples of an `IndexedData` that workers compare before an evaluation; one more follows each call


class Layout:
    """Running sums of one trace of the evaluation: names of the losses, names logged, and the sums in float64."""

    def __init__(self, names, logged, make_variable):
        self.names, self.logged = names, logged
        # In float32 a sum stops growing by what a batch adds to it, after some 10^5 batches.
        self.sums = make_variable(np.zeros(2 * len(names) + len(logged) + 1, np.float64), "eval_sums")


class Evaluation:
    """Evaluates and predicts for a trainer; keeps the traced functions between calls."""

    def __init__(self, owner):
        self._owner = owner
        self._loops = {}  # {(`_own_rows`, `_asking`): the traced loop over batches}
        self._own_rows = False  # batches have the rows of this worker only, and not those of all
        self._draw = None  # gives the checksum of examples by which the workers compare data of which each has rows
        self._asking = False  # before each batch the workers ask each other whether their data have ended
        self._predict = traced(self._outputs)
        self.tags = {}  # {result: TensorBoard's tag} of the latest evaluation
        self._layouts = []
        self._layout = None  # index of the one being traced
        self._updated = {}  # {metric: whether a batch moves its variables}, as the latest trace found it
        self._shown = set()  # metrics that the present evaluation has updated
        self._batches_per_second = None
        self._between_calls = None  # a function that may end an evaluation by an exception

    @contextlib.contextmanager
    def interrupted_by(self, check):
        """A context in which `check` is called between the traced calls: it may end an evaluation by an exception."""
        self._between_calls = check
        try:
            yield
        finally:
            self._between_calls = None

    def evaluate(self, dataset, steps=None, batch_size=32):
        """{result: number} of a dataset, or of several by their names; see `Trainer.evaluate`."""
        check_integer("batch_size", batch_size, 1, "It is the number of examples in a batch.")
        sets = named_sets(dataset)
        if sets is None:
            results, self.tags = self._evaluate(dataset, steps, batch_size)
        else:
            results, self.tags = evaluate_sets(sets, lambda data: self._evaluate(data, steps, batch_size))
        return results

    def _evaluate(self, dataset, steps, batch_size):
        """({result: number}, {result: tag}) of one dataset."""
        owner = self._owner
        self._own_rows = isinstance(dataset, IndexedData) and owner.workers.count > 1
        description = repr(dataset) if self._own_rows else ""
        self._draw = dataset.samples.draw if self._own_rows else None
        dataset = check_finite(as_dataset(dataset, batch_size, workers=owner.workers), steps, "evaluate")
        self._compare(dataset, steps, description)
        owner.build(dataset.element_spec)
        iterator = iter(dataset)
        with self._leaving_state(), owner.constants.noting("evaluation"):
            for metric in owner.metrics.values():
                metric.reset_state()
            results = self._results(self._run(iterator, steps))
        end(iterator, dataset)
        return results

    def _compare(self, dataset, steps, description):
        """Refuses workers with other arguments or examples, or different numbers of batches: some would wait."""
        workers, length = self._owner.workers, int(dataset.cardinality())
        self._asking = workers.count > 1 and length == tf.data.UNKNOWN_CARDINALITY
        workers.check_same(
            shape_of_the_batches_to_evaluate=dataset.element_spec,
            number_of_batches_to_evaluate=(length, steps),
            data_to_evaluate=description,
        )
        if self._own_rows:
            workers.check_same(data_to_evaluate=self._draw(_SAMPLES))

    @contextlib.contextmanager
    def _leaving_state(self):
        """A context that begins with recurrent states of zero and puts every state back; explains failed checks."""
        owner = self._owner
        variables = [raw(variable) for variable in owner.forward_state.variables()]
        kept = owner.read_state()
        try:
            for state in recurrent_states(owner.model):
                state.assign(tf.zeros_like(raw(state)))
            yield
        except tf.errors.InvalidArgumentError as error:
            loss_terms.explain_assertion(error)
            raise
        finally:
            for variable, value in zip(variables, kept, strict=True):
                variable.assign(value)

    def predict(self, dataset, steps=None, batch_size=32):
        check_integer("batch_size", batch_size, 1, "It is the number of examples in a batch.")
        # The rows of what comes back are those of the examples.
        dataset = dataset.in_order() if isinstance(dataset, IndexedData) else as_inputs(dataset, self._owner.model)
        batches_of = check_finite(as_dataset(dataset, batch_size), steps, "predict")
        with self._leaving_state(), self._owner.constants.noting("predict"):
            outputs = self._predictions(batches_of, steps)
        if not outputs:
            raise ValueError("There is nothing to predict: the dataset has no batch.")
        return tf.nest.map_structure(lambda *parts: np.concatenate(parts, axis=0), *outputs)

    def _predictions(self, dataset, steps):
        """[outputs of a batch] as arrays."""
        outputs = []
        function = self._outputs if self._owner.run_eagerly else self._predict
        for index, batch in enumerate(dataset):
            if steps is not None and index >= steps:
                break
            outputs.append(tf.nest.map_structure(lambda x: x.numpy(), function(batch)))
        return outputs

    def _outputs(self, batch):
        return self._owner.trainer.call_model(batches.unpack(batch)[0], False)

    def _run(self, iterator, steps):
        """Sums over the batches. Returns their layout."""
        for layout in self._layouts:
            layout.sums.assign(tf.zeros_like(layout.sums))
        self._shown = set()
        done, layout, checksum = 0, None, 0
        while steps is None or done < steps:
            rate, started = self._batches_per_second, time.monotonic()
            count = _FIRST_BATCHES if rate is None else max(int(rate * _SECONDS_PER_CALL), 1)
            count = self._owner.workers.chiefs(count if steps is None else min(count, steps - done))
            if self._owner.run_eagerly:
                (made, checksum), index = self._eager(iterator, count, checksum), self._layout
            else:
                evaluate = self._loops.setdefault((self._own_rows, self._asking), traced(self._loop))
                arguments = iterator, tf.constant(count), tf.constant(checksum, tf.int64)
                *numbers, updated = evaluate(*arguments)
                made, checksum, index = map(int, numbers)
                self._show(dict(zip(self._owner.metrics, updated.numpy(), strict=False)))
            if made < 0:
                raise self._owner.workers.uneven()
            # Of all batches up to here: workers whose results differ would go different ways.
            self._owner.workers.check_same(data_to_evaluate=self._draw() if self._own_rows else checksum)
            done, layout = done + made, index
            if made < count:
                break
            self._batches_per_second = made / max(time.monotonic() - started, 1e-6)
            if self._between_calls is not None:
                self._between_calls()
        if not done:
            raise ValueError("There is nothing to evaluate: the dataset has no batch.")
        return self._layouts[layout]

    def _eager(self, iterator, count, checksum):
        """(batches evaluated, checksum of all batches so far)."""
        for index in range(count):
            batch = next(iterator, None)
            if self._asking:
                self._owner.workers.all_have(batch is not None)
            if batch is None:
                return index, checksum
            checksum = int(self._add_checksum(tf.constant(checksum, tf.int64), batch))
            self._step(batch)
            self._show(self._updated)
        return count, checksum

    def _show(self, updated):
        """Notes metrics that have results: one that no batch updates would show its initial value, mostly 0."""
        self._shown |= {name for name, moved in updated.items() if moved}

    def _add_checksum(self, checksum, batch):
        """The checksum of one more batch, where the workers compare whole batches. Traced or eager."""
        if self._owner.workers.count == 1 or self._own_rows:
            return checksum
        return checksum * 1_000_003 + batches.checksum(batch)

    def _loop(self, iterator, count, checksum):
        """(batches evaluated, checksum of all so far, index of the layout of their sums, which metrics move). Traced.

        A dataset of another structure may have another layout. The number is −1 if the data of only some workers ended.
        """

        def body(done, _, checksum):
            optional = iterator.get_next_as_optional()
            available, some = optional.has_value(), tf.constant(False)
            if self._asking:
                available, some = self._owner.workers.have_next(available)

            def run():
                batch = optional.get_value()
                added = self._add_checksum(checksum, batch)
                self._step(batch)
                return done + 1, tf.constant(False), added

            return tf.cond(available, run, lambda: (tf.where(some, -1, done), tf.constant(True), checksum))

        initial = (tf.constant(0), tf.constant(False), checksum)
        done, _, checksum = tf.while_loop(
            lambda done, ended, _: (done < count) & ~ended, body, initial, parallel_iterations=1
        )
        return done, checksum, tf.constant(self._layout), tf.constant(list(self._updated.values()), tf.bool)

    def _step(self, batch):
        owner = self._owner
        if owner.replicas == 1:
            row, moved, values, _, described = self._forward(batch)
        else:
            batches.check_divisible(batch, owner.replicas)
            noted = []  # what moved, and names: Python objects, which do not leave the replicas as results
            row, values = owner.strategy.run(lambda part: self._replica(part, noted), args=(batch,))
            first = lambda x: owner.strategy.experimental_local_results(x)[0]  # noqa: E731
            row, values, (moved, described) = first(row), [first(value) for value in values], noted[0]
        self._layout = self._find_layout(*described)
        found = {id(variable) for variable in moved}
        self._updated = {
            name: not metric.variables or any(id(variable) in found for variable in metric.variables)
            for name, metric in owner.metrics.items()
        }
        self._layouts[self._layout].sums.assign_add(tf.cast(row, tf.float64))
        for variable, value in zip(moved, values, strict=True):
            raw(variable).assign(value)

    def _find_layout(self, names, logged):
        for index, layout in enumerate(self._layouts):
            if (layout.names, layout.logged) == (names, logged):
                return index
        self._layouts.append(Layout(names, logged, self._owner.make_variable))
        return len(self._layouts) - 1

    def _forward(self, batch):
        """(sums of a batch, what it moved, the new values, number of examples, names of losses and of logs)."""
        owner = self._owner
        terms, logged, examples, moved, values = forward_only.forward_only(owner.hook("eval_step"), owner, batch)
        row = [term.sum for term in terms.values()] + [term.divisor for term in terms.values()]
        row = tf.stack([*row, *(value * examples for value in logged.values()), examples])
        return row, moved, values, examples, (list(terms), list(logged))

    def _replica(self, batch, noted):
        """(sums over all replicas, new values of what moved): each replica evaluates its share of a batch."""
        owner = self._owner
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        share = batches.share_of_replica(batch, replica, owner, self._own_rows)
        with owner.carrying.sharing(replica, owner.model):
            row, moved, values, examples, described = self._forward(share)
        noted.append((moved, described))
        before = [owner.read(variable) for variable in moved]
        present = examples > 0
        values = [tf.where(present, new, old) for new, old in zip(values, before, strict=True)]
        kinds = owner.kinds_of_state(moved)
        changes = accumulation.changes_of_replica(before, values, *kinds, examples)
        row, changes = replica_sums.all_reduce((tf.where(present, row, tf.zeros_like(row)), changes))
        return row, accumulation.merged(before, changes, *kinds, row[-1])

    def _results(self, layout):
        owner, names, count = self._owner, layout.names, len(layout.names)
        values = layout.sums.numpy()
        sums, divisors = values[:count], values[count : 2 * count]
        results = {name: s / d for name, s, d in zip(names, sums, divisors, strict=True) if d > 0}
        total = static_sum(results, owner.loss_weights)
        # The total keeps its name, also beside a loss of that name, as in the logs of the training.
        results = {"loss": total} | {name: float(value) for name, value in results.items() if name != "loss"}
        for name, value in zip(layout.logged, values[2 * count : -1], strict=True):
            results.setdefault(name, float(value / values[-1]))
        refuse_metrics_named_like_losses(names, owner.metrics)
        for name, metric in owner.metrics.items():
            if name in self._shown:
                results.update(metric_results(owner, name, metric))
        same = len(names) == 1 and results.get(names[0]) == results["loss"]  # the sum of one loss is that loss
        tags = {name: own_tag(name) if name in layout.logged else f"metrics/{name}" for name in results}
        tags |= {name: f"loss/{name}" for name in names}
        return results, {**tags, "loss": f"loss/{names[0]}" if same else "loss/sum"}


def check_sets(data, steps):
    """Checks before the first step what `fit` is to evaluate on: one dataset, several by name, or None."""
    if data is None:
        return
    for name, each in (named_sets(data) or {"": data}).items():
        try:
            check_data(each)
        except (TypeError, ValueError) as error:
            known = f"The evaluation set {name!r}" if name else "`eval_dataset`"
            raise type(error)(f"{known} cannot be used. {error}") from None
        if isinstance(each, tf.data.Dataset):
            check_finite(each, steps, "evaluate in `fit`")


def check_finite(dataset, steps, what):
    """The dataset, if it ends or only `steps` batches of it are asked for."""
    argument = "eval_steps" if what == "evaluate in `fit`" else "steps"
    check_batch_count(argument, steps)
    if steps is None and dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"The dataset to {what} is infinite: this would never end. Take a part of it (`dataset.take(100)`), leave "
            f"out `repeat()`, or say how many batches ({argument}=100)."
        )
    return dataset
