"""Gradients of every time step of one batch, for notebooks and tests. Trains nothing and changes no state."""

import tensorflow as tf

from looptape.trainer import probing
from looptape.trainer.data import batches
from looptape.trainer.evaluation import forward_only
from looptape.trainer.step.forward.loss_terms import safe_mean
from looptape.trainer.variables import raw, traced


class Inspection:
    """Computes gradients of one batch of a trainer."""

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


def timestep_gradients_by_loss(owner, batch):
    """({loss: {layer: {quantity: [time]}}}, {layer: {loss: [time]}}); see `Trainer.timestep_gradients_by_loss`."""
    names = []

    def look(tape, session, means, examples):
        each = {name: tape.gradient(mean, session.sources) for name, mean in means.items()}
        each = {name: own for name, own in each.items() if any(gradient is not None for gradient in own)}
        names[:] = each
        totals = [session.totals(own, examples) for own in each.values()]
        return totals, probing.shares(session.products(list(each.values())))

    options = {"reports": lambda found: found[0], "persistent": True, "compiled": False, "full": True}
    (totals, shares), shapes = look_at(owner, batch, look, **options)
    vectors = {name: probing.present(own, shapes).vectors for name, own in zip(names, totals, strict=True)}
    lengths = {layer: next(iter(values.values())).shape[0] for layer, values in vectors[names[0]].items()}
    return vectors, {
        layer: dict(zip(names, own.numpy()[:, : lengths[layer]], strict=True)) for layer, own in shares.items()
    }


def look_at(owner, batch, look, *, reports=lambda found: [found], persistent=False, compiled=True, **options):
    """Runs `look(tape, session, means, examples)` after a probed forward pass. Returns (its result, shapes).

    Args:
        owner: the trainer.
        batch: a batch of the dataset.
        look: function of the tape, the `ProbeSession`, the weighted means {loss: scalar} and the number of examples.
        reports: selects the reports in its result, in which a `probe` may have exceeded its capacity.
        persistent: whether the tape is used several times.
        compiled: whether to compile with XLA if the trainer compiles its updates.
        options: options of the session.
    """
    batch = owner.take_batch(batch)
    noted = {}

    def run(batch):
        first = tf.nest.flatten(batch)[0]
        with tf.GradientTape(persistent=persistent, watch_accessed_variables=False) as tape:
            tape.watch([raw(variable) for variable in owner.trainable_variables])
            own = {"capacity": owner.probe_capacity, "batch": tf.shape(first)[0], "only": owner.probe_layers}
            session = probing.ProbeSession(owner.model, tape=tape, **own, **options)
            terms = forward_only.probed_terms(owner, batch, session)
            means = dict(zip(terms, weighted_means(owner, terms), strict=True))
        if not session.layers:
            raise ValueError(
                "There are no time steps to examine: the model has no recurrent layer and no `probe` ran. "
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
        owner.probe_capacity.update(missing)
    return found, noted["shapes"]


def weighted_means(owner, terms):
    """Returns the weighted mean of each loss, with the current static or scheduled weights."""
    weights = owner.loss_weights.scalars(list(terms), owner.step)
    return [w * safe_mean(term) for w, term in zip(weights, terms.values(), strict=True)]
