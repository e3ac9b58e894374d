"""Counters of the host: one owner, and one list that save, restore and dry runs share."""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass
class Counters:
    """Plain numbers beside the variables. A new one is a field here, and checkpoints hold it.

    >>> counters = Counters(skips=None, step=3, rounds=1)
    >>> counters.step, counters.epoch, counters.rounds
    (3, 0, 1)
    """

    skips: Any  # `step.nonfinite.Skips`: the updates that were not finite
    step: int = 0  # updates made, as the host knows it
    epoch: int = 0  # passes over the data
    rounds: int = 0  # epochs as the callbacks count them
    restores: int = 0  # returns to a checkpoint after non-finite updates
    best_loss: float = math.inf  # of the evaluations, or what `keep_best` names: smaller is better
    probed: int = 0  # probed updates written
    divisions: int = 1  # micro-batches that a batch is divided into, with accumulation_steps="auto"

    def made(self, updates=1):
        """Counts updates."""
        self.step += updates

    def read_step(self, variable):
        """Takes the number of updates from the variable that counts them."""
        self.step = int(variable.numpy())

    def return_to(self, step):
        """Counts on from a step that was counted before."""
        self.step = step

    def end_pass(self):
        self.epoch += 1

    def end_round(self):
        self.rounds += 1

    def write_probes(self):
        self.probed += 1

    def went_back(self):
        self.restores += 1

    def divide(self, parts):
        """Notes into how many micro-batches each batch is divided."""
        self.divisions = parts

    def improves(self, score):
        """Whether a score is better than all before; keeps it then."""
        better = score < self.best_loss
        self.best_loss = score if better else self.best_loss
        return better

    def forget_best(self):
        self.best_loss = math.inf

    def state(self):
        """All but the step, which names the checkpoint, as JSON can hold it."""
        numbers = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[2:]}
        best = self.best_loss if math.isfinite(self.best_loss) else None
        return {**numbers, "best_loss": best, "skips": self.skips.state()}

    def restore(self, step, state, keep=()):
        """Puts back what `state` gave, except the names in `keep`."""
        self.step = step
        self.skips.restore(state["skips"])
        for field in dataclasses.fields(self)[2:]:
            if field.name not in keep:
                setattr(self, field.name, state.get(field.name, field.default))  # absent in earlier checkpoints
        if self.best_loss is None:
            self.best_loss = math.inf


class Phases(dict):
    """Numbers of batches per update that change with the step: {first step: number}.

    >>> phases = Phases({0: 1, 100: 4})
    >>> phases.at(99), phases.at(100), phases.next_change(7), phases.next_change(100)
    (1, 4, 100, None)
    >>> phases.updates(98, 10)
    4
    """

    def at(self, step):
        """Batches of the update after `step` updates."""
        return self[max(begin for begin in self if begin <= step)]

    def next_change(self, step):
        """The first step after `step` at which the number changes, or None."""
        return min((begin for begin in self if begin > step), default=None)

    def updates(self, step, batches):
        """Updates that so many batches make after `step` updates; the last one may have fewer of them."""
        made = 0
        while batches > 0:
            each, change = self.at(step + made), self.next_change(step + made)
            whole = math.ceil(batches / each)
            if change is None or step + made + whole <= change:
                return made + whole
            batches -= (change - step - made) * each
            made = change - step
        return made
