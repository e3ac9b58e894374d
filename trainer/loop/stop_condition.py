"""The end of a run: steps or epochs over a trainer's lifetime, and the messages about them."""

import math

import keras
from absl import logging

from looptape.trainer.counters import Phases
from looptape.trainer.loop.callbacks import restore_history


class Totals:
    """The lifetime total that a `fit` was asked for.

    Args:
        trainer: the trainer.
        source: the data.
        steps: updates, or None.
        epochs: passes over the data, or None.
    """

    def __init__(self, trainer, source, steps, epochs):
        self._trainer, self._source, self._steps, self._epochs = trainer, source, steps, epochs

    @property
    def asked(self):
        return [self._steps, self._epochs]

    def reached(self):
        if self._steps is not None:
            return self._trainer.counters.step >= self._steps
        return self._trainer.counters.epoch >= self._epochs

    def nothing_left(self, resumed):
        """Whether all is done; not if the process died between the last step and the end of its `fit`.

        Args:
            resumed: what the host knew when the checkpoint was written, or None.
        """
        loop = resumed["loop"] if resumed else {"complete": True, "asked": None}
        stopped = bool(resumed) and resumed["between_callbacks"]["stopped"]
        if stopped and loop["complete"] and loop["asked"] != self.asked:
            resumed["between_callbacks"]["stopped"] = stopped = False  # a callback ended it, but now more is asked for
        return loop["complete"] and (self.reached() or stopped)

    def nothing_to_do(self, resumed=None):
        """Says so. Returns the history in the checkpoint; without one, that of the latest `fit`."""
        counters = self._trainer.counters
        done = f"{counters.step} steps" if self._steps is not None else f"{counters.epoch} epochs"
        asked = f"steps={self._steps}" if self._steps is not None else f"epochs={self._epochs}"
        if self.reached():
            logging.warning(
                "Nothing to do: %s are already done and you asked for %s. Steps and epochs are totals over the "
                "trainer's lifetime; ask for more.",
                *(done, asked),
            )
        else:
            logging.warning("Nothing to do: a callback ended this run after %s. Ask for more than %s.", done, asked)
        if not resumed and self._trainer.latest_history is not None:
            return self._trainer.latest_history
        history = keras.callbacks.History()
        history.set_model(self._trainer.model)
        history.on_train_begin()
        if resumed:
            restore_history(history, resumed["between_callbacks"])
        return history

    def last_step(self):
        """The step at which the total is reached, or None if that is not known."""
        if self._steps is not None:
            return self._steps
        if self._source.length is None or isinstance(self._trainer.trainer.accumulation_steps, Phases):
            return None
        trainer = self._trainer
        passes = self._epochs - trainer.counters.epoch - 1
        per_pass = math.ceil(self._source.length / trainer.accumulation_steps)
        this_pass = math.ceil(self._source.remaining() / trainer.accumulation_steps)
        return trainer.counters.step + this_pass + passes * per_pass

    def check_length(self):
        """A finite dataset that cannot give the steps asked for is refused before the first one."""
        remaining = self._source.remaining()
        if self._steps is None or remaining is None:
            return
        step, asked = self._trainer.counters.step, self._trainer.trainer.accumulation_steps
        phases = asked if isinstance(asked, Phases) else Phases({0: self._trainer.accumulation_steps})
        available = step + phases.updates(step, remaining)
        if available < self._steps:
            raise ValueError(self.too_short(available))

    def too_short(self, available):
        return (
            f"The dataset ends at step {available}, before steps={self._steps}. Repeat it (`dataset.repeat()`, after "
            "shuffling and before batching if the last batch may be filled up), or train by `epochs`."
        )
