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


class Rows(NamedTuple):
    """What is kept of a tensor [time, batch, ...]."""

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
    squares["external"] = _external_squares(group, gradients, arriving, last, squares["state"])
    factor = tf.cast(factor, tf.float64)
    found = {name: tf.cast(tf.sqrt(square) * factor, tf.float32) for name, square in squares.items()}
    found["gain"] = tf.cast(tf.sqrt(squares["recurrent"] / squares["state"]), tf.float32)
    found = {name: in_input_time(record, value) for name, value in found.items()}
    if group.inputs and gradients.get("input") is not None:
        found["input"] = tf.cast(tf.sqrt(taps.row_squares(gradients["input"], 2)) * factor, tf.float32)
    valid = tf.ones_like(found["state"], tf.bool) if record.valid is None else record.valid
    report = {name: tf.where(valid, value, float("nan")) for name, value in found.items()}
    zeros, elements = _count_zeros(record, total, valid, last)
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
    """λ of each state of a group, and of the output if that is none of them: [time, batch, ...] by
    iteration.
    """
    arriving = _arriving(group, gradients, _last_valid(record))
    found = []
    for j in group.states:
        later = _shift(tf.reverse(gradients[f"state/{j}"], [0]), _end(group, j, gradients))
        found.append(later + arriving if j == group.alias and arriving is not None else later)
    return found + ([arriving] if group.alias is None and arriving is not None else [])


def _state_rows(group, gradients, arriving):
    """`Rows` by iteration: [(of λ, whether it can be other than 0 at the end)] and [of r].

    Where nothing arrives from above λ_t is r_{t+1}: what is kept of the one serves for the other.
    """
    total, sent = [], []
    for j in group.states:
        back, end = gradients[f"state/{j}"], _end(group, j, gradients)
        squares, zeros, size = _rows(back)
        sent.append(Rows(tf.reverse(squares, [0]), tf.reverse(zeros, [0]), size))
        if j == group.alias and arriving is not None:
            end = arriving[-1:] if end is None else arriving[-1:] + end[tf.newaxis]
            parts = zip(_rows(tf.reverse(back[:-1], [0]) + arriving[:-1])[:2], _rows(end)[:2], strict=True)
            total.append((Rows(*[tf.concat(pair, axis=0) for pair in parts], size), True))
        else:
            end_rows = (None, None) if end is None else [rows[0] for rows in _rows(end[tf.newaxis])[:2]]
            shifted = [_shift(rows, last) for rows, last in zip(sent[-1][:2], end_rows, strict=True)]
            total.append((Rows(*shifted, size), end is not None))
    if group.alias is None and arriving is not None:
        total.append((_rows(arriving), True))
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
