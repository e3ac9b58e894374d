"""The learning-rate finder: the loss while the rate rises from very small to too large."""

import contextlib
import dataclasses
import math
from typing import Any

import numpy as np

from looptape.trainer import arguments
from looptape.trainer.analysis import plots
from looptape.trainer.data import batches
from looptape.trainer.data.adapters import as_dataset
from looptape.trainer.debug import dry_run
from looptape.trainer.optim.optimizer_groups import OptimizerGroup
from looptape.trainer.step.division import OutOfMemory
from looptape.trainer.step.nonfinite import NonFiniteUpdates

_SMOOTHING = 0.9  # of the running mean over the updates
_DIVERGED = 4.0  # a loss above so many times the lowest one ends the search


@dataclasses.dataclass(frozen=True)
class RateSearch:
    """Result of `Trainer.find_learning_rate`.

    Args:
        rates: [updates], rising.
        losses: [updates], the total of each update.
        smoothed: [updates], their running mean.
        suggestion: the rate at which the smoothed loss falls most steeply, or None if it never falls.
    """

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    suggestion: float | None

    def draw(self, axes: Any = None) -> Any:
        """Draws the loss by the rate, with the suggestion. Needs matplotlib. Returns the axes."""
        return plots.rate_search(self.rates, self.losses, self.smoothed, self.suggestion, axes)


def search(engine, dataset, lowest, highest, steps, batch_size):
    """Trains with a rising rate until the loss diverges; then everything is as it was. See `Trainer`."""
    for name, rate, place in (("lowest", lowest, "first"), ("highest", highest, "last")):
        if rate is None:
            raise ValueError(
                f"`{name}` is None; it must be a positive number, the {place} learning rate. Leave it out."
            )
        arguments.check_positive(name, rate, f"It is the {place} learning rate.")
    steps = arguments.check_integer("steps", steps, 10, "It is the number of updates of the search.")
    batch_size = arguments.check_integer("batch_size", batch_size, 1, "It is the number of examples in a batch.")
    if highest <= lowest:
        raise ValueError(f"`lowest` is {lowest:g} and `highest` {highest:g}; the rates must rise. Swap them.")
    variable = _rate_of(engine.optimizer)
    rates = np.geomspace(lowest, highest, steps)
    repeated = as_dataset(dataset, batch_size, training=True, trial=True).repeat()
    with dry_run.trial(engine, repeated, dataset) as source, _applying_spikes(engine):
        losses = []
        for rate in rates:
            variable.assign(rate)
            losses.append(_loss_of_an_update(engine, source))
            if not math.isfinite(losses[-1]) or losses[-1] > _DIVERGED * max(min(losses), 0.0) > 0:
                break
    losses = np.array([loss for loss in losses if math.isfinite(loss)])
    if not losses.size:
        raise ValueError(
            f"The loss of the first update, with a learning rate of {lowest:g}, is not finite. Check the data and the "
            "losses by `trainer.fast_dev_run(data)`."
        )
    rates, smoothed = rates[: len(losses)], _smooth(losses)
    return RateSearch(rates, losses, smoothed, _steepest(rates, smoothed))


def _rate_of(optimizer):
    """The variable of an optimizer's learning rate."""
    if isinstance(optimizer, OptimizerGroup):
        raise ValueError(
            "`find_learning_rate` searches one rate, and this trainer has an optimizer for each of several patterns. "
            "Make a trainer with a single optimizer for the search."
        )
    # The property gives a number under a schedule, and the variable otherwise.
    rate = optimizer.learning_rate
    if not hasattr(rate, "assign"):
        raise ValueError(
            "The optimizer's learning rate follows a schedule, so it cannot be set. Make the optimizer with a number "
            "for the search, e.g. keras.optimizers.Adam(1e-3), and the schedule with the rate that it finds."
        )
    return rate


@contextlib.contextmanager
def _applying_spikes(engine):
    """A context in which updates are applied whatever `on_spike` says: the search ends by the loss itself."""
    guards = [minimizer.spikes for minimizer in engine.minimizers.values() if minimizer.spikes]
    for guard in guards:
        guard.let_pass(True)
    try:
        yield
    finally:
        for guard in guards:
            guard.let_pass(False)


def _loss_of_an_update(engine, source):
    """The total of the losses in one update; NaN if it was not finite.

    An update that was skipped because the loss scale was too large for it says nothing about the rate: the next one
    is made with the same rate.
    """
    skips = engine.counters.skips
    try:
        while True:
            skipped = skips.total
            if engine.division.auto:
                _run_divided(engine, source)
            else:
                engine.calls.run(source.iterator, 1)
            if skips.total == skipped or skips.follow:
                break
    except NonFiniteUpdates:
        return math.nan
    parts = [part for minimizer, part in engine.ledger.take().parts() if minimizer is not None]
    return float(sum(part["total"] for part in parts)) if parts else math.nan


def _run_divided(engine, source):
    """One update, whose batch is divided further while it does not fit into memory, as `fit` does it."""
    iterator, kept = engine.calls.take(source.iterator)
    while True:
        try:
            engine.calls.run(iterator, 1)
            return
        except OutOfMemory as short:
            engine.division.further(int(batches.count_examples(kept[0])), short.error)
            engine.prepare(source.iterator)
            iterator = batches.again(kept, source.dataset.element_spec)


def _smooth(losses):
    """A running mean that begins without a bias towards 0."""
    means, mean = [], 0.0
    for count, loss in enumerate(losses, 1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        means.append(mean / (1 - _SMOOTHING**count))
    return np.array(means)


def _steepest(rates, smoothed):
    if len(rates) < 3:
        return None
    slopes = np.gradient(smoothed, np.log(rates))
    best = int(np.argmin(slopes[: int(np.argmin(smoothed)) + 1]))
    return float(rates[best]) if slopes[best] < 0 else None
