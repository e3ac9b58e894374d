"""The host's side of the traced update: several updates per call, and what to do when a call ends early."""

import math

import tensorflow as tf

from trainer import batches
from trainer.state import SeveralGroups, StateDiscovered
from trainer.update import END_OF_DATA, NONFINITE


class TrainCalls:
    """Runs updates in a graph loop, many per call.

    Args:
        owner: the trainer.
    """

    def __init__(self, owner):
        self._owner = owner
        self._function = tf.function(self._updates, autograph=False)
        self.traces = 0
        self.updates_per_second = None  # kept by `fit`
        self.skipped = 0
        self._in_a_row = 0
        self._last_skipped = None
        self._first_broken = None

    def prepare(self, iterator):
        """Traces the update, which creates every variable it uses: a call with no update to make."""
        function = self._function
        if self._owner.run_eagerly:
            function = tf.function(self._updates, autograph=False)
        for _ in range(5):
            try:
                function(iterator, tf.constant(0, tf.int64))
                return
            except StateDiscovered as discovered:
                self._owner.forward_state.add(discovered.variables)
            except SeveralGroups:
                pass
        raise RuntimeError(
            "The forward pass assigns new variables every time it is traced. Create variables once, in `build` or "
            "`__init__`, not in `call`."
        )

    def run(self, iterator, count):
        """Runs up to `count` updates. Returns whether the data ended before they were done."""
        owner = self._owner
        target = owner.host_step + count
        while owner.host_step < target:
            try:
                remaining = target - owner.host_step
                if owner.run_eagerly:
                    for _ in range(remaining):
                        self._update(iterator)
                    owner.ledger.receive(owner.ledger.drain())
                else:
                    owner.ledger.receive(self._function(iterator, tf.constant(remaining, tf.int64)))
                owner.host_step = target
            except (tf.errors.OutOfRangeError, StopIteration) as error:
                if isinstance(error, tf.errors.OutOfRangeError) and "End of sequence" not in error.message:
                    raise
                self._catch_up()
                return True
            except tf.errors.InvalidArgumentError as error:
                self._catch_up()
                if END_OF_DATA in error.message:
                    return True
                if NONFINITE not in error.message:
                    raise
                self._skip()
        return False

    def _updates(self, iterator, count):
        self.traces += 1

        def body(index):
            self._update(iterator)
            return (index + 1,)

        # One iteration at a time: the next one starts when everything the last one wrote is written.
        done = tf.while_loop(lambda index: index < count, body, (tf.constant(0, tf.int64),), parallel_iterations=1)
        with tf.control_dependencies(done):
            return self._owner.ledger.drain()

    def _catch_up(self):
        """Reads how far a call got that ended early."""
        self._owner.host_step = int(self._owner.step)
        self._owner.ledger.receive(self._owner.ledger.drain())

    def _update(self, iterator):
        owner = self._owner
        if owner.strategy.num_replicas_in_sync > 1:
            parts = fetch(iterator, owner.accumulation_steps)
            owner.strategy.run(self._replica_update, args=(parts,))
            return
        owner.begin_update()
        if owner.accumulation_steps > 1 and not owner.overrides("train_step") and not tf.executing_eagerly():
            owner.main.from_iterator(iterator)
            owner.end_update({}, None)
        else:
            batch = next(iterator)
            if owner.accumulation_steps > 1:
                batch = concatenate(fetch(iterator, owner.accumulation_steps - 1, batch))
            owner.end_update(owner.train_step(batch), batch)

    def _replica_update(self, parts):
        owner = self._owner
        owner.begin_update()
        replicas, replica = owner.strategy.num_replicas_in_sync, owner.replica_id()
        parts = [batches.slice_for_replica(part, replica, replicas) for part in parts]
        if owner.overrides("train_step"):
            batch = concatenate(parts)
            owner.end_update(owner.train_step(batch), batch)
        else:
            owner.main.from_parts(parts)
            owner.end_update({}, None)

    def _skip(self):
        """Counts the update whose assertion ended the call: its data are gone, nothing was written."""
        owner = self._owner
        step = owner.host_step
        owner.step.assign(step + 1)
        owner.host_step = step + 1
        self.skipped += 1
        follows = self._last_skipped is not None and step == self._last_skipped + 1
        self._last_skipped = step
        if owner.loss_scale.shrink():
            return
        self._in_a_row = self._in_a_row + 1 if follows else 1
        if self._in_a_row == 1:
            self._first_broken = (step, _broken(owner))
        if self._in_a_row >= owner.max_skipped:
            first, reason = self._first_broken
            raise FloatingPointError(
                f"{self._in_a_row} updates in a row were not finite, from step {first} on: {reason}. Nothing was "
                "applied since. Lower the learning rate, set `clip_norm`, or check the data of these steps."
            )


def _broken(owner):
    """Which loss was the first to be non-finite, in words."""
    for minimizer in owner.minimizers.values():
        if minimizer.last is None:
            continue
        values = owner.ledger.last(minimizer)
        broken = {name: value for name, value in values["loss"].items() if not math.isfinite(value)}
        if broken:
            return ", ".join(f"loss/{name} became {value}" for name, value in broken.items())
        if not math.isfinite(values["norm"]):
            return f"the gradient norm became {values['norm']} while every loss was finite"
    return "a value became non-finite"


def fetch(iterator, count, first=None):
    """The next `count` batches as a list; those past the end of the data have no rows. `first` is put before them.

    Without `first`, the end of the data at the first batch is the iterator's own error.
    """
    parts = [next(iterator)] if first is None else [first]
    total = count if first is None else count + 1
    while len(parts) < total:
        if tf.executing_eagerly():
            batch = next(iterator, None)
            if batch is None:
                break
            parts.append(batch)
        else:
            optional = iterator.get_next_as_optional()
            parts.append(tf.cond(optional.has_value(), optional.get_value, lambda: _empty(parts[0])))
    return parts


def _empty(batch):
    return tf.nest.map_structure(lambda leaf: leaf if leaf.shape.rank == 0 else leaf[:0], batch)


def concatenate(parts):
    """One batch from several. Scalars are taken from the first."""
    if len(parts) == 1:
        return parts[0]
    return tf.nest.map_structure(lambda *leaves: leaves[0] if leaves[0].shape.rank == 0 else tf.concat(leaves, 0), *parts)
