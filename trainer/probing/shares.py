"""Which loss drives the state gradient at which time step: ⟨λᵏ_t, λ_t⟩ / ‖λ_t‖², the share of loss k.

Shares do not add up over micro-batches, nor do they survive another weighting of the losses. The inner products of the
losses' state gradients do: they are summed, and the shares are computed from them at the end, for any weights.
"""

import tensorflow as tf

from trainer.probing import errors, measure


def loop_products(record, gradients):
    """{layer: [losses, losses, time]} of inner products ⟨λʲ_t, λᵏ_t⟩, float64, summed over valid examples, in input time.

    Args:
        record: `LoopRecord`.
        gradients: one `{key: gradient or None}` for each loss.
    """
    reached = [any(value is not None for key, value in own.items() if key.startswith("state/")) for own in gradients]
    if not any(reached):
        errors.raise_no_gradient(record.name)
    found = {}
    for group in record.groups:
        parts = [measure.flow(record, group, own).total if ok else None for own, ok in zip(gradients, reached, strict=True)]
        # A loss that does not depend on the layer contributes exactly nothing; that others do proves the taps.
        like = next(part for part in parts if part is not None)
        parts = [[tf.zeros_like(x) for x in like] if part is None else _padded(part, like) for part in parts]
        states = [tf.stack(same) for same in zip(*parts, strict=True)]
        found[group.name] = measure.in_input_time_of(record, tf.add_n([_products(s, record) for s in states]), axis=2)
    if len(found) > 1:
        found = {record.name: tf.add_n(list(found.values())), **found}
    for name, batched in record.probes.items():
        stacked = [own[f"probe/{name}"] for own in gradients]
        if batched:
            like = next(x for x in stacked if x is not None)
            stacked = tf.stack([tf.zeros_like(like) if x is None else tf.reverse(x, [0]) for x in stacked])
            found[name] = _products(stacked, record)
    return found
