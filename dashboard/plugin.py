"""The TensorBoard plugin: its loader, its routes and what each answers.

An exception while this module is imported would keep TensorBoard from starting, so it imports little. The
server is multi-threaded: nothing about a request is kept on `self`.
"""

import functools
import gzip
import hashlib
import json
import pathlib

import numpy as np
from tensorboard import errors, plugin_util
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from looptape.dashboard import health_rows, layer_tables, metadata
from looptape.dashboard.overview import OverviewReader
from looptape.dashboard.rules import explanations, findings, logged_run
from looptape.dashboard.server import binning, payload, queries
from looptape.dashboard.server.cache import BoundedCache
from looptape.dashboard.server.health_reader import HealthReader
from looptape.dashboard.server.series import SeriesReader

DEFAULT_SAMPLES = 1000
PAYLOAD_CACHE_BYTES = 16 * 2**20
STATIC_DIRECTORY = pathlib.Path(__file__).parent / "static"
MIME_TYPES = {".js": "text/javascript", ".css": "text/css"}
STATIC_EXPIRES_SECS = 86_400
BINARY = "application/octet-stream"
NORMALISE = {"last": binning.normalise_last, "largest": binning.normalise_largest}
MAX_POSITIONS = 256
VERDICT_QUANTITIES = ("state", "gain", "external", "steered")


class GradientFlowLoader(base_plugin.TBLoader):
    """Loads the plugin; named in the entry point `tensorboard_plugins`."""

    def fix_flags(self, flags):
        """Raises the number of rows that TensorBoard keeps, unless the user chose one.

        The loaders would otherwise keep 100 (Rust) or 10 (Python) random rows per tag. Of the count only the
        last is needed.
        """
        samples = getattr(flags, "samples_per_plugin", None)
        if samples is None:
            samples = flags.samples_per_plugin = {}
        samples.setdefault(metadata.PLUGIN_NAME, DEFAULT_SAMPLES)
        samples.setdefault(health_rows.PLUGIN_NAME, DEFAULT_SAMPLES)
        samples.setdefault(metadata.COUNT_PLUGIN_NAME, 1)

    def load(self, context):
        return GradientFlowPlugin(context)


class GradientFlowPlugin(base_plugin.TBPlugin):
    """Serves the dashboard's own files and nine routes of data; see each method."""

    plugin_name = metadata.PLUGIN_NAME

    def __init__(self, context):
        super().__init__(context)
        self._reader = SeriesReader(context.data_provider)
        self._health = HealthReader(context.data_provider)
        self._overview = OverviewReader(context.data_provider, self._health)
        self._payloads = BoundedCache(PAYLOAD_CACHE_BYTES)
        self._static, self._entry = _static_routes()

    def get_plugin_apps(self):
        routes = {
            "/tags": self._serve_tags,
            "/heatmap": self._serve_heatmap,
            "/row": self._serve_row,
            "/matrix": self._serve_matrix,
            "/csv": self._serve_csv,
            "/verdicts": self._serve_verdicts,
            "/overview": self._serve_overview,
            "/positions": self._serve_positions,
            "/variables": self._serve_variables,
            "/why": self._serve_why,
        }
        routes.update(self._static)
        return routes

    def is_active(self):
        # Asked only when the data provider does not know which plugins have data.
        return False

    def data_plugin_names(self):
        """Whether there is anything to show. Scalars are enough: the view of run health needs no probes."""
        return frozenset([self.plugin_name, health_rows.PLUGIN_NAME, "scalars"])

    def frontend_metadata(self):
        return base_plugin.FrontendMetadata(es_module_path=self._entry, tab_name="Gradient Flow")

    @wrappers.Request.application
    def _serve_tags(self, request):
        """All series of all runs, with versions that change when there is something new. JSON.

        `trained` has a version for each training run, with or without series; `order` is TensorBoard's own of all runs.
        """
        context = _context(request)
        found, unreadable = self._reader.list(*context)
        order, trained = self._overview.runs(*context)
        runs = {}
        for series in found.values():
            runs.setdefault(series.run, []).append(
                {
                    "tag": series.tag,
                    "kind": series.kind,
                    "layer": series.layer,
                    "quantity": series.quantity,
                    "loss": series.loss,
                    "direction": series.direction,
                    "time_shape": list(series.time_shape),
                    "axis": series.axis,
                    "depth": series.depth,
                    "description": series.description,
                    "version": _version_text(series),
                    "wall_time": series.version[1],
                }
            )
        answer = {
            "runs": runs,
            "unreadable": [f"{run}: {tag}" for run, tag in unreadable],
            "trained": trained,
            "order": order,
        }
        return http_util.Respond(request, answer, "application/json")

    @wrappers.Request.application
    def _serve_heatmap(self, request):
        """All kept rows of one series, merged into a picture. Binary.

        Query: run, tag; align=start|end; normalise=none|last|largest; minus=<another run> for the difference in
        log10, with minus_tag=<its tag> where its layer has another name; rows=<at most so many>.
        """
        context = _context(request)
        series = self._reader.find(*context, queries.text(request, "run"), queries.text(request, "tag"))
        _require_kind(series, metadata.VECTOR)
        align = queries.choice(request, "align", ("start", "end"))
        normalise = queries.choice(request, "normalise", ("none", "last", "largest"))
        minus = request.args.get("minus")
        max_rows = queries.integer(request, "rows", 1, binning.MAX_ROWS, default=binning.MAX_ROWS)
        minus_tag = request.args.get("minus_tag", series.tag)
        baseline = None if minus is None else self._reader.find(*context, minus, minus_tag)
        if (baseline or normalise != "none") and not series.logarithmic:
            raise errors.InvalidArgumentError("Loss shares are neither normalised nor subtracted: they are shares.")
        key = (context[1], series.run, series.tag, align, normalise, minus, minus_tag, max_rows)
        version = (series.version, baseline and baseline.version)
        body = self._payloads.get(key, version)
        if body is None:
            body = self._heatmap(context, series, align == "end", normalise, baseline, max_rows)
            self._payloads.put(key, version, body, len(body))
        return _respond_binary(request, body)

    def _heatmap(self, context, series, end, normalise, baseline, max_rows):
        rows = self._reader.rows(*context, series)
        steps, values = rows.steps, rows.values
        if baseline is not None:
            steps, values = binning.difference(rows, self._reader.rows(*context, baseline), end=end)
        else:
            if normalise != "none":
                values = NORMALISE[normalise](values)
            if end:
                values = binning.align_end(values)
        signed = baseline is not None or not series.logarithmic
        drawn = binning.picture(values, logarithmic=not signed, by_magnitude=signed, max_rows=max_rows)
        header = {
            "time": int(values.shape[1]),
            "column_width": drawn.column_width,
            "low": drawn.low,
            "high": drawn.high,
            "merged_by": "magnitude" if signed else "max",
            "kept": len(rows.steps),
            "shown": len(steps),
            "skipped": rows.skipped,
            "logged": self._reader.logged(*context, series),
            "first_step": int(steps[0]) if len(steps) else 0,
        }
        arrays = {
            "codes": drawn.codes,
            "starts": drawn.starts,
            "peaks": drawn.peaks,
            "nonfinite": drawn.nonfinite,
            "step_gaps": np.diff(steps, prepend=steps[:1]).astype(np.uint32),
        }
        return payload.pack(header, arrays)

    @wrappers.Request.application
    def _serve_row(self, request):
        """One row, exactly as logged: the kept one nearest to `step`. Query: run, tag, step. Binary."""
        rows, index = self._nearest(request, metadata.VECTOR)
        header = {"step": int(rows.steps[index]), "padding_bits": int(metadata.PADDING_BITS)}
        return _respond_binary(request, payload.pack(header, {"values": rows.values[index]}))

    @wrappers.Request.application
    def _serve_matrix(self, request):
        """One credit matrix: the kept one nearest to `step`. Query: run, tag, step. Binary."""
        rows, index = self._nearest(request, metadata.MATRIX)
        matrix = rows.values[index]
        rows_index, columns_index = np.indices(matrix.shape)
        # A loss cannot depend on a later state: that half is not zero by measurement, it is no data.
        matrix = metadata.encode_row(matrix, binning.valid(matrix) & (columns_index <= rows_index))
        drawn = binning.picture(matrix)
        header = {
            "step": int(rows.steps[index]),
            "steps": rows.steps.tolist(),
            "time": int(matrix.shape[1]),
            "column_width": drawn.column_width,
            "low": drawn.low,
            "high": drawn.high,
        }
        return _respond_binary(request, payload.pack(header, {"codes": drawn.codes, "starts": drawn.starts}))

    @wrappers.Request.application
    def _serve_csv(self, request):
        """All kept rows of one series, exactly as logged. Query: run, tag. CSV."""
        context = _context(request)
        series = self._reader.find(*context, queries.text(request, "run"), queries.text(request, "tag"))
        _require_kind(series, metadata.VECTOR)
        return http_util.Respond(request, payload.rows_csv(self._reader.rows(*context, series)), "text/csv")

    @wrappers.Request.application
    def _serve_verdicts(self, request):
        """The findings of one run, worst first, and its loss; see `logged_run`. Query: run. JSON."""
        context = _context(request)
        run = queries.text(request, "run")
        found, _ = self._reader.list(*context, run=run)
        mine = [series for series in found.values() if series.kind == metadata.VECTOR and _judged(series)]
        scalars = self._overview.scalars(*context, run, logged_run.is_evidence)
        newest = self._health.versions(*context, run).get(run)
        if not mine and not scalars and newest is None:
            raise errors.NotFoundError(f"Run {run!r} logged nothing to judge. The route `tags` lists what there is.")
        loss = scalars.get(next(iter(metadata.total_loss_tags(scalars).values()), None), ((), ()))
        counted = logged_run.skips(scalars)
        version = (tuple(sorted((series.tag, series.version) for series in mine)), loss[0][-1:], counted, newest)
        body = self._payloads.get(("verdicts", context[1], run), version)
        if body is None:
            body = json.dumps(self._verdicts(context, run, mine, scalars, loss), allow_nan=False).encode()
            self._payloads.put(("verdicts", context[1], run), version, body, len(body))
        return http_util.Respond(request, body, "application/json")

    def _verdicts(self, context, run, mine, scalars, loss):
        layers, positions, shares = {}, {}, {}
        for series in sorted(mine, key=lambda series: series.depth):
            rows = self._reader.rows(*context, series)
            if series.axis == metadata.POSITION:
                positions[series.layer] = rows
            elif series.loss is not None:
                shares.setdefault(series.layer, {})[series.loss] = rows
            else:
                layers.setdefault(series.layer, {})[series.quantity] = rows
        cells = {series.layer: series.cell for series in mine}
        backward = {series.layer for series in mine if series.direction == metadata.BACKWARD}
        found = logged_run.findings(
            layers, scalars, self._health.rows(*context, run), cells, backward, positions, shares
        )
        return {
            "findings": [{**findings.as_json(one), "why": explanations.anchor(one.word)} for one in found],
            "loss": {"steps": list(map(int, loss[0])), "values": [v if np.isfinite(v) else None for v in loss[1]]},
        }

    @wrappers.Request.application
    def _serve_overview(self, request):
        """One run as a whole: see `OverviewReader.as_json`. Query: run. JSON."""
        answer = self._overview.as_json(*_context(request), queries.text(request, "run"))
        return http_util.Respond(request, json.dumps(answer, allow_nan=False).encode(), "application/json")

    @wrappers.Request.application
    def _serve_why(self, request):
        """HTML page that explains each word of a verdict and what to do about it."""
        return http_util.Respond(request, explanations.page(), "text/html")

    @wrappers.Request.application
    def _serve_variables(self, request):
        """A health quantity of every variable over training, see `layer_tables`. Query: run, quantity. JSON."""
        run = queries.text(request, "run")
        quantity = queries.choice(request, "quantity", health_rows.QUANTITIES)
        table = layer_tables.variables(self._health.rows(*_context(request), run, (quantity,)), quantity)
        if table is None:
            raise errors.NotFoundError(f"Run {run!r} logged no {quantity!r} of its variables. Use health_every.")
        return http_util.Respond(request, json.dumps(table, allow_nan=False).encode(), "application/json")

    @wrappers.Request.application
    def _serve_positions(self, request):
        """The gradient at each position of every layer of a run, layers in the order of calls. JSON.

        Query: run; step, the kept row nearest to which is given, the last one without. At most `MAX_POSITIONS` columns:
        neighbours are merged by max. None marks what is padding or not finite.
        """
        context = _context(request)
        run = queries.text(request, "run")
        found, _ = self._reader.list(*context, run=run)
        mine = [series for series in found.values() if series.axis == metadata.POSITION]
        if not mine:
            raise errors.NotFoundError(f"Run {run!r} logged no positions. Use health_every with health='positions'.")
        mine.sort(key=lambda series: series.depth)
        rows = [self._reader.rows(*context, series) for series in mine]
        steps = sorted({step for each in rows for step in each.steps.tolist()})
        step = queries.integer(request, "step", 0, 2**53, default=steps[-1] if steps else 0)
        step = min(steps, key=lambda other: abs(other - step), default=step)
        width = -(-max(each.values.shape[1] for each in rows) // MAX_POSITIONS)
        answer = {
            "step": step,
            "steps": steps,
            "layers": [series.layer for series in mine],
            "column_width": width,
            "values": [binning.merged_row(each, step, width) for each in rows],
        }
        return http_util.Respond(request, json.dumps(answer, allow_nan=False).encode(), "application/json")

    def _nearest(self, request, kind):
        context = _context(request)
        series = self._reader.find(*context, queries.text(request, "run"), queries.text(request, "tag"))
        _require_kind(series, kind)
        step = queries.integer(request, "step", 0, 2**53)
        rows = self._reader.rows(*context, series)
        if not len(rows.steps):
            raise errors.NotFoundError(f"Tag {series.tag!r} of run {series.run!r} has no readable rows yet.")
        return rows, int(np.abs(rows.steps - step).argmin())


def _static_routes():
    """Returns ({route: app}, the entry module's route) of the files that ship with the package.

    One exact route per file: no path of a request reaches the disk. The folder is named after what is in the
    files, so that a browser may keep them and still never mixes two versions.
    """
    paths = sorted(path for path in STATIC_DIRECTORY.rglob("*") if path.suffix in MIME_TYPES)
    contents = {path: path.read_bytes() for path in paths}
    folder = f"/static/{hashlib.sha256(b''.join(contents.values())).hexdigest()[:12]}"
    routes = {
        f"{folder}/{path.relative_to(STATIC_DIRECTORY).as_posix()}": functools.partial(
            _serve_static, MIME_TYPES[path.suffix], gzip.compress(content, mtime=0)
        )
        for path, content in contents.items()
    }
    return routes, f"{folder}/index.js"


@wrappers.Request.application
def _serve_static(mime_type, body, request):
    return http_util.Respond(request, body, mime_type, content_encoding="gzip", expires=STATIC_EXPIRES_SECS)


def _respond_binary(request, body):
    return http_util.Respond(request, body, BINARY, content_encoding="gzip")


def _context(request):
    return plugin_util.context(request.environ), plugin_util.experiment_id(request.environ)


def _version_text(series):
    return "/".join(map(str, series.version))


def _judged(series):
    """Whether findings are made of a series of vectors."""
    return series.axis == metadata.POSITION or series.loss is not None or series.quantity in VERDICT_QUANTITIES


def _require_kind(series, kind):
    if series.kind != kind:
        raise errors.InvalidArgumentError(f"Tag {series.tag!r} holds a {series.kind}; this route is for a {kind}.")
