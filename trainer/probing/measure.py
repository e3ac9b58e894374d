"""From the gradients of a loop's ports to the quantities of its layer, per example. Pure TensorFlow, all at
once over time.

    λ_t = e_t + r_{t+1}        state gradient = external gradient + what the next time step sends back

The loop taps r only; λ is put together here from the very terms that the backward pass adds. With a mask the
sum holds
as well: what a masked time step passes on untouched counts as sent back by it.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from trainer.probing import taps


class Flow(NamedTuple):
    """Gradients of the states of one group, lists of [time, batch, ...], the first iteration first."""

    total: Any  # λ of each state, and of the output if that is not a state
    recurrent: Any  # r of each state
    external: Any  # e of each state or output that has one
    last: Any  # [time, batch], True at the last valid time step of each example
    ends: Any  # for each of `total`: whether it can be other than 0 at the last time step


def flow(record, group, gradients):
    """The `Flow` of a group. `gradients`: {key: tensor or None} of `record.sources`."""
    sent = {j: tf.reverse(gradients[f"state/{j}"], [0]) for j in group.states}
    last = _last_valid(record)
    finals = {j: gradients.get(f"final/{j}") for j in group.states}
    arriving = _external(record, group, gradients, last)
    total, external, ends = [], [], []
    for j in group.states:
        later = _shift(sent[j], finals[j])
        from_above = arriving if j == group.alias else None
        total.append(later if from_above is None else later + from_above)
        ends.append(from_above is not None or finals[j] is not None)
        if finals[j] is not None:
            at_end = tf.where(_expand(last, later), finals[j][tf.newaxis], tf.zeros_like(later))
            from_above = at_end if from_above is None else from_above + at_end
        if from_above is not None:
            external.append(from_above)
    if group.alias is None and arriving is not None:
        total.append(arriving)
        external.append(arriving)
        ends.append(True)
    return Flow(total, list(sent.values()), external, last, ends)


def examples(record, group, gradients, factor, full=False):
    """{quantity: [batch, time]} of a group, in input time; NaN where an example is masked. See `report` for
    the names.
    """
    states = flow(record, group, gradients)
    squares = [taps.row_squares(tensor, 2) for tensor in states.total]
    total = tf.add_n(squares)
    recurrent = _sum_squares(states.recurrent, total)
    values = {
        "state": total,
        "hidden": squares[0],
        **({"cell": squares[1]} if len(group.states) == 2 else {}),
        "recurrent": recurrent,
        "external": _sum_squares(states.external, total),
    }
    factor = tf.cast(factor, tf.float64)
    found = {name: tf.cast(tf.sqrt(square) * factor, tf.float32) for name, square in values.items()}
    found["gain"] = tf.cast(tf.sqrt(recurrent / total), tf.float32)
    found = {name: in_input_time(record, value) for name, value in found.items()}
    if group.inputs and gradients.get("input") is not None:
        found["input"] = tf.cast(tf.sqrt(taps.row_squares(gradients["input"], 2)) * factor, tf.float32)
    valid = tf.ones_like(found["state"], tf.bool) if record.valid is None else record.valid
    report = {name: tf.where(valid, value, float("nan")) for name, value in found.items()}
    zeros, elements = _count_zeros(record, states, valid)
    report |= {"valid": valid, "zeros": zeros, "elements": elements}
    report = {name: tf.transpose(value) for name, value in report.items()}
    if record.stateful:
        report["cut_off"] = tf.cast(
            tf.sqrt(_sum_squares([r[:1] for r in states.recurrent], total[:1]))[0] * factor, tf.float32
        )
    if full:
        for index, tensor in enumerate(states.total):
            report[f"state_gradient/{index}"] = _full(record, tensor, factor)
    return report


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
        steps = in_input_time(record, tf.reverse(tf.cast(steps, tf.float32), [0])) * factor
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


def _external(record, group, gradients, last):
    """The gradient that arrives at the output of each iteration, or None if no loss depends on it."""
    gradient = gradients.get(group.external)
    if gradient is None:
        return None
    if group.external == "outputs":
        return gradient
    if group.external == "last":
        return tf.where(
            _expand(last, gradient[tf.newaxis]), gradient[tf.newaxis], tf.zeros_like(gradient)[tf.newaxis]
        )
    return tf.reverse(gradient, [0])


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


def _sum_squares(tensors, like):
    return tf.add_n([taps.row_squares(tensor, 2) for tensor in tensors]) if tensors else tf.zeros_like(like)


def _count_zeros(record, states, valid):
    """Exact zeros in λ and how many numbers λ has, [time, batch] each, not counting what is 0 by
    definition.
    """
    zeros, elements = [], []
    for tensor, ends in zip(states.total, states.ends, strict=True):
        axes = list(range(2, tensor.shape.rank))
        counted = valid if ends else valid & ~in_input_time(record, states.last)
        found = tf.reduce_sum(tf.cast(tf.equal(tensor, 0), tf.float32), axis=axes)
        size = tf.cast(tf.reduce_prod(tf.shape(tensor)[2:]), tf.float32)
        zeros.append(tf.where(counted, in_input_time(record, found), 0.0))
        elements.append(tf.where(counted, size, 0.0))
    return tf.add_n(zeros), tf.add_n(elements)


def _full(record, tensor, factor):
    return swap(tf.cast(in_input_time(record, tensor), tf.float32)) * tf.cast(factor, tf.float32)


def swap(tensor):
    """Exchanges the first two axes."""
    return tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])
