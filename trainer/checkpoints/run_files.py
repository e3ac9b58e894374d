"""The files of one `fit`: the lock, the checkpoints, the event files of `train` and `eval`."""

import contextlib
import os
import time
import uuid
import warnings

import tensorflow as tf
from absl import logging

from looptape.trainer.checkpoints import export, lock, trainer_state
from looptape.trainer.checkpoints import store as checkpoints
from looptape.trainer.checkpoints.contents import compatibility
from looptape.trainer.checkpoints.contents.snapshot import BackgroundWriter
from looptape.trainer.summaries import scalars
from looptape.trainer.summaries.event_writer import EventWriter, drop_later_events

RUN = "run_id"  # the file with the name of the run


class Session:
    """The files that a `fit` reads and writes below its work directory. Without one every method does nothing.

    Of several workers only the chief locks and writes; the others read the checkpoint that it resumes from.

    Args:
        trainer: the trainer.
        source: the data.
        workdir: an existing directory, or None.
        keep: how many checkpoints to keep, the best one not counted.
    """

    def __init__(self, trainer, source, workdir, keep):
        self._trainer, self._source, self._workdir = trainer, source, workdir
        trainer.workdir = workdir or trainer.workdir
        self._keep, self._is_chief = keep, trainer.workers.is_chief
        self._lock, self._writer = contextlib.ExitStack(), BackgroundWriter()
        self.store = self.train = self.eval = None
        self.last_saved = None  # the step of the newest checkpoint that is on the disk
        self.saved_at = time.monotonic()  # when the latest one was written, or could not be

    def open(self):
        """Takes the lock and restores the newest checkpoint. Returns what the host knew then, or None."""
        if self._workdir is None:
            return None
        if self._is_chief:
            self._lock.enter_context(lock.hold(self._workdir))
        self.store = trainer_state.open_store(self._workdir, self._keep)
        self._source.checkpointable()  # warns before the first step
        self._trainer.calls.check_lost_state()
        host = trainer_state.restore(self._trainer, self._source, self.store)
        self.store.run = run_id(self._workdir, self.store.run) if self._is_chief else None
        compatibility.compare_run(host and host["run"], self.store.run, self.store.directory)
        step = self._trainer.counters.step
        self.last_saved = step if host else None
        if not self._is_chief:
            return host
        if host or not step:
            # Also without a checkpoint: a run that was killed before its first one left rows that come again.
            self._rewind_events(step, host)
        self._open_writers(step)
        return host

    def rewind(self, step, host):
        """Begins new event files after the rows up to a step, which training goes back to; `host` as it was then."""
        if not self._is_chief:
            return
        self._close_writers()
        self._rewind_events(step, host)
        self._open_writers(step)

    def save(self, loop, callbacks, *, score=None, urgent=False):
        """Takes a copy of the present step, which a thread writes. Returns whether it is on the disk, if `urgent`.

        With `urgent` it waits for that. So do several workers, who all learn whether the chief could write it.
        Without a directory it does nothing and returns False.
        """
        if self.store is None:
            return False
        if self.train is not None:
            self.train.flush()
        trainer, store, written = self._trainer, self.store, []
        self.wait()  # first the one before, so that memory holds one copy at most
        taken = trainer_state.take(trainer, self._source, loop, callbacks, score=score)
        if self._is_chief:
            self._writer.submit(lambda: store.write(taken), self._finisher(taken, urgent, written))
        saved = False
        if urgent or trainer.workers.count > 1:
            self.wait()
            saved = bool(trainer.workers.chiefs(bool(written)))
            self.last_saved = taken.step if saved else self.last_saved
        # Also after a failure: a full disk is tried again after the usual seconds, not after every call.
        self.saved_at = time.monotonic()
        return saved

    def _finisher(self, taken, urgent, written):
        """Finishes a save in the training thread, once the checkpoint is on disk or its writing has failed."""
        source, store, step = self._source, self.store, taken.step
        position, passes = source.position, source.passes

        def finish(error):
            if not store.report(step, error, urgent=urgent):
                return
            self.last_saved = step
            written.append(step)
            if "iterator" in taken.contents and source.passes == passes:
                source.anchor = position, checkpoints.prefix(store.path(step))

        return finish

    def poll(self):
        """Notes a checkpoint that has been written meanwhile. Raises what went wrong in its thread."""
        self._writer.poll()

    def wait(self):
        """Waits until the checkpoint that is being written is on the disk. Raises what went wrong in its thread."""
        self._writer.wait()

    def export_if_due(self):
        """Exports the model of a finished run that was killed before it could; with the newest checkpoint restored."""
        if self.store is None or not self._is_chief or not os.path.isdir(self.store.path(self._trainer.counters.step)):
            return
        saved_at = os.path.getmtime(self.store.path(self._trainer.counters.step))
        export.export_if_due(self._trainer, self._workdir, saved_at)

    def close(self):
        """Ends everything; also after an error, which an error of the thread does not replace."""
        try:
            self.wait()
        except Exception as error:
            warnings.warn(f"A checkpoint could not be written to {self._workdir}: {error!r}.", stacklevel=2)
        finally:
            self._close_writers()
            self._lock.close()

    def _runs(self):
        return [os.path.join(self._workdir, run) for run in ("train", "eval")]

    def _rewind_events(self, step, host):
        try:
            self._drop_events(step, host)
        except (tf.errors.OpError, OSError) as error:
            raise RuntimeError(
                f"Rows after the checkpoint could not be removed from the event files in {self._workdir}: {error}. "
                "Free some space and start again; the checkpoints are intact."
            ) from error

    def _drop_events(self, step, host):
        """Drops rows that come again: later ones, and those of this step that were written after the checkpoint."""
        loop = host["loop"] if host else {"last_logged": None, "last_evaluated": None}
        train, evaluation = self._runs()
        drop_later_events(train, step, scalars.ROW if loop["last_logged"] != step else None)
        drop_later_events(evaluation, step, "" if loop["last_evaluated"] != step else None)
        if step and self._trainer.probe_every:
            self._trainer.timesteps.resume(self._runs()[0])
        if step and (self._trainer.probe_every or self._trainer.health_every):
            self._trainer.health_log.resume(self._runs()[0])

    def _open_writers(self, step):
        self.train, self.eval = (EventWriter(run, step) for run in self._runs())

    def _close_writers(self):
        for writer in (self.train, self.eval):
            if writer is not None:
                writer.close()


def run_id(workdir, found=None):
    """The name of the run that a work directory belongs to; the first call gives it one.

    Args:
        workdir: an existing directory.
        found: the name in the newest checkpoint, which a directory without one takes over.
    """
    path = os.path.join(workdir, RUN)
    name = found or uuid.uuid4().hex[:12]
    with contextlib.suppress(OSError), open(path, "a+") as file:  # a full disk: named at the next start
        file.seek(0)
        known = file.read().strip()
        if known:
            return known
        file.write(name)
    return name


def check_workdir(workdir, checkpoint_every=None):
    """The path of a directory that can be written to, made if it is not there; or None. Notes what needs one."""
    if workdir is None:
        if checkpoint_every is not None:
            logging.warning(
                "`checkpoint_every` is %s without `workdir`: no checkpoint is written. Pass a `workdir`, or leave it "
                "out.",
                checkpoint_every,
            )
        return None
    if not isinstance(workdir, str | os.PathLike):
        raise TypeError(f"`workdir` is {workdir!r}; it must be the path of a directory. Use e.g. 'runs/first'.")
    workdir = os.fspath(workdir)
    try:
        os.makedirs(workdir, exist_ok=True)
        if not os.access(workdir, os.W_OK):
            raise PermissionError("it is not writable")
    except OSError as error:
        raise ValueError(
            f"`workdir` {workdir!r} cannot be used: {error}. Choose a directory that this user may write to."
        ) from error
    return workdir
