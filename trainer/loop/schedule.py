"""Schedules logging, evaluation, probes and checkpoints during `fit`."""

import math
import time

from looptape.trainer import arguments
from looptape.trainer.counters import Phases

# The longest call: signals, the bar and the clock are served between calls.
_SECONDS_PER_CALL = 0.5
# Also probed and examined, where they come before the first interval ends: gradients change most at the start.
_EARLY_PROBES = (1, 2, 5, 10, 20)


class Agenda:
    """The intervals of one `fit`. All count updates, but for the seconds between checkpoints.

    Args:
        trainer: the trainer.
        source: the data.
        steps: lifetime total of updates, or None when training by epochs.
        log_every: see `Trainer.fit`, as the others.
        eval_every: only with `evaluating`.
        checkpoint_every: beside `save_seconds`.
        save_seconds: seconds between checkpoints, or None.
        evaluating: whether there is a dataset to evaluate on.
    """

    def __init__(self, trainer, source, *, steps, log_every, eval_every, checkpoint_every, save_seconds, evaluating):
        self._trainer, self._source, self._steps, self._evaluating = trainer, source, steps, evaluating
        self._eval_every = _interval("eval_every", eval_every)
        if self._eval_every and not evaluating:
            raise ValueError("`eval_every` is given without `eval_dataset`; there is nothing to evaluate. Pass both.")
        self._log_every = _interval("log_every", log_every)
        self._checkpoint_every = _interval("checkpoint_every", checkpoint_every)
        self._save_seconds = arguments.check_positive("checkpoint_every_seconds", save_seconds, "Use None for never.")

    @property
    def intervals(self):
        return self._log_every, self._eval_every, self._checkpoint_every

    def updates_to_run(self, every_update):
        """Updates until something is due; 0 if the next one is probed or examined (see `observed`).

        Args:
            every_update: a callback wants to see each of them.
        """
        trainer = self._trainer
        step = trainer.counters.step
        stops = [interval - step % interval for interval in self.intervals if interval]
        if trainer.probe_every:
            stops.append(next_probe(step, trainer.probe_every) - 1 - step)
        if trainer.health_every:
            stops.append(next_probe(step, trainer.health_every) - 1 - step)
        if trainer.bptt_compare_every:
            stops.append(trainer.bptt_compare_every - 1 - step % trainer.bptt_compare_every)
        if self._steps is not None:
            stops.append(self._steps - step)
        remaining = self._source.remaining()
        if remaining is not None:
            stops.append(max(math.ceil(remaining / trainer.accumulation_steps), 1))
        for phases in (trainer.trainer.accumulation_steps, trainer.freezing.phases):
            if isinstance(phases, Phases) and phases.next_change(step) is not None:
                stops.append(phases.next_change(step) - step)
        if every_update:
            stops.append(1)
        if trainer.steps_per_call != "auto":
            stops.append(trainer.steps_per_call)
        elif trainer.calls.updates_per_second is None:
            stops.append(4)
        else:
            stops.append(max(int(trainer.calls.updates_per_second * _SECONDS_PER_CALL), 1))
        return min(stops)

    def next_log(self, last_step):
        """The step of the next row in TensorBoard, or None. `last_step`, where it is known, has one in any case."""
        step = self._trainer.counters.step
        next_row = None if self._log_every is None else self._log_every * (step // self._log_every + 1)
        return min((each for each in (next_row, last_step) if each is not None), default=None)

    def observed(self):
        """(whether the next update has probes, whether it has the health of every variable)."""
        trainer, next_step = self._trainer, self._trainer.counters.step + 1
        probing = bool(trainer.probe_every) and next_probe(next_step - 1, trainer.probe_every) == next_step
        # A probed update costs more than its health: they come together, and there are three traces, not four.
        examining = bool(trainer.health_every) and (
            probing or next_probe(next_step - 1, trainer.health_every) == next_step
        )
        return probing, examining

    def compared(self):
        """Whether the next update compares the truncated gradient with the whole one."""
        every = self._trainer.bptt_compare_every
        return bool(every) and (self._trainer.counters.step + 1) % every == 0

    def chores(self, done, ended, save_due, keeping_best):
        """Names of the actions that are due after the latest updates, in order.

        Args:
            done: how many they were.
            ended: whether the data ended with them.
            save_due: whether a checkpoint is due.
            keeping_best: whether the best evaluation is kept.
        """
        by_steps = self._steps is not None
        evaluated = bool(done) and self._due(self._eval_every)
        chores = []
        if done and self._due(self._log_every):
            chores.append("log")
        if ended:
            chores.append("pass_ended")
            if not by_steps:
                chores += ["evaluate", "end_epoch"] if self._evaluating and not self._eval_every else ["end_epoch"]
        if evaluated:
            chores += ["evaluate", "end_epoch"] if by_steps else ["evaluate"]
        if done and (save_due or ("evaluate" in chores and keeping_best)):
            chores.append("save")
        return chores

    def save_due(self, by_time):
        return by_time or self._due(self._checkpoint_every)

    def time_to_save(self, saved_at):
        """Whether so many seconds have passed since then, by the monotonic clock."""
        return bool(self._save_seconds) and time.monotonic() - saved_at >= self._save_seconds

    def _due(self, interval):
        return bool(interval) and self._trainer.counters.step % interval == 0


def next_probe(step, every):
    """The first step after `step` that is probed (or examined, with `health_every`).

    It is a multiple of `every`, or an early one (1, 2, 5, 10, 20) below `every`.
    """
    early = [probe for probe in _EARLY_PROBES if step < probe < every]
    return min([step - step % every + every, *early])


def _interval(name, value):
    return None if value is None else arguments.check_integer(name, value, 1, "Use None for never.")
