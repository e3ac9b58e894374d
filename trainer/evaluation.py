"""Evaluation and prediction: forward passes only, which leave the training's state and metrics alone."""

import time

import numpy as np
import tensorflow as tf

from trainer import batches, merging, microstep, stages
from trainer.datasets import as_dataset, as_inputs
from trainer.state import raw, recurrent_states, traced

# Batches of the first call, and seconds that later ones take: bounds the time in which a signal waits.
_FIRST_BATCHES, _SECONDS_PER_CALL = 8, 0.5


class Evaluation:
    """Evaluates and predicts for a trainer; keeps the traced functions between calls."""

    def __init__(self, owner):
        self._owner = owner
        self._evaluate = traced(self._loop)
        self._predict = traced(self._outputs)
        self._sums = self.names = self._logged = None
        self._batches_per_second = None
        self.between_calls = None  # a function that may end an evaluation by an exception

    def evaluate(self, dataset, steps=None, batch_size=32):
        owner = self._owner
        dataset = check_finite(as_dataset(dataset, batch_size), steps, "evaluate")
        owner.build(dataset.element_spec)
        iterator = iter(dataset)
        variables = [raw(variable) for variable in owner.forward_state.variables()]
        kept = owner.read_state()
        try:
            for metric in owner.metrics.values():
                metric.reset_state()
            for state in recurrent_states(owner.model):
                state.assign(tf.zeros_like(raw(state)))
            self._run(iterator, steps)
            return self._results()
        finally:
            for variable, value in zip(variables, kept, strict=True):
                variable.assign(value)

    def predict(self, dataset, steps=None, batch_size=32):
        outputs = []
        dataset = as_inputs(dataset, self._owner.model)
        for index, batch in enumerate(check_finite(as_dataset(dataset, batch_size), steps, "predict")):
            if steps is not None and index >= steps:
                break
            function = self._outputs if self._owner.run_eagerly else self._predict
            outputs.append(tf.nest.map_structure(lambda x: x.numpy(), function(batch)))
        if not outputs:
            raise ValueError("There is nothing to predict: the dataset has no batch.")
        return tf.nest.map_structure(lambda *parts: np.concatenate(parts, axis=0), *outputs)

    def _outputs(self, batch):
        return self._owner.call_model(batches.unpack(batch)[0], False)

    def _run(self, iterator, steps):
        if self._sums is not None:
            self._sums.assign(tf.zeros(self._sums.shape))
        done = 0
        while steps is None or done < steps:
            rate, started = self._batches_per_second, time.monotonic()
            count = _FIRST_BATCHES if rate is None else max(int(rate * _SECONDS_PER_CALL), 1)
            count = self._owner.workers.chiefs(count if steps is None else min(count, steps - done))
            if self._owner.run_eagerly:
                made = self._eager(iterator, count)
            else:
                made = int(self._evaluate(iterator, tf.constant(count)))
            done += made
            if made < count:
                break
            self._batches_per_second = made / max(time.monotonic() - started, 1e-6)
            if self.between_calls is not None:
                self.between_calls()
        if not done:
            raise ValueError("There is nothing to evaluate: the dataset has no batch.")

    def _eager(self, iterator, count):
        for index in range(count):
            batch = next(iterator, None)
            if batch is None:
                return index
            self._step(batch)
        return count

    def _loop(self, iterator, count):
        def body(done, _):
            optional = iterator.get_next_as_optional()

            def run():
                self._step(optional.get_value())
                return done + 1, tf.constant(False)

            return tf.cond(optional.has_value(), run, lambda: (done, tf.constant(True)))

        initial = (tf.constant(0), tf.constant(False))
        return tf.while_loop(lambda done, ended: (done < count) & ~ended, body, initial, parallel_iterations=1)[0]

    def _step(self, batch):
        owner = self._owner
        if owner.replicas == 1:
            row, moved, values, _ = self._forward(batch)
        else:
            batches.check_divisible(batch, owner.replicas)
            noted = []  # what moved: Python objects, which do not leave the replicas as results
            row, values = owner.strategy.run(lambda part: self._replica(part, noted), args=(batch,))
            first = lambda x: owner.strategy.experimental_local_results(x)[0]  # noqa: E731
            row, values, moved = first(row), [first(value) for value in values], noted[0]
        if self._sums is None:
            self._sums = owner.make_variable(np.zeros(row.shape, np.float32), "eval_sums")
        self._sums.assign_add(row)
        for variable, value in zip(moved, values, strict=True):
            raw(variable).assign(value)

    def _forward(self, batch):
        """(sums of a batch, what it moved, the new values, number of examples)."""
        owner = self._owner
        terms, logged, examples, moved, values = microstep.forward_only(owner.hook("eval_step"), owner, batch)
        row = [term.sum for term in terms.values()] + [term.divisor for term in terms.values()]
        row = tf.stack([*row, *(value * examples for value in logged.values()), examples])
        self.names, self._logged = list(terms), list(logged)
        return row, moved, values, examples

    def _replica(self, batch, noted):
        """(sums over all replicas, new values of what moved): each replica evaluates its share of a batch."""
        owner = self._owner
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        row, moved, values, examples = self._forward(batches.slice_for_replica(batch, replica, owner.replicas))
        noted.append(moved)
        before = [owner.read(variable) for variable in moved]
        present = examples > 0
        row = stages.all_reduce(tf.where(present, row, tf.zeros_like(row)))
        values = [tf.where(present, new, old) for new, old in zip(values, before, strict=True)]
        metrics = owner.forward_state.are_metrics(moved)
        return row, merging.merge_replicas(before, values, metrics, examples, row[-1])

    def _results(self):
        owner, count = self._owner, len(self.names)
        values = self._sums.numpy().astype(np.float64)
        sums, divisors = values[:count], values[count : 2 * count]
        results = {name: s / d for name, s, d in zip(self.names, sums, divisors, strict=True) if d > 0}
        total = static_sum(results, owner.loss_weights)
        # The total keeps its name, also beside a loss of that name, as in the logs of the training.
        results = {"loss": total} | {name: float(value) for name, value in results.items() if name != "loss"}
        for name, value in zip(self._logged, values[2 * count : -1], strict=True):
            results[name] = float(value / values[-1])
        for name, metric in owner.metrics.items():
            if name in self.names:
                raise ValueError(
                    f"{name!r} is the name of a loss and of a metric; one would hide the other. Give the metric "
                    f"another name, e.g. metrics={{'{name}_{metric.name}': …}}."
                )
            results.update(metric_results(owner, name, metric))
        return results


def check_finite(dataset, steps, what):
    """The dataset, if it ends or only `steps` batches of it are asked for."""
    if steps is None and dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"The dataset to {what} is infinite: this would never end. Take a part of it (`dataset.take(100)`), leave "
            f"out `repeat()`, or say how many batches ({'eval_steps' if what == 'evaluate in `fit`' else 'steps'}=100)."
        )
    return dataset


def static_sum(losses, weights):
    """The statically weighted sum of {name: value}: comparable over time and across combiners. NaN of none."""
    if not losses:
        return float("nan")
    static = weights.static() if len(weights) else {}
    return float(sum(static.get(name, 1.0) * value for name, value in losses.items()))


def metric_results(trainer, name, metric):
    """{name: float} of a metric on the host; one with several results names each."""
    if trainer.replicas == 1:
        result = metric.result()
    else:
        result = metric.stateless_result([trainer.read(variable) for variable in metric.variables])
    if isinstance(result, dict):
        return {key: float(value) for key, value in result.items()}
    array = np.asarray(result)
    if array.ndim == 0:
        return {name: float(array)}
    return {f"{name}/{index}": float(value) for index, value in enumerate(array.ravel())}
