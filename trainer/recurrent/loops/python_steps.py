"""The time steps one by one in Python: eager execution, and unrolled loops."""

import keras
import tensorflow as tf


def run_steps(step, inputs, states, mask, layout, record):
    """See `trainer.recurrent.loops.recurrent_loop.run`; inputs and mask are [time, batch, ...]."""
    length = inputs.shape[0]
    if not length:
        raise ValueError("A loop can be unrolled only if the number of time steps is known; it is None.")
    slices, valids = tf.unstack(inputs), None if mask is None else tf.unstack(mask)
    if not layout.unroll:
        # Keras's loop, too, runs a step whose result it throws away. It moves the seeds of a cell's own
        # dropout.
        step.finish(step.first(slices[0], states, record)[2])
    times = range(length - 1, -1, -1) if layout.go_backwards else range(length)
    flat, previous, outputs = keras.tree.flatten(states), None, []
    for index, t in enumerate(times):
        flat = flat if record is None else record.separate(flat)
        output, new, _ = step(tf.constant(index), slices[t], pack(states, flat), None, None, record)
        new = keras.tree.flatten(new)
        if mask is not None:
            hidden = tf.zeros_like(output) if previous is None or zeroes_at_once(layout) else previous
            output = select(valids[t], output, hidden)
            new = [select(valids[t], after, before) for after, before in zip(new, flat, strict=True)]
        flat, previous = new, output
        outputs.append(output)
    outputs = tf.stack(outputs) if layout.return_sequences else tf.identity(outputs[-1])
    if record is not None:
        record.note_outputs(outputs)
    if mask is not None and layout.zero_output_for_mask and not zeroes_at_once(layout):
        # As Keras does it: in input time even where the outputs are backwards.
        final = mask if layout.return_sequences else valids[times[-1]]
        outputs = select(final, outputs, tf.zeros_like(outputs))
    last, outputs = (None, outputs) if layout.return_sequences else (outputs, None)
    return last, outputs, pack(states, flat)


def zeroes_at_once(layout):
    """Whether outputs of masked time steps are zeroed in the loop. Unrolled loops carry them on and zero them
    after it.
    """
    return layout.zero_output_for_mask and not layout.unroll


def index_of(tensor, tensors):
    """The position of this very object, or None."""
    return next((index for index, other in enumerate(tensors) if other is tensor), None)


def swap(tensor):
    """Exchanges the first two axes."""
    return tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])


def pack(structure, flat):
    """A flat list of states as the nesting that they came in."""
    return keras.tree.pack_sequence_as(structure, list(flat))


def select(valid, new, old):
    """`new` where an example is valid, else `old`; `valid` lacks the last axes."""
    for _ in range(new.shape.rank - valid.shape.rank):
        valid = valid[..., tf.newaxis]
    return tf.where(valid, new, old)


def direct_gradients(total, way):
    """Gradients of an output with respect to each of the states it is made of, the others held constant.

    A tape gives total derivatives: what goes by way of another state of the same time step is taken off.

    Args:
        total: [gradient of each state, None where nothing is connected].
        way: `way(later, earlier, gradient)`: what of a gradient of state `later` belongs to state `earlier`, or None.
    """
    total = list(total)
    remaining = [j for j, part in enumerate(total) if part is not None]
    direct: list = [None] * len(total)
    while remaining:
        j = next(j for j in remaining if all(k == j or way(k, j, total[k]) is None for k in remaining))
        remaining.remove(j)
        direct[j] = total[j]
        for k in remaining:
            through = way(j, k, direct[j])
            total[k] = total[k] if through is None else total[k] - through
    return direct
