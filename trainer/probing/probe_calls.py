"""`probe(name, tensor, t)`: the gradient of a tensor inside anybody's loop.

Nobody knows how long such a loop runs, and its body can only capture: the statistics of all time steps leave
the backward pass as the gradient of one captured table with a row for each time step. The table has a
capacity. What lies beyond is counted, by powers of two, so that the caller can ask for the right capacity at
the next trace.
"""

import math

import tensorflow as tf

from looptape.trainer.probing import errors, taps
from looptape.trainer.recurrent import active, internals
from looptape.trainer.recurrent.actions import Moment
from looptape.trainer.recurrent.steering import check_actions

DEFAULT_CAPACITY = {1: 512, 2: 64, 3: 16}
# Columns of a table. All are sums over the visits of a time step.
COLUMNS = ("visits", "value", "examples", "zeros", "elements", "nonfinite")
BUCKETS = 32


@tf.autograph.experimental.do_not_convert
def probe(name, tensor, t, *, batched=True, action=None):
    """Returns `tensor`; reports its gradient at time step t under layer `name` while a probed update is traced.

    Works in any loop: `tf.while_loop`, AutoGraph, `tf.scan`, `keras.ops.scan`, plain Python. Outside probed updates it
    does nothing.

    Args:
        tensor: [batch, ...], or anything with `batched=False`.
        t: the time step, a Python integer or an integer scalar tensor; in nested loops a tuple of them, outer
            first.
        batched: report the norm of each example as `state`; otherwise the norm of the whole tensor as
            `weight`.
        action: an action on the gradient that passes here, from `looptape.timesteps`, or a list of them. It acts in
            every update, probed or not; `state` is the gradient before it, and `state` of the layer `<name>_steered`
            is the gradient after it.

    >>> state = tf.ones([2, 3])
    >>> for t in range(4):
    ...     state = tf.tanh(probe("walk", state, t))
    >>> tuple(state.shape)
    (2, 3)
    """
    if action is not None:
        tensor = _steered(name, tf.convert_to_tensor(tensor), t, check_actions(action), batched)
    session = active.session()
    if session is None:
        internals.note_probe(name)
        return tensor
    frame = active.frame()
    if frame is not None and frame.record is not None and t is frame.time:
        if frame.discovering:
            frame.record.discover(name, tensor, batched)
            return tensor
        return frame.record.mark(f"probe/{name}", tensor, frame.marks)
    times = t if isinstance(t, tuple) else (t,)
    if active.is_discovering():
        if not tf.executing_eagerly():
            session.prepare(name, tf.convert_to_tensor(tensor), times, batched)
        return tensor
    return session.probe(name, tf.convert_to_tensor(tensor), times, batched)


def _steered(name, tensor, t, actions, batched):
    """`tensor`, on whose gradient the actions act; a probe of its own shows what they leave."""
    if not batched:
        raise ValueError(
            f"`probe({name!r}, …)` has an action and batched=False; actions act on the gradient of each example. Probe "
            "a tensor [batch, …], or leave `action` out."
        )
    tensor = probe(f"{name}_steered", tensor, t)
    if active.is_discovering():
        # A trial run only learns what depends on what. The result is another tensor, as it is in the loop.
        return tf.identity(tensor)
    time = tf.cast(t[-1] if isinstance(t, tuple) else t, tf.int32)
    moment_of = active.moment_of() or (lambda name, t: Moment(t, tf.constant(0, tf.int64), 1.0, name))

    @tf.custom_gradient
    def acted(tensor, time):
        def gradient(upstream):
            return _first_order(upstream, time), None

        return tf.identity(tensor), gradient

    @tf.custom_gradient
    def _first_order(upstream, time):
        def refused(*_):
            raise RuntimeError(
                f"A second derivative goes through `probe({name!r}, …)`, whose action changes the gradient: a changed "
                "gradient is not the derivative of anything. Leave out the action or the nested tape."
            )

        moment, found = moment_of(name, time), [upstream]
        for action in actions if moment is not None else ():
            found = action(found, moment)
        return tf.identity(found[0]), refused

    return acted(tensor, time)


class ProbeRecord:
    """All `probe` calls of one name in a session.

    Args:
        name: its layer.
        batched, depth: as in the first call; the others must agree.
        capacity: the size of the table along each index of t.
    """

    def __init__(self, name, batched, depth, capacity):
        self.name = name
        self.batched = batched
        self.depth = depth
        self.capacity = capacity
        self.visits = {}  # t as a tuple of integers -> source
        self.sources = {}  # "table", and "examples" or "full" on request

    @property
    def cells(self):
        """Number of time steps in the table."""
        return math.prod(self.capacity)

    @property
    def shape(self):
        """The shape that the reported vectors are flattened from: the capacity, or where Python knew all time steps
        their extent.
        """
        if self.sources:
            return self.capacity
        return tuple(max(t[d] for t in self.visits) + 1 for d in range(self.depth))

    def check(self, batched, depth):
        if batched != self.batched or depth != self.depth:
            raise ValueError(
                f"`probe({self.name!r}, ...)` was called with batched={self.batched} and {self.depth} time "
                f"indices, and again with batched={batched} and {depth}. Use one name for one kind of tensor."
            )

    def tap_once(self, tensor, t, root):
        """A tap at a time step that Python knows: all of its gradient is kept."""
        if t in self.visits:
            shown = t[0] if len(t) == 1 else t
            raise ValueError(
                f"`probe({self.name!r}, ...)` was called twice at t={shown}. Their gradients would be "
                "summed: give each its own name, or in nested loops a tuple, outer index first."
            )
        self.visits[t] = tf.fill(tf.shape(tensor), tf.cast(root, tensor.dtype))
        self.visits[t].set_shape(tensor.shape)
        return taps.tap(tensor, self.visits[t])

    def make_tables(self, tensor, root, per_example, full, batch):
        """Makes the tables that `tap_row` fills, once, in the graph that is the default: that of the session."""

        def batch_size():
            if tensor.shape[0] is None and batch is None:
                errors.raise_unknown_batch(self.name)
            return batch if tensor.shape[0] is None else tensor.shape[0]

        shapes = {"table": ([self.rows, len(COLUMNS)], tf.float32)}
        if self.batched and per_example:
            shapes["examples"] = ([self.rows, batch_size()], tf.float32)
        if full:
            inner = tensor.shape[1:] if self.batched else tensor.shape
            errors.check_static(self.name, inner)
            shapes["full"] = ([self.rows, *([batch_size()] if self.batched else []), *inner], tensor.dtype)
        for key, (shape, dtype) in shapes.items():
            if key not in self.sources:
                self.sources[key] = tf.fill(shape, tf.cast(root, dtype))

    def tap_row(self, tensor, t):
        """A tap at a time step that only the graph knows."""
        keys = list(self.sources)
        row = self.row(t)

        @tf.custom_gradient
        def tapped(tensor, row, *tables):
            def gradient(upstream):
                upstream = tf.convert_to_tensor(upstream)
                # Not to be differentiated again under nested tapes: a norm has no derivative at 0.
                updates = [tf.stop_gradient(update(key, upstream, self.batched)) for key in keys]
                filled = [
                    tf.scatter_nd([[row]], tf.cast(update, table.dtype)[tf.newaxis], tf.shape(table))
                    for update, table in zip(updates, tables, strict=True)
                ]
                return (upstream, None, *filled)

            return tf.identity(tensor), gradient

        return tapped(tensor, row, *self.sources.values())

    @property
    def rows(self):
        """Rows of the table: the time steps, then for each index what lay beyond its capacity, by powers of
        two.
        """
        return self.cells + self.depth * BUCKETS

    def row(self, t):
        """The row of a time step, as a tensor."""
        indices = [tf.cast(index, tf.int32) for index in t]
        row, beyond = tf.constant(0), tf.constant(-1)
        for position, (index, size) in enumerate(zip(indices, self.capacity, strict=True)):
            row = row * size + index
            # Bucket k holds the indices from 2^k to 2^(k+1) - 1.
            bucket = tf.reduce_sum(tf.cast(index >= [2**k for k in range(1, 31)], tf.int32))
            outside = (index >= size) & (beyond < 0)
            beyond = tf.where(outside, self.cells + position * BUCKETS + bucket, beyond)
        return tf.where(beyond < 0, row, beyond)


def statistics(gradient, batched):
    """One row of a table, and the norms it was made from: [B] if batched, else a scalar."""
    norms = taps.row_norms(gradient, 1) if batched else taps.stack_norms([gradient])[0]
    count = tf.cast(tf.size(norms), tf.float32)
    row = [
        1.0,
        tf.reduce_sum(norms),
        count,
        tf.reduce_sum(tf.cast(tf.equal(gradient, 0), tf.float32)),
        tf.cast(tf.size(gradient), tf.float32),
        tf.reduce_sum(tf.cast(~tf.math.is_finite(norms), tf.float32)),
    ]
    return tf.stack(row), norms


def update(key, gradient, batched):
    """The contribution of a time step to its row of the table `key`."""
    if key == "full":
        return gradient
    row, norms = statistics(gradient, batched)
    return row if key == "table" else norms
