"""Summary of a whole run for the view of run health: loss, evaluations, skips, speed, shares, updates by layer.

Reads scalars and health rows (`layer_tables`) through TensorBoard's data provider; it needs no recurrent layer.
"""

import re

import numpy as np
from tensorboard.data import provider

from looptape.dashboard import layer_tables, metadata
from looptape.dashboard.layer_tables import number
from looptape.dashboard.rules.logged_run import SKIPPED

MAX_POINTS = 500  # of a curve
SPEED = "throughput/examples_per_second"
CLIPPED = re.compile(r"optimizer/clipped(/.+)?")  # of the trainer's own minimizer, or of a named one
CONFLICT = re.compile(r"optimizer/gradient_conflict/(.+/)?rate")
SHARE = "loss_share/"
ACTED = re.compile(r"timestep/(.+)/acted")  # how often an action changed the gradient of a layer


class OverviewReader:
    """Lists training runs and reads what `as_json` makes of one. Safe to use from several threads.

    Args:
        data_provider: TensorBoard's.
        health: a `HealthReader`.
    """

    def __init__(self, data_provider, health):
        self._provider, self._health = data_provider, health

    def runs(self, ctx, experiment):
        """Returns ([every run, in the order TensorBoard colours them], {training run: version}).

        A training run logs a loss and its speed, or health rows, or only that its updates are skipped. The version
        changes when there is something new.
        """
        listed = self._provider.list_runs(ctx, experiment_id=experiment)
        started = sorted(listed, key=lambda run: (run.start_time is None, run.start_time or 0.0, run.run_name))
        versions = {}
        for run, tags in self._provider.list_scalars(ctx, experiment_id=experiment, plugin_name="scalars").items():
            present = {metadata.current_tag(tag): series for tag, series in tags.items()}
            if SPEED in present and metadata.total_loss_tags(present):
                versions[run] = f"{tags[SPEED].max_step}/{tags[SPEED].max_wall_time}"
            elif SKIPPED in present and SPEED not in present:  # of skipped updates nothing else is logged
                versions[run] = f"{present[SKIPPED].max_step}/{present[SKIPPED].max_wall_time}"
        for run, newest in self._health.versions(ctx, experiment).items():
            versions[run] = f"{versions.get(run, '')} {newest[0]}/{newest[1]}"
        return [run.run_name for run in started], versions

    def as_json(self, ctx, experiment, run):
        """Returns plain JSON data about one run; curves are {"steps": […], "values": […]}, None where not finite.

        `loss` is that of the trainer's own minimizer, or of the first by name; `other_losses` are those of the others.
        """
        scalars, health = self.scalars(ctx, experiment, run, _shown), self._health.rows(ctx, experiment, run)
        losses = metadata.total_loss_tags(scalars)
        loss = next(iter(losses.values()), None)
        other = _evaluation_run(run)
        evaluated = self.scalars(ctx, experiment, other, lambda tag: tag.startswith("loss")) if other else {}
        evaluation = metadata.total_loss_tag({tag: None for tag in evaluated if tag != "loss/total"})
        skipped = scalars.get(SKIPPED, ((), ()))
        shares = {tag.removeprefix(SHARE): _curve(rows) for tag, rows in scalars.items() if tag.startswith(SHARE)}
        return {
            "loss": _curve(scalars.get(loss, ((), ()))),
            "loss_tag": loss,
            "other_losses": {tag: _curve(scalars[tag]) for tag in losses.values() if tag != loss},
            "minimizers": list(losses),
            "evaluations": _curve(evaluated.get(evaluation, ((), ()))),
            "skipped": int(skipped[1][-1]) if len(skipped[1]) else 0,
            "skipped_at": rises(*skipped),
            "clipped_at": [step for step, share in zip(*_mean(scalars, CLIPPED), strict=True) if share > 0],
            "nonfinite": sum(int(np.sum(~np.isfinite(scalars[tag][1]))) for tag in losses.values()),
            "speed": _curve(scalars.get(SPEED, ((), ()))),
            "shares": shares,
            "conflict": _curve(_mean(scalars, CONFLICT)),
            "updates": layer_tables.updates(health),
            "dead": layer_tables.variables(health, "dead"),
            "acted": {ACTED.fullmatch(tag)[1]: _curve(rows) for tag, rows in scalars.items() if ACTED.fullmatch(tag)},
        }

    def scalars(self, ctx, experiment, run, wanted):
        """Returns {tag: (steps, values)} of the scalars whose present name `wanted` accepts, under that name."""
        filtered = provider.RunTagFilter(runs=[run], tags=None)
        listed = self._provider.list_scalars(
            ctx, experiment_id=experiment, plugin_name="scalars", run_tag_filter=filtered
        ).get(run, {})
        tags = [tag for tag in listed if wanted(metadata.current_tag(tag))]
        if not tags:
            return {}
        found = self._provider.read_scalars(
            ctx,
            experiment_id=experiment,
            plugin_name="scalars",
            downsample=MAX_POINTS,
            run_tag_filter=provider.RunTagFilter(runs=[run], tags=tags),
        ).get(run, {})
        return {
            metadata.current_tag(tag): ([d.step for d in data], [float(d.value) for d in data])
            for tag, data in found.items()
        }


def _shown(tag):
    return (
        tag.startswith(("loss", SHARE))
        or tag in (SPEED, SKIPPED)
        or metadata.is_minimizer_tag(tag)
        or any(pattern.fullmatch(tag) for pattern in (CLIPPED, CONFLICT, ACTED))
    )


def _mean(scalars, pattern):
    """(steps, values): the mean at each step of the scalars whose tags match, one for each minimizer."""
    found = {}
    for tag, rows in scalars.items():
        if pattern.fullmatch(tag):
            for step, value in zip(*rows, strict=True):
                found.setdefault(step, []).append(value)
    return sorted(found), [float(np.mean(found[step])) for step in sorted(found)]


def rises(steps, values):
    """Returns the steps at which a running count has grown."""
    return [step for step, before, now in zip(steps, [0, *values], values, strict=False) if now > before]


def _evaluation_run(run):
    """The run beside `run` that holds its evaluations, or None where names do not say."""
    parent, _, name = run.rpartition("/")
    return f"{parent}/eval" if parent and name == "train" else "eval" if run == "train" else None


def _curve(rows):
    steps, values = rows
    return {"steps": [int(step) for step in steps], "values": [number(value) for value in values]}
