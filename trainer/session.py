"""The files of one `fit`: the lock, the checkpoints, the event files of `train` and `eval`."""

import contextlib
import os
import time

from trainer import locking, persistence
from trainer.writer import EventWriter, drop_later_events


class Session:
    """What a `fit` reads and writes below its work directory. Without one every method does nothing.

    Of several workers only the chief locks and writes; the others read the checkpoint that it resumes from.

    Args:
        trainer: the trainer.
        source: the data.
        workdir: an existing directory, or None.
        keep: how many checkpoints to keep, the best one not counted.
    """

    def __init__(self, trainer, source, workdir, keep):
        self._trainer, self._source, self._workdir = trainer, source, workdir
        self._keep, self._is_chief = keep, trainer.workers.is_chief
        self._lock = contextlib.ExitStack()
        self.store = self.train = self.eval = None
        self.last_saved = None  # the step of the newest checkpoint that is on the disk
        self.saved_at = time.monotonic()  # when the latest one was written, or could not be

    def open(self):
        """Takes the lock and restores the newest checkpoint. Returns what the host knew then, or None."""
        if self._workdir is None:
            return None
        if self._is_chief:
            self._lock.enter_context(locking.hold(self._workdir))
        self.store = persistence.open_store(self._workdir, self._keep)
        self._source.checkpointable()  # warns before the first step
        host = persistence.restore(self._trainer, self._source, self.store)
        step = self._trainer.host_step
        self.last_saved = step if host else None
        if not self._is_chief:
            return host
        if host or not step:
            # Also without a checkpoint: a run that was killed before its first one left rows that come again.
            self._drop_events(step)
        self._open_writers(step)
        return host

    def rewind(self, step):
        """Begins new event files after the rows up to a step, which training goes back to."""
        if not self._is_chief:
            return
        self._close_writers()
        self._drop_events(step)
        self._open_writers(step)

    def save(self, loop, callbacks, *, score=None, urgent=False):
        """Writes a checkpoint of the present step. Returns whether it is on the disk; without a directory it is not.

        Every worker learns whether the chief could write it.
        """
        if self.store is None:
            return False
        if self.train is not None:
            self.train.flush()
        saved = persistence.save(self._trainer, self._source, self.store, loop, callbacks, score=score, urgent=urgent)
        saved = bool(self._trainer.workers.chiefs(saved))
        if saved:
            self.last_saved = self._trainer.host_step
        # Also after a failure: a full disk is tried again after the usual seconds, not after every call.
        self.saved_at = time.monotonic()
        return saved

    def close(self):
        self._close_writers()
        self._lock.close()

    def _runs(self):
        return [os.path.join(self._workdir, run) for run in ("train", "eval")]

    def _drop_events(self, step):
        for run in self._runs():
            drop_later_events(run, step)
        if step and self._trainer.probe_every:
            self._trainer.timesteps.resume(self._runs()[0], self._trainer.timesteps.rows)

    def _open_writers(self, step):
        self.train, self.eval = (EventWriter(run, step) for run in self._runs())

    def _close_writers(self):
        for writer in (self.train, self.eval):
            if writer is not None:
                writer.close()


def check_workdir(workdir):
    """The path of a directory that can be written to; made if it is not there."""
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
