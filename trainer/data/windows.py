"""Sequences cut into windows, one update each: truncated back-propagation with a state that is carried on."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from looptape.trainer.arguments import check_integer
from looptape.trainer.data.batches import unpack
from looptape.trainer.recurrent.row_begins import EACH_BATCH, RowBegins, check_begins


class Window(NamedTuple):
    """A window of a batch of sequences, as the traced update receives it."""

    batch: Any  # like the batch, with fewer time steps
    begins: Any  # whether its sequences begin with it: a bool scalar, or [batch]; or where in it, [batch, time]
    whole: Any = ()  # the batch that it was cut from, where the truncated gradient is compared with the whole one


def check_windows(window, updates, begins, compare_every, accumulation_steps):
    """(window, updates, begins, compare_every): the arguments `bptt_…` of `Trainer`, if they fit together."""
    if window is not None:
        window = check_integer("bptt_window", window, 1, "Use None for the whole sequence.")
    if not isinstance(updates, bool | np.bool_):
        raise TypeError(
            f"`bptt_updates` is {updates!r}; it must be True or False. Use True for one update per window of "
            "`bptt_window` time steps."
        )
    compare_every = check_integer("bptt_compare_every", compare_every, 0, "Use 0 for never.")
    if compare_every and (window is None or isinstance(begins, RowBegins)):
        raise ValueError(
            f"`bptt_compare_every` is {compare_every} with bptt_window={window} and bptt_begins={begins!r}; it "
            "compares the gradient that a window cuts with the whole one, over sequences that begin with a batch. Set "
            "`bptt_window`, and leave `bptt_begins` out or use 'never'."
        )
    if updates and (window is None or accumulation_steps != 1):
        raise ValueError(
            f"`bptt_updates` is set with bptt_window={window} and accumulation_steps={accumulation_steps}; it needs a "
            "window and one micro-batch, because each update continues where the one before ended. Set `bptt_window`, "
            "and leave `accumulation_steps` out."
        )
    if not updates and begins != EACH_BATCH:
        raise ValueError(
            f"`bptt_begins` is {begins!r} without `bptt_updates`; no state is carried then, and every batch starts "
            "from zero states. Set bptt_updates=True, or leave `bptt_begins` out."
        )
    return window, bool(updates), check_begins(begins), compare_every


def check_losses(losses, updates):
    """Refuses losses that weight the time steps of whole sequences, where windows are updates."""
    for name, loss in losses.items() if updates else ():
        if getattr(loss, "needs_whole_sequences", False):
            raise ValueError(
                f"The loss {name!r} is made by `over_time`, and `bptt_updates` is set: it would count the time steps "
                "of each window, not those of the sequence. Use `bptt_window` without `bptt_updates`, or put the "
                "weights of the time steps into the data, as sample weights [batch, time]."
            )


def cut(dataset, length, begins=EACH_BATCH, keep_whole=False):
    """A dataset of `Window`s of `length` time steps, in order; the last one of a batch may be shorter.

    `begins` says where sequences begin, see `row_begins`. With `keep_whole` each window has the whole batch, too.

    The sequence among the inputs is their first tensor with three axes or more, or else the first with two. Tensors
    [batch, time, …] with as many time steps are cut, others repeated. If the sequence's length is unknown, tensors with
    two axes and a known size, such as labels [batch, 1], are repeated.

    >>> data = tf.data.Dataset.from_tensors((tf.reshape(tf.range(10), [2, 5]), tf.constant([7, 8])))
    >>> for window in cut(data, 3):
    ...     print(window.batch[0].numpy().tolist(), window.batch[1].numpy().tolist(), window.begins.numpy())
    [[0, 1, 2], [5, 6, 7]] [7, 8] True
    [[3, 4], [8, 9]] [7, 8] False
    """
    spec = dataset.element_spec
    leaves = tf.nest.flatten(spec)
    position = _find_sequence(spec, leaves)
    first = leaves[position or 0]
    if position is None:
        raise ValueError(
            f"`bptt_updates` cuts sequences, and the first tensor of a batch has the shape {first.shape}; it must be "
            "[batch, time, …]. Batch whole sequences, or leave `bptt_updates` out."
        )
    time = first.shape[1]
    is_cut = [_has_time(leaf, time) for leaf in leaves]
    whole = time is not None and time % length == 0
    if begins == EACH_BATCH:
        dataset = dataset.map(lambda *parts: Window(parts if isinstance(spec, tuple) else parts[0], True))
    else:
        dataset = _flagged(dataset, begins, first, position)

    def windows(flagged):
        flags, leaves = flagged.begins, tf.nest.flatten(flagged.batch)
        total = tf.shape(leaves[position])[1]
        for leaf, wanted in zip(leaves, is_cut, strict=True):
            if wanted and time is None:
                tf.debugging.assert_equal(tf.shape(leaf)[1], total, "sequences of one batch have different lengths")

        def window(index):
            begin = index * length
            found = [
                leaf[:, begin : begin + length] if wanted else leaf for leaf, wanted in zip(leaves, is_cut, strict=True)
            ]
            if whole:
                found = [
                    tf.ensure_shape(new, [leaf.shape[0], length, *leaf.shape[2:]]) if wanted else new
                    for new, leaf, wanted in zip(found, leaves, is_cut, strict=True)
                ]
            own = flags[:, begin : begin + length] if flags.shape.rank == 2 else flags & tf.equal(index, 0)
            return Window(tf.nest.pack_sequence_as(spec, found), own, flagged.batch if keep_whole else ())

        return tf.data.Dataset.range(tf.cast(-(-total // length), tf.int64)).map(lambda i: window(tf.cast(i, tf.int32)))

    return dataset.flat_map(windows)


def _find_sequence(spec, leaves):
    """The position among the leaves of the sequence that is cut: one of the inputs if any of them is one; or None."""
    inputs = tf.nest.flatten(spec if isinstance(spec, tuple) and len(spec) > 3 else unpack(spec)[0])
    ranks = [leaf.shape.rank or 0 for leaf in leaves]
    among = [n for n, leaf in enumerate(leaves) if any(leaf is one for one in inputs)]
    places = [(n, least) for numbers in (among, range(len(leaves))) for least in (3, 2) for n in numbers]
    return next((n for n, least in places if ranks[n] >= least), None)


def _has_time(spec, time):
    rank = spec.shape.rank or 0
    if time is None and rank == 2:
        return spec.shape[1] is None
    return rank >= 2 and (time is None or spec.shape[1] in (None, time))


def _flagged(dataset, begins, first, position):
    """Each batch as a `Window` that says where in it sequences begin. All rows of the first batch do."""
    rows = first.shape[0]
    if rows is None:
        raise ValueError(
            f"`bptt_begins` is {begins!r}, and the number of rows of a batch is not known: its first tensor has the "
            f"shape {first.shape}. Batch with drop_remainder=True, arrays as a tf.data.Dataset."
        )

    def flag(ended, batch):
        flags, over = ended, tf.zeros_like(ended)
        if isinstance(begins, RowBegins):
            flags, over = begins.find(batch, rows, tf.shape(tf.nest.flatten(batch)[position])[1], ended)
        return over, Window(batch, flags)

    return dataset.scan(tf.ones([rows], tf.bool), flag)
