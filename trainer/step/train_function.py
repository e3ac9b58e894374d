"""The host's side of the traced update: several updates per call, and what to do when a call ends early."""

import contextlib
import functools
import warnings

import keras
import tensorflow as tf

from looptape.trainer.data import batches
from looptape.trainer.data.adapters import SECOND_PASS
from looptape.trainer.data.batches import again
from looptape.trainer.data.source import timed
from looptape.trainer.health.spikes import SpikedUpdate
from looptape.trainer.health.undo import Undo
from looptape.trainer.step import lost_state
from looptape.trainer.step.division import OutOfMemory
from looptape.trainer.step.forward import loss_terms
from looptape.trainer.step.forward.forward_state import SeveralGroups, StateDiscovered
from looptape.trainer.step.minimizer import END_OF_DATA
from looptape.trainer.step.pipeline import NONFINITE, NOT_ALLOWED
from looptape.trainer.step.plan import Mode
from looptape.trainer.variables import traced

# How a call ended.
_DONE, _ENDED, _NONFINITE, _UNEVEN = 0, 1, 2, 3


class TrainCalls:
    """Runs updates in a graph loop, many per call.

    Args:
        owner: the trainer.
    """

    def __init__(self, owner):
        self._owner = owner
        self._function = traced(self._updates)
        self._observed_functions = {}  # {(with probes, with health): traced function of one update}
        self._spec = self._graph = self._examined = None
        self.own_rows = False  # the batches that the update was traced for have the rows of this worker only
        self._undo = Undo(owner)
        self._asking = False  # before each update the workers ask each other whether their data have ended
        self.checksum = 0  # of the first batch of the latest call, where several workers compare them
        self._holding = False  # each batch is kept until its update is made
        self.traces = 0
        self.probed_traces = 0
        self.updates_per_second = None  # see `note_speed`

    def prepare(self, iterator, own_rows=False, counted=True):
        """Traces the update, which creates every variable it uses: a call with no update to make.

        Args:
            iterator: of the data.
            own_rows: whether its batches have the rows of this worker only, and not those of all.
            counted: whether their number is known, and so equal on all workers.
        """
        self._undo.forget()
        asking = self._owner.workers.count > 1 and not counted
        if (own_rows, asking) != (self.own_rows, self._asking):
            self.own_rows, self._asking = own_rows, asking
            self.forget()
        self._warn_of_retrace(iterator.element_spec)
        self._graph = self._trace(iterator, tf.constant(0, tf.int64))
        if self._owner.hook_state.find(self._graph):
            self.forget()
            self._graph = self._trace(iterator, tf.constant(0, tf.int64))

    def _trace(self, *arguments):
        """The graph of the traced update."""
        function = traced(self._updates) if self._owner.run_eagerly else self._function
        self._until_traced(lambda: function(*arguments))
        return function.get_concrete_function(*arguments).graph

    def captured(self):
        """[tf.Variable] that the traced update reads or assigns. After `prepare`."""
        return list(self._graph.variables)

    def check_lost_state(self):
        """Names state of the hooks that no checkpoint can hold. Before the first step; once."""
        if self._graph is not None and self._graph is not self._examined:
            lost_state.check(self._graph)
            self._examined = self._graph

    def _warn_of_retrace(self, spec):
        """Names what changed in the batches since the update was traced: another trace costs time and memory."""
        known, self._spec = self._spec, spec
        if known is None or known == spec:
            return
        try:
            pairs = zip(keras.tree.flatten_with_path(known), tf.nest.flatten(spec), strict=True)
            names = (("/".join(map(str, path)) or "batch", old, new) for (path, old), new in pairs)
            changed = [f"{name}: {old} → {new}" for name, old, new in names if old != new]
        except ValueError:  # another structure
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
        target = owner.counters.step + count
        while owner.counters.step < target:
            parts, many = None, 1 if self._undo.wanted else target - owner.counters.step
            self._undo.take()
            if self._owner.counters.skips.follow or self._holding:
                # The next update may be one skip too many, or not fit into memory: keep its data.
                parts = [batch for _, batch in zip(range(owner.accumulation_steps), iterator, strict=False)]
                with keeping(parts):
                    found = self._all_have(bool(parts))
                    status, many = self._call(again(parts, iterator.element_spec), 1) if found else _ENDED, 1
            else:
                status = self._call(iterator, many)
            if status == _DONE:
                owner.counters.made(many)
                continue
            owner.counters.read_step(owner.step)
            if status == _UNEVEN:
                raise owner.workers.uneven()
            if status == _ENDED:
                return True
            self._skip(parts)
        return False

    def run_observed(self, iterator, probing, examining):
        """One update with probes, with the health of every variable, or both.

        Returns (whether the data ended before it, ({minimizer: probes' report}, {minimizer: health}) or None).
        """
        if not (probing or examining):
            return self.run(iterator, 1), None
        key = probing, examining
        if key not in self._observed_functions:
            observed = functools.partial(self._observed_update, probing, examining)
            self._observed_functions[key] = observed if self._owner.run_eagerly else traced(observed)
        function, parts = self._observed_functions[key], None
        if self._holding or self._asking:
            parts = [next(iterator, None)]
            if not self._all_have(parts[0] is not None):
                return True, None
            iterator = again(parts, iterator.element_spec)
        self._undo.take()
        with keeping(parts):
            status, reports, *checksum = self._guarded(lambda: self._until_traced(lambda: function(iterator)))
        self.checksum = int(checksum[0]) if checksum else self.checksum
        self._owner.counters.read_step(self._owner.step)
        if status == _NONFINITE:
            self._skip(reports=reports)
        return status == _ENDED, reports

    def hold(self, whether):
        """Keeps each batch until its update is made, or no longer does."""
        self._holding = whether

    def note_speed(self, done, seconds):
        """Notes how long a call of `fit` took, by which the next one is made as long as it may be."""
        if done and seconds > 0:
            rate, known = done / seconds, self.updates_per_second
            # The first call includes what TensorFlow does once; a slow call must shorten the next at once.
            self.updates_per_second = rate if known is None or rate < known else 0.5 * (known + rate)

    def take(self, iterator):
        """(an iterator of the data of the next update, the same data as a list): to look at them before. Eager."""
        parts = [batch for _, batch in zip(range(self._owner.accumulation_steps), iterator, strict=False)]
        return again(parts, iterator.element_spec), parts

    def forget(self):
        """Makes every next update trace anew."""
        self._function = traced(self._updates)
        self._observed_functions.clear()

    def _all_have(self, available):
        """Whether this worker has a next batch, and so all have. Raises an error on all of them if only some have."""
        return self._owner.workers.all_have(available) if self._asking else available

    def forget_probes(self):
        """Makes the next probed update trace anew, with a larger capacity."""
        self._observed_functions.clear()
        for minimizer in self._owner.minimizers.values():
            minimizer.forget_probes()

    def _observed_update(self, probing, examining, iterator):
        """One observed update. Nothing aborts, so that a non-finite update has its report, too."""
        self.probed_traces += probing
        owner = self._owner
        owner.mode = Mode(probing, examining, aborting=False)
        try:
            batch = next(iterator) if owner.workers.count > 1 else None
            checksum = () if batch is None else (batches.checksum(batch),)
            status = self._update(iterator, batch)
            with tf.control_dependencies([status]):
                reports = dict(owner.tracing.reports), dict(owner.tracing.health)
                return owner.ledger.drain(), status, reports, *checksum
        finally:
            owner.mode = Mode()

    def _call(self, iterator, count):
        """One call of the traced function. Returns how it ended."""
        if self._owner.run_eagerly:
            return self._guarded(lambda: self._eager_updates(iterator, count))[0]
        status, checksum = self._guarded(lambda: self._function(iterator, tf.constant(count, tf.int64)))
        self.checksum = self.checksum if checksum is None else int(checksum)
        return status

    def _guarded(self, call):
        """As `_ended`. Whatever else ends a call, the host knows how many updates were made."""
        owner = self._owner
        try:
            return self._ended(call)
        except tf.errors.ResourceExhaustedError as error:
            owner.counters.read_step(owner.step)
            owner.ledger.receive(owner.ledger.drain())
            owner.hook_state.put_back()
            raise owner.division.ran_out(error) from None
        except BaseException:
            with contextlib.suppress(tf.errors.OpError):  # a lost worker's step cannot be read
                owner.counters.read_step(owner.step)
            raise

    def _ended(self, call):
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
        except tf.errors.UnknownError as error:  # raised by Python code inside the dataset
            if SECOND_PASS in error.message:
                raise ValueError(SECOND_PASS) from None
            raise
        except tf.errors.InvalidArgumentError as error:
            loss_terms.explain_assertion(error)
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
        for index in range(count):
            batch = next(iterator, None)
            self._all_have(batch is not None)
            if index == 0 and batch is not None and self._owner.workers.count > 1:
                self.checksum = int(batches.checksum(batch))
            status = _ENDED if batch is None else int(self._update(iterator, batch))
            if status != _DONE:
                break
        return self._owner.ledger.drain(), status

    def _updates(self, iterator, count):
        """`count` updates in a graph loop. Returns the ledger's sums and how it ended.

        Of several workers also the checksum of the first batch, by which they compare their data.
        """
        self.traces += 1
        # An aborted call leaves the collective operations of several replicas out of step: there, nothing aborts.
        self._owner.mode = Mode(aborting=self._owner.replicas == 1)
        checksum = (tf.zeros([], tf.int64),) if self._owner.workers.count > 1 else ()

        def body(index, _, *checksum):
            if self._owner.replicas == 1:
                return index + 1, self._update(iterator), *checksum
            return index + 1, *self._guarded_update(iterator, index, checksum)

        # One iteration at a time: the next one starts when everything the last one wrote is written.
        done = tf.while_loop(
            lambda index, status, *_: (index < count) & (status == _DONE),
            body,
            (tf.constant(0, tf.int64), tf.constant(_DONE), *checksum),
            parallel_iterations=1,
        )
        with tf.control_dependencies(done):
            return self._owner.ledger.drain(), *(tf.identity(each) for each in done[1:])

    def _guarded_update(self, iterator, index, checksum):
        """(how an update ended, and, of several workers, the checksum of the call's first batch)."""
        optional = iterator.get_next_as_optional()

        def run():
            batch = optional.get_value()
            if not checksum:
                return (self._update(iterator, batch),)
            first = tf.cond(index == 0, lambda: batches.checksum(batch), lambda: checksum[0])
            return self._update(iterator, batch), first

        if not self._asking:
            return tf.cond(optional.has_value(), run, lambda: (tf.constant(_ENDED), *checksum))
        everyone, some = self._owner.workers.have_next(optional.has_value())
        return tf.cond(everyone, run, lambda: (tf.where(some, _UNEVEN, _ENDED), *checksum))

    def _update(self, iterator, batch=None):
        """As `_one_update`, after what the hooks assign at once was copied."""
        with tf.control_dependencies(self._owner.hook_state.keep()):
            return self._one_update(iterator, batch)

    def _one_update(self, iterator, batch):
        """One update on the next batches (`batch` is the first, if it is taken already). Returns how it ended."""
        owner = self._owner
        streaming = owner.replicas == 1 and not owner.overrides("train_step") and not tf.executing_eagerly()
        streaming &= not owner.combiner.needs_losses_after  # which looks at the same data twice
        with owner.tracing.update():
            if streaming and owner.accumulation_steps > 1:
                owner.main.from_iterator(iterator)
                passed = owner.end_update({}, None)
            else:
                if batch is None:
                    batch, seconds = timed(lambda: next(iterator))
                    owner.ledger.waited(seconds)
                batch = owner.open_window(batch)
                parts = batches.take(iterator, owner.accumulation_steps, batch)
                if owner.overrides("train_step") or len(parts) == 1:
                    batch = batches.concatenate(parts)
                    passed = owner.end_update(owner.hook("train_step")(batch), batch)
                else:
                    owner.main.from_parts(parts)
                    passed = owner.end_update({}, None)
        return tf.where(passed, _DONE, _NONFINITE)

    def _skip(self, parts=None, reports=None):
        """Counts the update whose assertion ended the call. Its data are gone; a spike is undone and raised."""
        owner = self._owner
        owner.hook_state.put_back()
        step = owner.counters.step
        spikes = {m: m.spikes.take() for m in owner.minimizers.values() if m.spikes}
        minimizer = next((m for m, found in spikes.items() if found), None)
        if minimizer is not None:
            self._undo.give()
        owner.step.assign(step + 1)
        owner.counters.made()
        if minimizer is not None:
            raise SpikedUpdate(step, spikes[minimizer], minimizer, parts, reports)
        owner.counters.skips.count(step, parts)

    def let_through(self, spike, parts, spec, observed):
        """Makes the update of a spike after all, on its micro-batches. The step is counted already.

        Returns the reports that `run_observed` gives for `observed`.
        """
        owner = self._owner
        owner.step.assign(spike.step)
        owner.counters.return_to(spike.step)
        guards = [minimizer.spikes for minimizer in owner.minimizers.values()]
        for guard in guards:
            guard.let_pass(True)
        try:
            return self.run_observed(again(parts, spec), *observed)[1]
        finally:
            for guard in guards:
                guard.let_pass(False)


@contextlib.contextmanager
def keeping(parts):
    """Gives an `OutOfMemory` the batches that its update was made on."""
    try:
        yield
    except OutOfMemory as error:
        error.parts = parts
        raise
