"""Which loss drives the state gradient at which time step: ⟨λᵏ_t, λ_t⟩ / ‖λ_t‖², the share of loss k.

Shares do not add up over micro-batches, nor do they survive another weighting of the losses. The inner
products of the losses' state gradients do: they are summed, and the shares are computed from them at the end,
for any weights.
"""

import tensorflow as tf

from trainer.probing import errors, measure


def shares(products, factors=None):
    """`{layer: [losses, time]}`, summing to 1 over the losses; NaN where λ_t is 0.

    Args:
        products: `{layer: [losses, losses, time]}` from `ProbeSession.products`, summed over the whole
            update.
        factors: [losses], what to multiply each loss by (its weight, over its divisor). None if the losses
            had it.
    """
    return {layer: _shares(product, factors) for layer, product in products.items()}


def _shares(product, factors):
    if factors is not None:
        factors = tf.cast(factors, product.dtype)
        product = product * factors[:, tf.newaxis, tf.newaxis] * factors[tf.newaxis, :, tf.newaxis]
    drive = tf.reduce_sum(product, axis=1)
    total = tf.reduce_sum(drive, axis=0)
    return tf.cast(tf.where(total > 0, drive / total, float("nan")), tf.float32)


def loop_products(record, gradients):
    """{layer: [losses, losses, time]} of ⟨λʲ_t, λᵏ_t⟩ in float64, summed over the valid examples.

    Args:
        record: `LoopRecord`.
        gradients: a list of `{key: gradient or None}`, one for each loss.
    """
    reached = [record.is_reached(own) for own in gradients]
    if not any(reached):
        errors.raise_no_gradient(record.name)
    gradients = [record.translate(own) if ok else None for own, ok in zip(gradients, reached, strict=True)]
    valid = None if record.valid is None else measure.in_input_time(record, record.valid)
    found = {}
    for group in record.groups:
        flows = [[] if own is None else measure.state_gradients(record, group, own) for own in gradients]
        product = tf.add_n([_products(state, valid) for state in _align(flows)])
        found[group.name] = tf.reverse(product, [2]) if record.layout.go_backwards else product
    if len(found) > 1:
        found = {record.name: tf.add_n(list(found.values())), **found}
    for name, (label, batched) in record.probes.items():
        if batched:
            flows = [[] if own is None else [tf.reverse(own[f"probe/{name}"], [0])] for own in gradients]
            found[label] = _products(_align(flows)[0], valid)
    return found


def tensor_products(tensors):
    """[losses, losses, time] from gradients [time, batch, ...] of each loss, None where a loss does not
    reach.
    """
    return _products(_align([[] if tensor is None else [tensor] for tensor in tensors])[0], None)


def _align(flows):
    """From states per loss to [losses, time, batch, ...] per state.

    A loss that does not depend on a state contributes exactly nothing: that another one does proves the taps.
    """
    like = max(flows, key=len)
    return [
        tf.stack([flow[index] if index < len(flow) else tf.zeros_like(like[index]) for flow in flows])
        for index in range(len(like))
    ]


def _products(tensor, valid):
    tensor = tf.cast(tensor, tf.float64)
    shape = tf.shape(tensor)
    flat = tf.reshape(tensor, tf.concat([shape[:3], [-1]], axis=0))
    if valid is not None:
        flat = tf.where(valid[tf.newaxis, :, :, tf.newaxis], flat, 0.0)
    return tf.einsum("jtbf,ktbf->jkt", flat, flat)
