"""The host's side of the traced update: several updates per call, and what to do when a call ends early."""

import re
import warnings

import tensorflow as tf

from trainer.skips import Skips
from trainer.sources import timed
from trainer.state import SeveralGroups, StateDiscovered, traced
from trainer.update import END_OF_DATA, NONFINITE, NOT_ALLOWED

# How a call ended.
_DONE, _ENDED, _NONFINITE = 0, 1, 2


class TrainCalls:
    """Runs updates in a graph loop, many per call.

    Args:
        owner: the trainer.
    """

    def __init__(self, owner):
        self._owner = owner
        self._function = traced(self._updates)
        self._probed_function = traced(self._probed_update)
        self._spec = None
        self.traces = 0
        self.probed_traces = 0
        self.updates_per_second = None  # kept by `fit`
        self.skips = Skips(owner)

    @property
    def skipped(self):
        """Updates that were not finite, over the trainer's lifetime."""
        return self.skips.total

    def prepare(self, iterator):
        """Traces the update, which creates every variable it uses: a call with no update to make."""
        self._warn_of_retrace(iterator.element_spec)
        function = self._function
        if self._owner.run_eagerly:
            function = traced(self._updates)
        self._until_traced(lambda: function(iterator, tf.constant(0, tf.int64)))

    def _warn_of_retrace(self, spec):
        """Names what changed in the batches since the update was traced: another trace costs time and memory."""
        known, self._spec = self._spec, spec
        if known is None or known == spec:
            return
        try:
            pairs = zip(tf.nest.flatten_with_joined_string_paths(known), tf.nest.flatten(spec), strict=True)
            changed = [f"{path or 'batch'}: {old} → {new}" for (path, old), new in pairs if old != new]
        except (AttributeError, ValueError, TypeError):
            changed = [f"{known} → {spec}"]
        warnings.warn(
            f"The update is traced again, because the batches changed: {'; '.join(changed)}. Give all datasets of a "
            "trainer the same structure, types and shapes (batch sizes may differ if `drop_remainder` is not set).",
            stacklevel=4,
        )

    def _until_traced(self, call):
        """Calls a function whose trace may have to start again with what it found out."""
        for _ in range(5):
            try:
                return call()
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
            parts = None
            if self.skips.follow:
                # The next one may be the one too many: its data are kept at hand, to find out what is wrong with it.
                parts = [batch for _, batch in zip(range(owner.accumulation_steps), iterator, strict=False)]
                status = self._call(_again(parts, iterator.element_spec), 1) if parts else _ENDED
                if status == _DONE:
                    owner.host_step += 1
                    continue
            else:
                status = self._call(iterator, target - owner.host_step)
            if status == _DONE:
                owner.host_step = target
                continue
            owner.host_step = int(owner.step.numpy())
            if status == _ENDED:
                return True
            self._skip(parts)
        return False

    def run_probed(self, iterator):
        """One update with probes. Returns (whether the data ended before it, {minimizer: report} or None)."""
        function = self._probed_update if self._owner.run_eagerly else self._probed_function
        status, reports = self._guarded(lambda: self._until_traced(lambda: function(iterator)))
        self._owner.host_step = int(self._owner.step.numpy())
        if status == _NONFINITE:
            self._skip()
        return status == _ENDED, reports

    def forget(self):
        """Makes every next update trace anew."""
        self._function = traced(self._updates)
        self._probed_function = traced(self._probed_update)

    def forget_probes(self):
        """Makes the next probed update trace anew, with a larger capacity."""
        self._probed_function = traced(self._probed_update)
        for minimizer in self._owner.minimizers.values():
            minimizer.forget_probes()

    def _probed_update(self, iterator):
        """One update with probes. Nothing aborts, so that an update that is not finite has its report, too."""
        self.probed_traces += 1
        owner = self._owner
        owner.probing, owner.aborting = True, False
        try:
            status = self._update(iterator)
            with tf.control_dependencies([status]):
                return owner.ledger.drain(), status, dict(owner.tracing.reports)
        finally:
            owner.probing, owner.aborting = False, True

    def _call(self, iterator, count):
        """One call of the traced function. Returns how it ended."""
        if self._owner.run_eagerly:
            return self._guarded(lambda: self._eager_updates(iterator, count))[0]
        return self._guarded(lambda: self._function(iterator, tf.constant(count, tf.int64)))[0]

    def _guarded(self, call):
        """(how a call ended, what it returned beside sums and status); the end of the data is not an error."""
        ledger = self._owner.ledger
        try:
            sums, status, *rest = call()
            ledger.receive(sums)
            return int(status), *(rest or [None])
        except StopIteration:
            status = _ENDED
        except tf.errors.OutOfRangeError as error:
            if "End of sequence" not in error.message:
                raise
            status = _ENDED
        except tf.errors.InvalidArgumentError as error:
            if "A label of loss" in error.message:
                raise ValueError(re.search(r"A label of loss[^\]]*", error.message)[0].replace("\\", "")) from None
            if NOT_ALLOWED in error.message:
                for minimizer in self._owner.minimizers.values():
                    minimizer.explain_refusal()
            if END_OF_DATA not in error.message and NONFINITE not in error.message:
                raise
            status = _ENDED if END_OF_DATA in error.message else _NONFINITE
        ledger.receive(ledger.drain())
        return status, None

    def _eager_updates(self, iterator, count):
        status = _DONE
        for _ in range(count):
            batch = next(iterator, None)
            status = _ENDED if batch is None else int(self._update(iterator, batch))
            if status != _DONE:
                break
        return self._owner.ledger.drain(), status

    def _updates(self, iterator, count):
        """`count` updates in a graph loop. Returns the ledger's sums and how it ended."""
        self.traces += 1
        # An aborted call leaves the collective operations of several replicas out of step: there, nothing aborts.
        self._owner.aborting = self._owner.replicas == 1
        update = self._update if self._owner.replicas == 1 else self._guarded_update

        def body(index, _):
            status = update(iterator)
            return index + 1, status

        # One iteration at a time: the next one starts when everything the last one wrote is written.
        done = tf.while_loop(
            lambda index, status: (index < count) & (status == _DONE),
            body,
            (tf.constant(0, tf.int64), tf.constant(_DONE)),
            parallel_iterations=1,
        )
        with tf.control_dependencies(done):
            return self._owner.ledger.drain(), done[1]

    def _guarded_update(self, iterator):
        optional = iterator.get_next_as_optional()
        run = lambda: self._update(iterator, optional.get_value())  # noqa: E731
        return tf.cond(optional.has_value(), run, lambda: tf.constant(_ENDED))

    def _update(self, iterator, batch=None):
        """One update on the next batches (`batch` is the first, if it is taken already). Returns how it ended."""
        owner = self._owner
        streaming = owner.replicas == 1 and not owner.overrides("train_step") and not tf.executing_eagerly()
        streaming &= not owner.combiner.needs_losses_after  # which looks at the same data twice
        owner.tracing.begin()
        if streaming and owner.accumulation_steps > 1:
            owner.main.from_iterator(iterator)
            passed = owner.end_update({}, None)
        else:
            if batch is None:
                batch, seconds = timed(lambda: next(iterator))
                owner.ledger.waited(seconds)
            parts = fetch(iterator, owner.accumulation_steps, batch)
            if owner.overrides("train_step") or len(parts) == 1:
                batch = concatenate(parts)
                passed = owner.end_update(owner.hook("train_step")(batch), batch)
            else:
                owner.main.from_parts(parts)
                passed = owner.end_update({}, None)
        return tf.where(passed, _DONE, _NONFINITE)

    def _skip(self, parts=None):
        """Counts the update whose assertion ended the call: its data are gone, nothing was written."""
        owner = self._owner
        step = owner.host_step
        owner.step.assign(step + 1)
        owner.host_step = step + 1
        self.skips.count(step, parts)


def _again(parts, spec):
    """An iterator of batches that were taken from one of the given specification: no new trace."""
    return iter(tf.data.Dataset.from_generator(lambda: iter(parts), output_signature=spec))


def fetch(iterator, count, first):
    """`count` batches as a list, of which the first is taken already.

    Those past the end of the data have no rows, or are left out if eager.
    """
    parts = [first]
    while len(parts) < count:
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
    return tf.nest.map_structure(
        lambda *leaves: leaves[0] if leaves[0].shape.rank == 0 else tf.concat(leaves, 0), *parts
    )
