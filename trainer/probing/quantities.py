"""From the gradients of a loop's taps to the quantities of its layer, per example. Pure TensorFlow, all at once over
time.

    λ_t = e_t + r_{t+1}        state gradient = external gradient + what the next time step sends back

where the output is a state, else λ_t = (∂y_t/∂s_t)ᵀ e_t + r_{t+1}, which the backward loop tells. With a mask the sum
holds as well: what a masked time step passes on untouched counts as sent back by it.

The share of loss k in the state gradient at time step t is ⟨λᵏ_t, λ_t⟩ / ‖λ_t‖². Shares do not add up over
micro-batches, nor do they survive another weighting of the losses. The inner products of the losses' state gradients
do: they are summed, and the shares are computed from them at the end, for any weights.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from looptape.trainer.probing import errors, taps


class Rows(NamedTuple):
    """Statistics of a tensor [time, batch, ...]."""

    squares: Any  # [time, batch], sums over the features, float64
    zeros: Any  # [time, batch], number of exact zeros
    size: Any  # number of features


def examples(record, group, gradients, factor, full=False):
    """{quantity: [batch, time]} of a group in input time, NaN where an example is masked.

    Args:
        record: `LoopRecord`.
        group: one of its groups.
        gradients: {key: tensor or None}, from `record.translate`.
        factor: what the norms are multiplied by.
        full: keep λ_t itself, too.
    """
    last = _last_valid(record)
    arriving = _arriving(group, gradients, last)
    total, sent = _state_rows(group, gradients, arriving)
    squares = {
        "state": tf.add_n([rows.squares for rows, _ in total]),
        "hidden": total[0][0].squares,
        **({"cell": total[1][0].squares} if len(group.states) == 2 else {}),
        "recurrent": tf.add_n([rows.squares for rows in sent]) if sent else tf.zeros_like(total[0][0].squares),
    }
    after = [gradients.get(f"after/{j}") for j in group.states]
    if after[0] is not None:
        squares["steered"] = tf.add_n([taps.row_squares(tensor, 2) for tensor in after])
    squares["external"] = _external_squares(group, gradients, arriving, last, squares["state"])
    factor = tf.cast(factor, tf.float64)
    found = {name: tf.cast(tf.sqrt(square) * factor, tf.float32) for name, square in squares.items()}
    left = squares.get("steered", squares["state"])  # what went back through the time step
    found["gain"] = tf.cast(tf.sqrt(squares["recurrent"] / left), tf.float32)
    found = {name: in_input_time(record, value) for name, value in found.items()}
    if group.inputs and gradients.get("input") is not None:
        found["input"] = tf.cast(tf.sqrt(taps.row_squares(gradients["input"], 2)) * factor, tf.float32)
    valid = tf.ones_like(found["state"], tf.bool) if record.valid is None else record.valid
    report = {name: tf.where(valid, value, float("nan")) for name, value in found.items()}
    zeros, elements = _count_zeros(record, total, valid, last)
    if "steered" in found:
        report["acted"] = tf.cast(tf.abs(found["steered"] - found["state"]) > 1e-6 * found["state"], tf.float32)
    report |= {"valid": valid, "zeros": zeros, "elements": elements}
    report = {name: tf.transpose(value) for name, value in report.items()}
    if record.stateful:
        report["cut_off"] = tf.cast(tf.sqrt(squares["recurrent"][0]) * factor, tf.float32)
    if full:
        for index, tensor in enumerate(state_gradients(record, group, gradients)):
            tensor = tf.cast(in_input_time(record, tensor), tf.float32)
            report[f"state_gradient/{index}"] = swap(tensor) * tf.cast(factor, tf.float32)
    return report


def state_gradients(record, group, gradients):
    """λ of each state of a group, [time, batch, ...] by iteration."""
    arriving = _arriving(group, gradients, _last_valid(record))
    found = []
    for j in group.states:
        if f"state/{j}" in gradients:
            found.append(gradients[f"state/{j}"])
            continue
        later = _shift(gradients[f"recurrent/{j}"], _end(group, j, gradients))
        found.append(later + arriving if j == group.alias and arriving is not None else later)
    return found


def _state_rows(group, gradients, arriving):
    """`Rows` by iteration: [(of λ, whether it can be other than 0 at the end)] and [of r].

    Where nothing arrives from above λ_t is r_{t+1}: what is kept of the one serves for the other.
    """
    total, sent = [], []
    for j in group.states:
        back, end = gradients[f"recurrent/{j}"], _end(group, j, gradients)
        sent.append(_rows(back))
        size = sent[-1].size
        if f"state/{j}" in gradients:
            arrives = group.alias is None or end is not None or (j == group.alias and arriving is not None)
            total.append((_rows(gradients[f"state/{j}"]), arrives))
        elif j == group.alias and arriving is not None:
            end = arriving[-1:] if end is None else arriving[-1:] + end[tf.newaxis]
            parts = zip(_rows(back[1:] + arriving[:-1])[:2], _rows(end)[:2], strict=True)
            total.append((Rows(*[tf.concat(pair, axis=0) for pair in parts], size), True))
        else:
            end_rows = (None, None) if end is None else [rows[0] for rows in _rows(end[tf.newaxis])[:2]]
            shifted = [_shift(rows, last) for rows, last in zip(sent[-1][:2], end_rows, strict=True)]
            total.append((Rows(*shifted, size), end is not None))
    return total, sent


def _end(group, j, gradients):
    """The gradient that arrives at a state after the last iteration, or None."""
    final, last = gradients.get(f"final/{j}"), gradients.get("last") if j == group.alias else None
    if group.external != "last" or last is None:
        return final
    return last if final is None else final + last


def _rows(tensor):
    return Rows(taps.row_squares(tensor, 2), taps.row_zeros(tensor, 2), _rows_size(tensor))


def _rows_size(tensor):
    return tf.cast(tf.reduce_prod(tf.shape(tensor)[2:]), tf.float32)


def _external_squares(group, gradients, arriving, last, like):
    """[time, batch]: what arrives at the outputs, and at each example's last time step from its final states."""
    squares = []
    for j in group.states:
        end, part = _end(group, j, gradients), arriving if j == group.alias else None
        if end is not None and part is not None:
            part = part + tf.where(_expand(last, end[tf.newaxis]), end[tf.newaxis], tf.zeros_like(end))
        if part is not None:
            squares.append(taps.row_squares(part, 2))
        elif end is not None:
            squares.append(tf.where(last, taps.row_squares(end[tf.newaxis], 2), tf.zeros([], tf.float64)))
    if group.alias is None and arriving is not None:
        squares.append(taps.row_squares(arriving, 2))
    return tf.add_n(squares) if squares else tf.zeros_like(like)


def weights(record, group, gradients, factor):
    """{`weight/<variable>`: [time]} of a group in input time, and `weight_gradient/<variable>` if all of it
    is kept.
    """
    names = variable_names([record.variables[index] for index in group.variables])
    factor = tf.cast(factor, tf.float32)
    found = {}
    for name, index in zip(names, group.variables, strict=True):
        whole = record.weights == "full"
        steps = gradients[f"weight/{index}"] if whole else gradients["weights"][:, index]
        steps = in_input_time(record, tf.cast(steps, tf.float32)) * factor
        if whole:
            found[f"weight_gradient/{name}"] = steps
        found[f"weight/{name}"] = taps.row_norms(steps, 1) if whole else steps
    return found


def variable_names(variables):
    """Names as short as they can be while they differ: `kernel`, or `dense/kernel` where there are two."""
    parts = [variable.path.split("/") for variable in variables]
    depth = 1
    while True:
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
        if all(len(part) <= depth for part in parts):
            return [f"{name}_{index}" for index, name in enumerate(names)]
        depth += 1


def _arriving(group, gradients, last):
    """The gradient that arrives at the output of each iteration; None if no loss depends on it, or only at the end."""
    gradient = gradients.get(group.external)
    if gradient is None or group.external == "outputs":
        return gradient
    if group.external == "last":
        if group.alias is not None:
            return None  # it is in `_end`
        gradient = gradient[tf.newaxis]
        return tf.where(_expand(last, gradient), gradient, tf.zeros_like(gradient))
    return gradient


def _shift(sent, final):
    end = tf.zeros_like(sent[:1]) if final is None else final[tf.newaxis]
    return tf.concat([sent[1:], end], axis=0)


def _last_valid(record):
    if record.valid is None:
        end = tf.one_hot(record.length - 1, record.length, on_value=True, off_value=False, dtype=tf.bool)
        return tf.broadcast_to(end[:, tf.newaxis], [record.length, record.batch])
    valid = in_input_time(record, record.valid)  # its own inverse: now in the order of the iterations
    remaining = tf.cumsum(tf.cast(valid, tf.int32), axis=0, reverse=True)
    return valid & (remaining == 1)


def in_input_time(record, tensor):
    """[time, ...] in the order of the iterations to input time, and back."""
    return tf.reverse(tensor, [0]) if record.layout.go_backwards else tensor


def _expand(flags, like):
    return tf.reshape(flags, tf.concat([tf.shape(flags), tf.ones([like.shape.rank - 2], tf.int32)], axis=0))


def _count_zeros(record, total, valid, last):
    """Exact zeros in λ and how many numbers it has, [time, batch] each; not counting what is 0 by
    definition.
    """
    zeros, elements = [], []
    for rows, ends in total:
        counted = valid if ends else valid & ~in_input_time(record, last)
        zeros.append(tf.where(counted, in_input_time(record, rows.zeros), 0.0))
        elements.append(tf.where(counted, rows.size, 0.0))
    return tf.add_n(zeros), tf.add_n(elements)


def swap(tensor):
    """Exchanges the first two axes."""
    return tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])


# ---- Shares of the losses.


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
    valid = None if record.valid is None else in_input_time(record, record.valid)
    found = {}
    for group in record.groups:
        flows = [[] if own is None else state_gradients(record, group, own) for own in gradients]
        product = tf.add_n([_inner_products(state, valid) for state in _align(flows)])
        found[group.name] = tf.reverse(product, [2]) if record.layout.go_backwards else product
    if len(found) > 1:
        found = {record.name: tf.add_n(list(found.values())), **found}
    for name, (label, batched) in record.probes.items():
        if batched:
            flows = [[] if own is None else [own[f"probe/{name}"]] for own in gradients]
            found[label] = _inner_products(_align(flows)[0], valid)
    return found


def tensor_products(tensors):
    """[losses, losses, time] from gradients [time, batch, ...] of each loss, None where a loss does not
    reach.
    """
    return _inner_products(_align([[] if tensor is None else [tensor] for tensor in tensors])[0], None)


def _align(flows):
    """From states per loss to [losses, time, batch, ...] per state.

    A loss that does not depend on a state contributes exactly nothing: that another one does proves the taps.
    """
    like = max(flows, key=len)
    return [
        tf.stack([flow[index] if index < len(flow) else tf.zeros_like(like[index]) for flow in flows])
        for index in range(len(like))
    ]


def _inner_products(tensor, valid):
    tensor = tf.cast(tensor, tf.float64)
    shape = tf.shape(tensor)
    flat = tf.reshape(tensor, tf.concat([shape[:3], [-1]], axis=0))
    if valid is not None:
        flat = tf.where(valid[tf.newaxis, :, :, tf.newaxis], flat, 0.0)
    return tf.einsum("jtbf,ktbf->jkt", flat, flat)
