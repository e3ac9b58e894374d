"""Recovers a run from non-finite updates with an earlier checkpoint, or reports why it failed."""

from absl import logging

from looptape.trainer.checkpoints import trainer_state
from looptape.trainer.data import batches
from looptape.trainer.debug import nonfinite_report, spike_report
from looptape.trainer.health import options, spikes
from looptape.trainer.step.division import OutOfMemory
from looptape.trainer.step.nonfinite import NonFiniteUpdates

POLICIES = ("skip", "raise", "restore")


def prepare(trainer, source):
    """Checks settings before the first step, and notes where the data begin if an error is to look at them."""
    if trainer.on_nonfinite not in POLICIES:
        raise ValueError(f"`on_nonfinite` is {trainer.on_nonfinite!r}; it must be one of {', '.join(POLICIES)}.")
    spikes.check(trainer.on_spike, trainer.spike_threshold, trainer.spike_window)
    options.check_measured(trainer.health_parts, trainer.health_every)
    if trainer.on_nonfinite == "raise" or trainer.on_spike != "ignore" or trainer.division.auto:
        source.checkpointable(warn=False)


def handle_spike(trainer, source, rows, spiked, observed):
    """Records a spike, and does with its update what the trainer's `on_spike` says.

    Args:
        trainer: the trainer.
        source: the data.
        rows: where the record is written.
        spiked: the `SpikedUpdate`.
        observed: (whether its update has probes, whether it has the health of every variable).

    Returns the reports of the update, or None.

    Raises:
        NonFiniteUpdates: the run is to end, or to go back to a checkpoint.
    """
    parts = spiked.parts or source.refetch(trainer.accumulation_at(trainer.counters.step - 1))
    policy = trainer.on_spike
    if parts is None and policy == "record":
        policy = "skip"
    details = "  The data of this update are gone." if parts is None else None
    details = details or spike_report.examine(trainer, spiked.minimizer, parts)
    quantity, value, median, _ = spiked.found
    spike = spikes.Spike(spiked.step, source.position, quantity, value, median, policy, details)
    trainer.health_log.add_spike(rows, spike)
    if policy in ("raise", "restore"):
        raise NonFiniteUpdates(spike.text, parts, policy, spike)
    logging.warning("%s", spike.text)
    if policy == "record":
        return trainer.calls.let_through(spiked, parts, source.dataset.element_spec, observed)
    trainer.counters.skips.count_spike()
    in_a_row = spikes.in_a_row(trainer.health_log.spikes)
    if in_a_row >= trainer.max_skipped:
        raise NonFiniteUpdates(
            f"{in_a_row} updates in a row were skipped as spikes: the level itself has changed. Lower the learning "
            f"rate, raise `spike_threshold`, or set `on_spike` to 'record'.\n{spike.text}",
            *(parts, "raise", spike),
        )
    return spiked.reports


def hold_batches(trainer, source):
    """Sees to it that the batch of an update that does not fit into memory can be had once more."""
    trainer.calls.hold(trainer.division.auto and not source.can_refetch())


def repeat(trainer, source, short, run):
    """Makes an update that did not fit into memory once more, its batch divided further, until it fits.

    Args:
        trainer: the trainer.
        source: the data; counts this update's batch.
        short: the `OutOfMemory`.
        run: `(iterator) -> result`, makes one update.
    """
    source.advance(1)
    parts = short.parts or source.refetch(1)
    rows = int(batches.count_examples(parts[0]))
    while True:
        trainer.division.further(rows, short.error)
        trainer.prepare(*source.for_trace())
        try:
            result = run(batches.again(parts, source.dataset.element_spec))
            break
        except OutOfMemory as once_more:
            short = once_more
    logging.warning(
        "The update of step %d did not fit into memory with its %d examples at once. Each batch is divided into %d "
        "micro-batches from now on, which gives the same result; the update was repeated.",
        *(trainer.counters.step, rows, trainer.division.count),
    )
    return result


def go_back(trainer, source, files, rows, error):
    """Back to the last good checkpoint, if the trainer wants that. Returns what the host knew then, or None."""
    policy = error.policy or trainer.on_nonfinite
    if policy != "restore" or files.store is None or trainer.counters.restores >= trainer.max_restores:
        return None
    failed_at, spikes_so_far = trainer.counters.step, trainer.health_log.spikes
    found = trainer_state.go_back(trainer, source, files.store)
    if found is None:
        return None
    step, host = found
    trainer.counters.went_back()
    files.rewind(step, host)
    trainer.health_log.keep_spikes(spikes_so_far)
    if error.spike is not None:
        trainer.health_log.write_spike(rows, step, error.spike)
    logging.warning(
        "%s Returned to the checkpoint of step %d; continuing with the data after step %d (return %d of at most %d).",
        str(error),
        step,
        failed_at,
        trainer.counters.restores,
        trainer.max_restores,
    )
    return host


def explain(trainer, source, workdir, error):
    """The error with what an eager run of the same update finds."""
    if error.policy is not None:
        return error  # of a spike, which was looked at already
    parts = error.parts or source.refetch(trainer.accumulation_at(trainer.counters.step - 1))
    advice = str(error)
    if trainer.on_nonfinite == "restore" and workdir is None:
        advice += " (`on_nonfinite` is 'restore', but without `workdir` there is nothing to go back to.)"
    if parts is None:
        return NonFiniteUpdates(advice + " The data of this update are gone, so it cannot be looked at again.")
    return NonFiniteUpdates(f"{advice}\n{nonfinite_report.examine(trainer, source, parts, workdir)}", parts)
