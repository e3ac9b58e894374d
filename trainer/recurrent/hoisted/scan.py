"""The two loops over time of a `Recurrence`, forwards and backwards. Pure; eager, traced, or compiled by XLA."""

import tensorflow as tf


def forward(recurrence, projected, states, recurrent, mask, entering=(), leaving=()):
    """All states and what the backward loop needs.

    Args:
        projected: [time, batch, gates * units], the inputs times the kernel, plus bias.
        states: tuple of initial states, [batch, units].
        recurrent: as from `Recurrence.operands`.
        mask: [time, batch, 1] or None; the states stay where it is False.
        entering, leaving: added to the states before and after each time step, [time, batch, units] each; none, or one
            per state.

    Returns:
        The states after each time step (a tuple of [time, batch, units]) and what `Recurrence.step` kept.
    """
    length = _length(projected)
    rows = _rows(projected, length)
    valid = None if mask is None else _rows(mask, length)
    before, after = ([_rows(added, length) for added in given] for given in (entering, leaving))

    def body(t, states, lists):
        if before:
            states = tuple(state + added.read(t) for state, added in zip(states, before, strict=True))
        new, kept = recurrence.step(rows.read(t), states, recurrent)
        if valid is not None:
            new = _select(valid.read(t), new, states)
        if after:
            new = tuple(state + added.read(t) for state, added in zip(new, after, strict=True))
        written = tuple(items.write(t, value) for items, value in zip(lists, (*new, *kept), strict=True))
        return t + 1, new, written

    units, number = states[0].shape[-1], len(states)
    lists = tuple(_empty(projected, length, width * units) for width in ([1] * number + list(recurrence.kept)))
    *_, lists = _loop(length, body, (tf.constant(0), tuple(states), lists))
    stacked = tuple(items.stack() for items in lists)
    return stacked[:number], stacked[number:]


def backward(recurrence, kept, initial, after, external, final, transposed, mask, act=None, time=None, later=False):
    """The adjoints that every time step sends back, and the factors of the weights' gradients.

    Args:
        kept, after: as from `forward`; `initial` are the states that it began with.
        external: [time, batch, units], dL/d(outputs).
        final: dL/d(final states), a tuple of [batch, units].
        transposed: as from `Recurrence.transposed`.
        mask: as for `forward`.
        act: as for `both_ways.run`. `time` is a function that gives the time step of an iteration; `later` tells
            whether `final` comes from a later time step, not from outside.

    Returns:
        What each time step sends back to the states before it (a tuple of [time, batch, units]); the adjoints after
        `act`, likewise, or () without one; dL/d(initial states); deltas and operands as from `Recurrence.deltas`, the
        deltas zero where the mask is False.
    """
    length = _length(external)
    before = tuple(tf.concat([first[tf.newaxis], rest[:-1]], 0) for first, rest in zip(initial, after, strict=True))
    factors = recurrence.factors(kept, before, after)
    factor_rows = [_rows(factor, length) for factor in factors]
    external_rows = _rows(external, length)
    valid = None if mask is None else _rows(mask, length)

    # With a mask, what arrives at masked time steps belongs to the valid one before them: no later one sent it.
    apart = valid is not None and getattr(act, "carried", None) is not None

    def body(k, adjoints, lists, pending):
        t = length - 1 - k
        now_valid = None if valid is None else valid.read(t)
        arriving = external_rows.read(t)  # once: an eager array forgets what was read
        if apart:
            arriving, sender = arriving + pending[0], pending[1]
        received = (adjoints[0] + arriving, *adjoints[1:])
        acted = received
        if act is not None:
            sent, sender = (sender >= 0, sender) if apart else (tf.logical_or(k > 0, later), time(t + 1))
            acted = _acted(act, time(t), (sent, sender), adjoints, arriving, received, now_valid)
        new, extra = recurrence.backward_step(acted, tuple(rows.read(t) for rows in factor_rows), transposed)
        whole = new if now_valid is None else _select(now_valid, new, acted)
        values = (*extra, *whole) if act is None else (*extra, *whole, *acted)
        if apart:
            pending = (tf.where(now_valid, tf.zeros_like(arriving), arriving), tf.where(now_valid, time(t), sender))
            whole = _select(now_valid, new, adjoints)
        return k + 1, whole, tuple(items.write(t, x) for items, x in zip(lists, values, strict=True)), pending

    number, units = len(initial), initial[0].shape[-1]
    widths = (*recurrence.extra, *[1] * number * (1 if act is None else 2))
    lists = tuple(_empty(external, length, width * units) for width in widths)
    pending = (tf.zeros_like(final[0]), -tf.ones_like(mask[0], tf.int32)) if apart else ()
    _, first, lists, pending = _loop(length, body, (tf.constant(0), tuple(final), lists, pending))
    first = (first[0] + pending[0], *first[1:]) if apart else first
    stacked = tuple(items.stack() for items in lists)
    extra, sent = stacked[: len(recurrence.extra)], stacked[len(recurrence.extra) :]
    sent, changed = sent[:number], sent[number:]
    deltas, operands = recurrence.deltas(changed or adjoints(sent, final, external), extra, factors)
    if mask is not None:
        deltas = tuple(tf.where(mask, delta, tf.zeros_like(delta)) for delta in deltas)
    return sent, changed, first, deltas, operands


def adjoints(sent, final, external):
    """λ_t of the states after each time step, before any action: a tuple of [time, batch, units]."""
    later = [tf.concat([back[1:], end[tf.newaxis]], 0) for back, end in zip(sent, final, strict=True)]
    return later[0] + external, *later[1:]


def _acted(act, t, sent, adjoints, arriving, received, valid):
    """λ_t after the action. `sent`: whether `adjoints` come from a later time step, not from outside; and which."""
    now = received
    if getattr(act, "carried", None) is not None:
        changed = act.carried(t, adjoints, sent[1])
        changed = [tf.where(sent[0], new, old) for new, old in zip(changed, adjoints, strict=True)]
        now = (changed[0] + arriving, *changed[1:])
    acted = tuple(act(t, now, valid))
    return acted if valid is None else _select(valid, acted, received)


def _loop(length, body, carried):
    return tf.while_loop(lambda t, *_: t < length, body, carried, maximum_iterations=length, parallel_iterations=1)


def _select(valid, new, old):
    return tuple(tf.where(valid, one, other) for one, other in zip(new, old, strict=True))


def _length(tensor):
    return tf.shape(tensor)[0] if tensor.shape[0] is None else tensor.shape[0]


def _rows(tensor, length):
    return tf.TensorArray(tensor.dtype, length, element_shape=tensor.shape[1:]).unstack(tensor)


def _empty(like, length, width):
    return tf.TensorArray(like.dtype, length, element_shape=[like.shape[1], width])
