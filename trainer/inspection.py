"""Gradients of every time step of one batch, for notebooks and tests. Nothing is trained and no state moves."""

import tensorflow as tf

from trainer import batches, microstep, probing
from trainer.state import raw, traced


class Inspection:
    """Looks at one batch of a trainer."""

    def __init__(self, owner):
        self._owner = owner

    def timestep_gradients(self, batch, per_example=False, full=False):
        """{layer: {quantity: array}}; see `Trainer.timestep_gradients`."""

        def look(tape, session, means, examples):
            gradients = tape.gradient(list(means.values()), session.sources)
            if per_example or full:
                return session.report(gradients, examples)
            return session.totals(gradients, examples)

        found, shapes = look_at(self._owner, batch, look, per_example=per_example, full=full)
        if per_example or full:
            vectors, _ = probing.present_examples(found, shapes)
            return vectors
        return probing.present(found, shapes).vectors

    def sum_check(self, batch):
        """{variable path: relative error}; see `Trainer.check_timestep_sum`."""
        variables = self._owner.trainable_variables

        def look(tape, session, means, examples):
            sources = [raw(variable) for variable in variables]
            gradients = tape.gradient(list(means.values()), sources + session.sources)
            gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
            return session.sum_check(gradients[len(sources) :], variables, gradients[: len(sources)])

        found, _ = look_at(self._owner, batch, look, reports=lambda found: [], weights="full")
        return {path: float(error) for path, error in found.items()}


def look_at(owner, batch, look, *, reports=lambda found: [found], persistent=False, compiled=True, **options):
    """Runs `look(tape, session, means, examples)` after a probed forward pass. Returns (its result, shapes).

    Args:
        owner: the trainer.
        batch: as the dataset gives it.
        look: what to make of the tape, the `ProbeSession`, the weighted means {loss: scalar} and the examples.
        reports: which parts of its result are reports, in which a `probe` may have gone beyond its capacity.
        persistent: the tape is asked several times.
        compiled: by XLA, if the trainer's updates are.
        options: of the session.
    """
    batch = owner.take_batch(batch)
    noted = {}

    def run(batch):
        first = tf.nest.flatten(batch)[0]
        with tf.GradientTape(persistent=persistent, watch_accessed_variables=False) as tape:
            tape.watch([raw(variable) for variable in owner.trainable_variables])
            session = probing.ProbeSession(
                owner.model, capacity=owner.probe_capacity, batch=tf.shape(first)[0], tape=tape, **options
            )
            terms = microstep.probed_terms(owner, batch, session)
            means = dict(zip(terms, weighted_means(owner, terms), strict=True))
        if not session.layers:
            raise ValueError(
                "There is nothing to look at: the model has no recurrent layer and no `probe` was reached. "
                "Call `probe(name, tensor, t)` in your loop."
            )
        noted["shapes"] = dict(session.shapes)
        return look(tape, session, means, batches.count_examples(batch))

    for _ in range(16):
        function = run if owner.run_eagerly else traced(run, jit_compile=(compiled and owner.jit_compile) or None)
        found = function(batch)
        missing = {}
        for report in reports(found):
            missing |= probing.missing_capacity(report, noted["shapes"])
        if not missing:
            break
        owner.probe_capacity |= missing
    return found, noted["shapes"]


def weighted_means(owner, terms):
    """Each loss's weighted mean, with the present static or scheduled weights."""
    weights = owner.loss_weights.scalars(list(terms), owner.step)
    return [w * microstep.safe_mean(term) for w, term in zip(weights, terms.values(), strict=True)]
