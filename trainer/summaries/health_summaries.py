"""Health rows in TensorBoard: compact vectors over the variables, a few scalars, the noise scale, histograms."""

import dataclasses

import numpy as np
import tensorflow as tf

from looptape.dashboard import health_rows, metadata
from looptape.dashboard.rules import logged_run, verdicts
from looptape.trainer.health import histograms, noise_scale
from looptape.trainer.health.history import History
from looptape.trainer.health.spikes import Spike
from looptape.trainer.health.update_norms import ROWS
from looptape.trainer.summaries import event_writer
from looptape.trainer.variables import path_of

_RATIO = ROWS.index("ratio")
_NAMED_ROWS = 10  # rows between two texts with names


class HealthLog:
    """Writes the health of updates, keeps the latest and what `diagnose` looks back at. On the host.

    Args:
        owner: the trainer.
    """

    def __init__(self, owner):
        self._owner = owner
        self.latest = {}  # {minimizer: {quantity: {variable: value}}}
        self.rows = 0  # health rows written in this run's lifetime
        self.noise = {}  # {minimizer: noise_scale.Averages}
        self._examples = {}  # {minimizer: examples of the latest update}
        self.spikes = []
        self.history = History()
        self._lists = {}  # {tag without its part: [lists of names]}
        self._described = (None, set())  # the event writer, and the tags whose metadata it has
        self._named = {}  # {minimizer: [names of the extremes that were written, the row in which they were]}

    def write(self, events, step, reports):
        """Writes the health of one update. `events` may be None: then it is only kept."""
        if not reports:
            return
        self.rows += 1
        if self._described[0] is not events:
            self._described = events, set()
        values = []
        for name, report in reports.items():
            variables = [path_of(variable) for variable in self._owner.minimizers[name].trained]
            norms = report["norms"].numpy()
            # As it is written, so that the tab and the report say the same.
            written = [health_rows.decode(q, health_rows.encode(q, row)) for q, row in zip(ROWS, norms, strict=True)]
            self.history.add_health(name, variables, step, written)
            self.latest[name] = {
                q: dict(zip(variables, row.tolist(), strict=True)) for q, row in zip(ROWS, norms, strict=True)
            }
            for quantity, row in zip(ROWS, norms, strict=True):
                values.append(self._row(quantity, row, variables, name))
            values += self._extremes(name, variables, norms[_RATIO])
            values += self._noise(name, report)
            values += self._layers(name, report, step)
            if "histograms" in report:
                values += _histograms(name, variables, report["histograms"].numpy())
        if events is not None:
            events.write(step, values)

    def _row(self, quantity, row, names, minimizer):
        lists = self._lists.setdefault(f"{minimizer}/{quantity}", [])
        if list(names) not in lists:
            lists.append(list(names))
        part = lists.index(list(names)) + 1
        return self._spare(health_rows.summary(quantity, row, names, minimizer, part))

    def _extremes(self, minimizer, variables, ratios):
        """The largest and the smallest ratio; the names of their variables if they changed, at most every tenth row."""
        usable = np.isfinite(ratios)
        if not usable.any():
            return []
        prefix = f"optimizer/update_ratio/{minimizer}/" if minimizer else "optimizer/update_ratio/"
        largest, smallest = np.argmax(np.where(usable, ratios, -1)), np.argmin(np.where(usable, ratios, np.inf))
        extremes = {"largest": ratios[largest], "smallest": ratios[smallest]}
        values = [self._scalar(prefix + word, ratio) for word, ratio in extremes.items()]
        names = [variables[largest], variables[smallest]]
        known, row = self._named.get(minimizer, (None, -_NAMED_ROWS))
        if names != known and self.rows - row >= _NAMED_ROWS:
            self._named[minimizer] = names, self.rows
            text = f"largest: `{names[0]}`, smallest: `{names[1]}`"
            values.append(self._spare(event_writer.text(f"{prefix}variables", text)))
        return values

    def _scalar(self, tag, value):
        return self._spare(event_writer.scalar(tag, float(value)))

    def _spare(self, summary):
        """A `Summary.Value` with metadata the first time only: TensorBoard keeps those of a tag's first event."""
        if summary.tag in self._described[1]:
            summary.ClearField("metadata")
        self._described[1].add(summary.tag)
        return summary

    def _noise(self, minimizer, report):
        if "noise" not in report:
            return []
        noise = {key: value.numpy().astype(np.float64) for key, value in report["noise"].items()}
        if noise["parts"] < 2:
            return []
        self._examples[minimizer] = float(noise["examples"])
        averages = self.noise.setdefault(minimizer, noise_scale.Averages())
        losses = ["", *self._owner.minimizers[minimizer].names]
        spreads, squares = noise_scale.estimate(noise["parts"], noise["examples"], noise["scatter"], noise["square"])
        for loss, spread, square in zip(losses, spreads, squares, strict=False):
            if np.isfinite(spread) and np.isfinite(square):
                averages.add(loss, spread, square)
        tag = f"{logged_run.NOISE}{minimizer}/" if minimizer else logged_run.NOISE
        values = [
            self._scalar(tag + (loss or logged_run.TOTAL), scale)
            for loss, scale in averages.scales().items()
            if averages.rows(loss) > 1
        ]
        return [*values, self._scalar(tag + logged_run.EXAMPLES, noise["examples"])] if values else []

    def _layers(self, minimizer, report, step):
        values, prefix = [], f"{minimizer}/" if minimizer else ""
        if report.get("units"):
            dead = {layer: float(np.mean(units.numpy() == 0)) for layer, units in report["units"].items()}
            self.latest[minimizer]["dead"] = dead
            shares = np.array(list(dead.values()))
            self.history.add_dead(
                minimizer, list(dead), step, health_rows.decode("dead", health_rows.encode("dead", shares))
            )
            values.append(self._row("dead", shares, list(dead), minimizer))
        for depth, (layer, totals) in enumerate(report.get("positions", {}).items()):
            sums, valid = totals.numpy()
            with np.errstate(invalid="ignore", divide="ignore"):
                vector = np.where(valid > 0, sums / valid, np.nan)
            self.latest[minimizer].setdefault("positions", {})[layer] = vector
            self.history.add_positions(prefix + layer, step, vector.astype(np.float32))
            written = metadata.position_summaries(prefix + layer, vector, valid > 0, depth, self.rows)
            values += [self._spare(summary) for summary in written]
        return values

    def keep_scalars(self, step, values):
        """Keeps what `diagnose` needs of `Summary.Value`s that others write."""
        scalars = {v.tag: v.tensor.float_val[0] for v in values if len(v.tensor.float_val) == 1}
        self.history.add_scalars(step, scalars)

    def resume(self, directory):
        """Reads what an interrupted run wrote, for `diagnose`."""
        self.history, self._lists = History(), {}
        contents, described, rows = {}, {}, {}  # only the first event of a tag may carry metadata
        for step, value in event_writer.read(directory):
            if value.tag not in described:
                contents[value.tag] = metadata.parse_content(value.metadata.plugin_data.content)
                described[value.tag] = health_rows.parse_content(value.metadata.plugin_data.content)
            content = contents[value.tag]
            if content and content["kind"] == metadata.VECTOR:
                vector = tf.make_ndarray(value.tensor)
                if content.get("axis") == metadata.POSITION:
                    self.history.add_positions(content["layer"], step, vector)
                elif content["quantity"] == metadata.LOSS_SHARE:
                    self.history.add_share(content["layer"], content["loss"], step, vector)
                else:
                    about = content.get("cell"), content.get("direction")
                    own = content["layer"], content["quantity"], step, vector, *about
                    self.history.add_timesteps(*own)
            elif described[value.tag]:
                self._resume_row(step, described[value.tag], tf.make_ndarray(value.tensor), rows)
            elif value.tensor.dtype == tf.float32.as_datatype_enum and not value.tensor.tensor_shape.dim:
                self.history.add_scalars(step, {value.tag: tf.make_ndarray(value.tensor)})

    def _resume_row(self, step, content, codes, rows):
        quantity, minimizer = content["quantity"], content["minimizer"]
        lists = self._lists.setdefault(f"{minimizer}/{quantity}", [])
        if content["variables"] not in lists:
            lists.append(content["variables"])
        if quantity == "dead":
            self.history.add_dead(minimizer, content["variables"], step, health_rows.decode(quantity, codes))
            return
        key = minimizer, content["part"], step
        rows.setdefault(key, {})[quantity] = health_rows.decode(quantity, codes)
        if len(rows[key]) == len(ROWS):
            found = rows.pop(key)
            self.history.add_health(minimizer, content["variables"], step, [found[name] for name in ROWS])

    def noise_scales(self, minimizer=""):
        """{"total": noise scale, loss: …}; an error that says what it needs if there is none."""
        owner = self._owner
        if minimizer in self.noise:
            return {loss or "total": scale for loss, scale in self.noise[minimizer].scales().items()}
        if owner.accumulation_steps == 1 and owner.replicas == 1:
            raise ValueError(
                "The gradient noise scale is estimated from the parts of an update, but here it has only one: "
                "`accumulation_steps` is 1 and there is one replica. Use accumulation_steps=2 with half the batch, or "
                "several replicas."
            )
        raise ValueError(
            f"No update with health has measured the noise of minimizer {minimizer!r} yet; `health_every` is "
            f"{owner.health_every}. Set e.g. health_every=100 and train. (Combiners that take the gradients of losses "
            "only now and then have none.)"
        )

    def add_spike(self, events, spike):
        """Keeps a spike, and writes it as text."""
        self.spikes.append(spike)
        self.write_spike(events, spike.step + 1, spike)

    def write_spike(self, events, step, spike):
        if events is not None:
            text = event_writer.text("spike", f"```\n{spike.text}\n```")
            events.write(step, [text, event_writer.scalar(logged_run.SPIKE, spike.step)])

    def findings(self):
        """The findings about this run, worst first; see `dashboard.rules.verdicts`."""
        noise = {}
        for minimizer, averages in self.noise.items():
            examples = self._examples[minimizer]
            for loss, scale in averages.scales().items():
                label = f"{minimizer}/{loss}".strip("/") if minimizer else loss
                noise[label] = scale, examples, averages.rows(loss)
        seen, counters = self.history, self._owner.counters
        return verdicts.run_findings(
            seen.layers(),
            seen.losses(),
            health=seen.health(),
            cosines=seen.cosines(),
            noise=noise,
            spikes=[spike.step for spike in self.spikes],
            skips=(counters.skips.total, counters.step),
            **seen.measured(),
        )

    def state(self):
        """As JSON can hold it, for a checkpoint."""
        noise = {name: averages.state() for name, averages in self.noise.items()}
        return {
            "rows": self.rows,
            "noise": noise,
            "examples": dict(self._examples),
            "named": dict(self._named),
            "spikes": [dataclasses.asdict(spike) for spike in self.spikes],
        }

    def keep_spikes(self, spikes):
        """Lists these spikes: a run that goes back to a checkpoint still knows those that led to it."""
        self.spikes = spikes

    def restore(self, state):
        """Takes what `state` gave; a checkpoint of an earlier version has none of it."""
        if state is None:
            return
        self.rows, self._named = state["rows"], {name: tuple(known) for name, known in state["named"].items()}
        self.noise, self._examples = {}, dict(state["examples"])
        self.spikes = [Spike(**spike) for spike in state["spikes"]]
        for name, sums in state["noise"].items():
            self.noise.setdefault(name, noise_scale.Averages()).restore(sums)


def _histograms(minimizer, variables, counts):
    prefix = f"{minimizer}/" if minimizer else ""
    tags = [f"variables/{kind}/{prefix}{name}" for kind in ("gradient", "weight") for name in variables]
    return [histograms.summary(tag, row) for tag, row in zip(tags, counts, strict=True)]
