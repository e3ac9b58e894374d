"""Writes a probed update to TensorBoard: [time] vectors for the dashboard, scalars, and a heat map."""

import numpy as np
import tensorflow as tf

from looptape.dashboard import metadata
from looptape.trainer import probing
from looptape.trainer.summaries import event_writer, heatmap

_SCALARS = ("horizon", "median_gain", "omega", "zero_fraction", "nonfinite", "acted", "cut_off")
_HORIZON = {  # by whether most time steps receive a gradient from outside
    False: "Time steps whose state gradient is above 1 % of the largest.",
    True: "From the gain, because gradients enter at most time steps: time steps until the product of the median gain "
    "falls below 1 %, at most those between two cuts by an action.",
}


class TimestepLog:
    """Writes the reports of probed updates, and keeps the latest one."""

    def __init__(self, owner):
        self._owner = owner
        self.latest = {}  # {layer: {quantity: [time]}} of the latest probed update
        self.horizons = {}  # {tag: horizon} of the latest probed update
        self._pictures = {}

    def write(self, events, step, reports):
        """Writes one probed update. `events` may be None: then only `latest` is kept."""
        if not reports:
            return
        values, self.latest, self.horizons = [], {}, {}
        self._owner.counters.write_probes()
        for name, report in reports.items():
            minimizer = self._owner.minimizers[name]
            prefix = f"{name}/" if name else ""
            values += self._losses(prefix, minimizer, report)
            values += self._layers(prefix, minimizer, report, step)
        self._owner.health_log.keep_scalars(step, values)
        if events is not None:
            events.write(step, values)
        self._grow(reports)

    def _layers(self, prefix, minimizer, report, step):
        if not report["totals"]:
            return []
        presented = probing.present(report["totals"], minimizer.probed.shapes)
        values = []
        for layer, vectors in presented.vectors.items():
            label = prefix + layer
            self.latest[label] = vectors
            cell = minimizer.probed.cells.get(layer)
            direction = metadata.BACKWARD if layer in minimizer.probed.reversed else None
            for quantity, vector in vectors.items():
                self._owner.health_log.history.add_timesteps(label, quantity, step, vector, cell, direction)
            valid = self._valid(report, layer, next(iter(vectors.values())))
            shape = presented.shapes.get(layer)
            place = {"time_shape": shape, "direction": direction, "cell": cell}
            for quantity, vector in vectors.items():
                own = valid if valid is not None and valid.shape == vector.shape else None
                values.append(metadata.vector_summary(label, quantity, vector, own, **place))
            values.append(metadata.rows_summary(label, self._owner.counters.probed))
            for scalar in _SCALARS:
                if scalar in presented.scalars[layer]:
                    about = _HORIZON[presented.scalars[layer].get("dense") == 1] if scalar == "horizon" else ""
                    value = presented.scalars[layer][scalar]
                    if scalar == "horizon":
                        self.horizons[f"timestep/{label}/horizon"] = value
                    values.append(event_writer.scalar(f"timestep/{label}/{scalar}", value, about))
            if "state" in vectors:
                values += self._pictures_of(label, step, vectors["state"])
        for layer, shares in report.get("shares", {}).items():
            for loss, share in zip(minimizer.names, shares.numpy(), strict=True):
                valid = self._valid(report, layer, share)
                known = share if valid is None else np.where(valid, share, np.nan)
                self._owner.health_log.history.add_share(prefix + layer, loss, step, known)
                values.append(metadata.loss_share_summary(prefix + layer, loss, share, valid))
        return values

    @staticmethod
    def _valid(report, layer, vector):
        """Which time steps some example is valid at, or None where that is not known."""
        examples = report["totals"][layer].get("examples")
        valid = None if examples is None else examples.numpy() > 0
        return valid if valid is not None and valid.shape == vector.shape else None

    def _losses(self, prefix, minimizer, report):
        if "norms" not in report:
            return []
        names, norms, cosines = minimizer.names, report["norms"].numpy(), report["cosines"].numpy()
        values = [
            event_writer.scalar(f"optimizer/gradient_norm/{prefix}{name}", norm)
            for name, norm in zip(names, norms, strict=True)
        ]
        pairs = [(i, j) for i in range(len(names)) for j in range(i + 1, len(names))]
        for i, j in pairs:
            values.append(
                event_writer.scalar(f"optimizer/gradient_cosine/{prefix}{names[i]}-{names[j]}", cosines[i, j])
            )
        values.append(
            event_writer.scalar(f"optimizer/gradient_cosine/{prefix}update-mean", report["update_mean"].numpy())
        )
        conflicts = sum(cosines[i, j] < 0 for i, j in pairs) / len(pairs)
        values.append(event_writer.scalar(f"optimizer/gradient_conflict/{prefix}rate", conflicts))
        return values

    def resume(self, directory):
        """Goes on from what an interrupted run wrote: pictures show it from its beginning, and come when they would."""
        written = 0  # rows up to the one that is read
        for step, value in event_writer.read(directory):
            content = metadata.parse_content(value.metadata.plugin_data.content)
            if content and content["kind"] == metadata.VECTOR and content["quantity"] == "state":
                self._history(content["layer"]).add(step, tf.make_ndarray(value.tensor))
            elif content and content["kind"] == metadata.COUNT and value.tag.startswith(metadata.TAG_PREFIX):
                written = int(tf.make_ndarray(value.tensor))
            elif value.tag.startswith("timestep/") and value.tag.endswith("/horizon"):
                self.horizons[value.tag] = float(tf.make_ndarray(value.tensor))
            elif value.tag.startswith("timestep/") and value.tag.endswith("/heatmap"):
                label = value.tag.removeprefix("timestep/").removesuffix("/heatmap")
                self._history(label).drawn = written

    def _history(self, label):
        return self._pictures.setdefault(label, heatmap.History())

    def _pictures_of(self, label, step, vector):
        """The heat map, drawn anew when half as many rows more have come: a picture costs more than a row."""
        history = self._history(label)
        history.add(step, vector)
        if self._owner.counters.probed < 1.5 * history.drawn and self._owner.counters.probed != history.drawn:
            return []
        history.drawn = self._owner.counters.probed
        title = f"{label}: state gradient"
        return [event_writer.image(f"timestep/{label}/heatmap", heatmap.draw(history, title))]

    def _grow(self, reports):
        """A `probe` that went beyond its capacity gets a larger one, in a new trace at the next probed update."""
        missing = {}
        for name, report in reports.items():
            shapes = self._owner.minimizers[name].probed.shapes
            missing |= probing.missing_capacity(report["totals"], shapes) if report["totals"] else {}
        if missing:
            self._owner.probe_capacity.update(missing)
            self._owner.calls.forget_probes()
