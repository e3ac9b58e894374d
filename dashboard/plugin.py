"""The TensorBoard plugin: its loader, its routes and what each answers.

An exception while this module is imported would keep TensorBoard from starting, so it imports little. The
server is multi-threaded: nothing about a request is kept on `self`.
"""

import functools
import gzip
import hashlib
import pathlib

import numpy as np
from tensorboard import errors, plugin_util
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from dashboard import binning, metadata, payload, queries
from dashboard.cache import BoundedCache
from dashboard.series import SeriesReader

DEFAULT_SAMPLES = 1000
PAYLOAD_CACHE_BYTES = 16 * 2**20
STATIC_DIRECTORY = pathlib.Path(__file__).parent / "static"
MIME_TYPES = {".js": "text/javascript", ".css": "text/css"}
STATIC_EXPIRES_SECS = 86_400
BINARY = "application/octet-stream"


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
        samples.setdefault(metadata.COUNT_PLUGIN_NAME, 1)

    def load(self, context):
        return GradientFlowPlugin(context)


class GradientFlowPlugin(base_plugin.TBPlugin):
    """Serves the dashboard's own files and five routes of data; see each method."""

    plugin_name = metadata.PLUGIN_NAME

    def __init__(self, context):
        super().__init__(context)
        self._reader = SeriesReader(context.data_provider)
        self._payloads = BoundedCache(PAYLOAD_CACHE_BYTES)
        self._static, self._entry = _static_routes()

    def get_plugin_apps(self):
        routes = {
            "/tags": self._serve_tags,
            "/heatmap": self._serve_heatmap,
            "/row": self._serve_row,
            "/matrix": self._serve_matrix,
            "/csv": self._serve_csv,
        }
        routes.update(self._static)
        return routes

    def is_active(self):
        # Asked only when the data provider lists no data of ours.
        return False

    def frontend_metadata(self):
        return base_plugin.FrontendMetadata(es_module_path=self._entry, tab_name="Gradient Flow")

    @wrappers.Request.application
    def _serve_tags(self, request):
        """All series of all runs, with versions that change when there is something new. JSON."""
        found, unreadable = self._reader.list(*_context(request))
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
                    "description": series.description,
                    "version": _version_text(series),
                    "wall_time": series.version[1],
                }
            )
        answer = {"runs": runs, "unreadable": [f"{run}: {tag}" for run, tag in unreadable]}
        return http_util.Respond(request, answer, "application/json")

    @wrappers.Request.application
    def _serve_heatmap(self, request):
        """All kept rows of one series, merged into a picture. Binary.

        Query: run, tag; align=start|end; normalise=none|last; minus=<another run> for the difference in
        log10; rows=<at most so many>.
        """
        context = _context(request)
        series = self._reader.find(*context, queries.text(request, "run"), queries.text(request, "tag"))
        _require_kind(series, metadata.VECTOR)
        align = queries.choice(request, "align", ("start", "end"))
        normalise = queries.choice(request, "normalise", ("none", "last"))
        minus = request.args.get("minus")
        max_rows = queries.integer(request, "rows", 1, binning.MAX_ROWS, default=binning.MAX_ROWS)
        baseline = None if minus is None else self._reader.find(*context, minus, series.tag)
        if (baseline or normalise == "last") and not series.logarithmic:
            raise errors.InvalidArgumentError("Loss shares are neither normalised nor subtracted: they are shares.")
        key = (context[1], series.run, series.tag, align, normalise, minus, max_rows)
        version = (series.version, baseline and baseline.version)
        body = self._payloads.get(key, version)
        if body is None:
            body = self._heatmap(context, series, align == "end", normalise == "last", baseline, max_rows)
            self._payloads.put(key, version, body, len(body))
        return _respond_binary(request, body)

    def _heatmap(self, context, series, end, normalise, baseline, max_rows):
        rows = self._reader.rows(*context, series)
        steps, values = rows.steps, rows.values
        if baseline is not None:
            steps, values = binning.difference(rows, self._reader.rows(*context, baseline), end=end)
        else:
            if normalise:
                values = binning.normalise_last(values)
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
    paths = sorted(path for path in STATIC_DIRECTORY.glob("*") if path.suffix in MIME_TYPES)
    contents = {path: path.read_bytes() for path in paths}
    folder = f"/static/{hashlib.sha256(b''.join(contents.values())).hexdigest()[:12]}"
    routes = {
        f"{folder}/{path.name}": functools.partial(
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


def _require_kind(series, kind):
    if series.kind != kind:
        raise errors.InvalidArgumentError(f"Tag {series.tag!r} holds a {series.kind}; this route is for a {kind}.")
