"""The gradients of every time step, of each loss by itself, for notebooks and tests."""

import tensorflow as tf

from trainer import batches, inspection, microstep, probing
from trainer.state import raw, traced


def timestep_gradients_by_loss(owner, batch):
    """({loss: {layer: {quantity: [time]}}}, {layer: {loss: [time]}}); see `Trainer.timestep_gradients_by_loss`."""
    batch = tf.nest.map_structure(tf.convert_to_tensor, batch)
    owner.build(tf.nest.map_structure(tf.type_spec_from_value, batch))
    noted = {}

    def run(batch):
        first = tf.nest.flatten(batch)[0]
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch([raw(variable) for variable in owner.trainable_variables])
            session = probing.ProbeSession(
                owner.model, capacity=owner.probe_capacity, batch=tf.shape(first)[0], tape=tape, full=True
            )
            terms = microstep.probed_terms(owner, batch, session)
            means = inspection.weighted_means(owner, terms)
        if not session.layers:
            raise ValueError(
                "There is nothing to look at: the model has no recurrent layer and no `probe` was reached. "
                "Call `probe(name, tensor, t)` in your loop."
            )
        noted.update(names=list(terms), shapes=dict(session.shapes))
        each = [tape.gradient(mean, session.sources) for mean in means]
        reached = [any(gradient is not None for gradient in own) for own in each]
        noted["reached"] = reached
        examples = batches.count_examples(batch)
        totals = [session.totals(own, examples) for own, ok in zip(each, reached, strict=True) if ok]
        kept = [own for own, ok in zip(each, reached, strict=True) if ok]
        return totals, probing.shares(session.products(kept))

    for _ in range(16):
        totals, shares = (run if owner.run_eagerly else traced(run))(batch)
        missing = {}
        for own in totals:
            missing |= probing.missing_capacity(own, noted["shapes"])
        if not missing:
            break
        owner.probe_capacity |= missing
    names = [name for name, ok in zip(noted["names"], noted["reached"], strict=True) if ok]
    vectors = {name: probing.present(own, noted["shapes"]).vectors for name, own in zip(names, totals, strict=True)}
    lengths = {layer: next(iter(values.values())).shape[0] for layer, values in vectors[names[0]].items()}
    return vectors, {
        layer: dict(zip(names, own.numpy()[:, : lengths[layer]], strict=True)) for layer, own in shares.items()
    }
