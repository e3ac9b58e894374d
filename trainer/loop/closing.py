"""Values for the progress bar, and at the end of a run its verdicts as text for TensorBoard."""

from looptape.trainer.loop.progress_bar import NotebookProgress, Progress, in_notebook
from looptape.trainer.summaries import event_writer, scalars


def write_verdicts(trainer, rows):
    """Writes the findings of the run as text, if there are any."""
    findings = trainer.health_log.findings()
    if findings:
        lines = [f"- **{finding.word}**: {finding.text} {advice(finding)}".rstrip() for finding in findings]
        rows.write(trainer.counters.step, [event_writer.text("verdicts", "\n".join(lines))])


def advice(finding):
    """A sentence of advice, or an empty string."""
    return f"Try: {finding.advice}" if finding.advice else ""


def open_progress(total, start, shown):
    """The display of a run: in a notebook one that changes in place, else a bar or lines."""
    return (NotebookProgress if in_notebook() else Progress)(total, start, shown)


def progress_values(owner, window, epochs=None):
    """{name: number or words} for the display: the epoch, the losses and metrics so far in it, and the speed.

    A single loss is shown once, as `loss`.
    """
    values = {} if epochs is None else {"epoch": f"{min(owner.counters.epoch + 1, epochs)}/{epochs}"}
    logs = scalars.callback_logs(owner, window)
    terms = [name for minimizer, part in window.parts() if minimizer is not None for name in part["loss"]]
    values |= {name: value for name, value in logs.items() if name == "loss" or terms != [name]}
    rate = owner.calls.updates_per_second
    if rate is not None and window.updates:
        values["examples/s"] = rate * window.examples / window.updates
    return values
