"""What keeps a run alive or explains its death: the best checkpoint, the way back from updates that are not finite."""

from absl import logging

from trainer import autopsy, persistence
from trainer.skips import NonFiniteUpdates

POLICIES = ("skip", "raise", "restore")


def prepare(trainer, source):
    """Checks `on_nonfinite` before the first step, and notes where the data begin if an error is to look at them."""
    if trainer.on_nonfinite not in POLICIES:
        raise ValueError(f"`on_nonfinite` is {trainer.on_nonfinite!r}; it must be one of {', '.join(POLICIES)}.")
    if trainer.on_nonfinite == "raise":
        source.checkpointable(warn=False)


class Best:
    """The best evaluation so far, by one of its results.

    Args:
        name: of the result, with a minus where larger is better; or None.
        evaluating: whether there is an evaluation.
    """

    def __init__(self, name, evaluating):
        if name is not None and not evaluating:
            raise ValueError(
                f"`keep_best` is {name!r} without `eval_dataset`; there is no evaluation to tell the best. Pass both."
            )
        self.wanted = name is not None
        self._name = (name or "").removeprefix("-").removeprefix("val_")
        self._sign = -1.0 if (name or "").startswith("-") else 1.0
        self._step = self._latest = self._best = None
        self._is_new = False

    def see(self, step, results):
        """Notes an evaluation."""
        if not self.wanted:
            return
        if self._name not in results:
            raise ValueError(f"`keep_best` is {self._name!r}; the evaluation gives {sorted(results)}. Use one of them.")
        self._step, self._latest = step, self._sign * results[self._name]
        self._is_new = self._best is None or self._latest < self._best
        self._best = self._latest if self._is_new else self._best

    def score(self, step, new=False):
        """How good the model of this step is, smaller is better; None if not evaluated (or no `new` best)."""
        known = self._step == step and (self._is_new or not new)
        return self._latest if known else None

    def state(self):
        return [self._step, self._latest, self._best]

    def restore(self, state):
        self._step, self._latest, self._best = state


def go_back(trainer, source, files, error):
    """Back to the last good checkpoint, if the trainer wants that. Returns what the host knew then, or None."""
    if trainer.on_nonfinite != "restore" or files.store is None or trainer.restores >= trainer.max_restores:
        return None
    failed_at = trainer.host_step
    found = persistence.go_back(trainer, source, files.store)
    if found is None:
        return None
    step, host = found
    trainer.restores += 1
    files.rewind(step)
    logging.warning(
        "%s Back to the checkpoint of step %d, and on with the data after step %d (return %d of at most %d).",
        str(error),
        step,
        failed_at,
        trainer.restores,
        trainer.max_restores,
    )
    return host


def explain(trainer, source, workdir, error):
    """The error with what an eager run of the same update finds."""
    parts = error.parts or source.refetch(trainer.accumulation_steps)
    advice = str(error)
    if trainer.on_nonfinite == "restore" and workdir is None:
        advice += " (`on_nonfinite` is 'restore', but without `workdir` there is nothing to go back to.)"
    if parts is None:
        return NonFiniteUpdates(advice + " The data of this update are gone, so it cannot be looked at again.")
    return NonFiniteUpdates(f"{advice}\n{autopsy.examine(trainer, source, parts, workdir)}", parts)
