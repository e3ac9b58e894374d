"""Reading: from TensorBoard's data provider to arrays of rows. The only module that talks to the provider."""

import ctypes
import dataclasses
import sys
from concurrent import futures

import numpy as np
from tensorboard import errors
from tensorboard.data import provider

from looptape.dashboard import metadata
from looptape.dashboard.server.cache import BoundedCache

# How many rows to ask for. The Rust loader answers in one message of at most 256 MB; where that is not enough
# the next, smaller number is tried. (Asking for one row first, to learn its size, would cost 40 ms.) Of
# matrices only one is looked at, so fewer are read.
READ_LIMITS = {metadata.VECTOR: (1_000_000, 10_000, 1_000, 100, 10, 1), metadata.MATRIX: (64, 16, 4, 1)}
CACHE_BYTES = 16 * 2**20
CACHE_SECS = 60
LARGE_BYTES = 2 * 2**20


@dataclasses.dataclass(frozen=True)
class Series:
    """One tag of one run, as its metadata describes it. `version` changes when there is news."""

    run: str
    tag: str
    kind: str
    layer: str
    quantity: str
    loss: str | None
    direction: str | None
    time_shape: tuple
    axis: str  # "time", or "position" for the output of a layer that has positions
    depth: int  # of such a layer, in the order of calls
    cell: str  # class of the layer's cell, "" if not known
    description: str
    version: tuple

    @property
    def logarithmic(self):
        """Whether the values are norms or ratios of norms; shares can be negative."""
        return self.quantity != metadata.LOSS_SHARE


@dataclasses.dataclass(frozen=True)
class Rows:
    """The kept rows of a series, by training step. Padding is marked as `metadata.encode_row` does."""

    steps: np.ndarray  # int64 [rows], strictly increasing
    values: np.ndarray  # float32 [rows, time], or [rows, time, time] for a matrix
    skipped: int  # rows left out because they were no vectors (or matrices) of numbers


class SeriesReader:
    """Lists and reads series, and keeps what was read lately. Safe to use from several threads."""

    def __init__(self, data_provider):
        self._provider = data_provider
        # A click must be answered quickly, an idle dashboard must be small.
        self._cache = BoundedCache(CACHE_BYTES, CACHE_SECS)
        # One thread reads. TensorBoard serves each request in a thread of its own, and the C library keeps
        # the freed memory of each: four requests at once would leave four readings' peaks behind.
        self._worker = futures.ThreadPoolExecutor(1, "gradient_flow")

    def list(self, ctx, experiment, run=None, tag=None):
        """Returns ({(run, tag): Series}, [(run, tag) that are ours but unreadable]). Never reads values."""
        self._cache.evict()
        listed = self._provider.list_tensors(
            ctx,
            experiment_id=experiment,
            plugin_name=metadata.PLUGIN_NAME,
            run_tag_filter=_filter(run, tag),
        )
        found, unreadable = {}, []
        for run_name, tags in listed.items():
            for tag_name, entry in tags.items():
                series = _series(run_name, tag_name, entry)
                if series is None:
                    unreadable.append((run_name, tag_name))
                else:
                    found[run_name, tag_name] = series
        return found, unreadable

    def find(self, ctx, experiment, run, tag):
        """Returns the one `Series`; raises NotFoundError (404) with a sentence if there is none."""
        found, unreadable = self.list(ctx, experiment, run, tag)
        if (run, tag) in found:
            return found[run, tag]
        if (run, tag) in unreadable:
            raise errors.NotFoundError(
                f"The metadata of tag {tag!r} in run {run!r} is of another version than this dashboard's. "
                "Use the same version for writing and reading."
            )
        raise errors.NotFoundError(f"There is no tag {tag!r} in run {run!r}. The route `tags` lists what there is.")

    def rows(self, ctx, experiment, series):
        """Returns the kept `Rows` of `series`."""
        key = (experiment, series.run, series.tag)
        rows = self._cache.get(key, series.version)
        if rows is None:
            rows = self._worker.submit(self._read_once, ctx, experiment, series).result()
        return rows

    def _read_once(self, ctx, experiment, series):
        key = (experiment, series.run, series.tag)
        rows = self._cache.get(key, series.version)
        if rows is None:
            rows = self._read(ctx, experiment, series)
            self._cache.put(key, series.version, rows, rows.values.nbytes)
            if rows.values.nbytes > LARGE_BYTES:
                _return_memory()
        return rows

    def logged(self, ctx, experiment, series):
        """Returns how many rows the writer counted for the series' layer, or None if it did not count."""
        tag = metadata.rows_tag(series.layer, series.axis)
        data = self._provider.read_tensors(
            ctx,
            experiment_id=experiment,
            plugin_name=metadata.COUNT_PLUGIN_NAME,
            downsample=1,
            run_tag_filter=_filter(series.run, tag),
        )
        data = data.get(series.run, {}).get(tag)
        if not data:
            return None
        count = np.asarray(data[-1].numpy)
        return int(count) if count.shape == () and np.issubdtype(count.dtype, np.integer) else None

    def _read(self, ctx, experiment, series):
        def read(downsample):
            data = self._provider.read_tensors(
                ctx,
                experiment_id=experiment,
                plugin_name=metadata.PLUGIN_NAME,
                downsample=downsample,
                run_tag_filter=_filter(series.run, series.tag),
            )
            return data.get(series.run, {}).get(series.tag, [])

        for limit in READ_LIMITS[series.kind]:
            try:
                data = read(limit)
                break
            except Exception as error:
                if not _too_large(error):
                    raise
        else:
            data = []
        rank = 1 if series.kind == metadata.VECTOR else 2
        return stack([(datum.step, datum.numpy) for datum in data], rank)


def stack(pairs, rank):
    """Returns `Rows` of (step, array) pairs: short rows padded; of a step that comes twice, the later."""
    by_step, skipped = {}, 0
    for step, array in pairs:
        if array.ndim != rank or array.dtype.kind not in "fiu":
            skipped += 1
        else:
            by_step[step] = array
    steps = np.array(sorted(by_step), dtype=np.int64)
    arrays = [by_step[step] for step in steps.tolist()]
    shape = tuple(max((array.shape[axis] for array in arrays), default=0) for axis in range(rank))
    values = np.empty((len(arrays), *shape), dtype=np.float32)
    values.view(np.uint32)[...] = metadata.PADDING_BITS
    for row, array in zip(values, arrays, strict=True):
        if array.dtype != np.float32:
            array = metadata.encode_row(array)
        row[tuple(slice(length) for length in array.shape)] = array
    return Rows(steps, values, skipped)


def _return_memory():
    """Gives back what a large reading needed on its way, five times its result. 2 ms; glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _too_large(error):
    """Whether gRPC refused a message for its size. Told by name: the Python loader does without gRPC."""
    code = getattr(error, "code", None)
    return callable(code) and getattr(code(), "name", "") == "RESOURCE_EXHAUSTED"


def _filter(run, tag):
    if run is None:
        return None
    return provider.RunTagFilter(runs=[run], tags=None if tag is None else [tag])


def _series(run, tag, entry):
    content = metadata.parse_content(entry.plugin_content)
    if content is None or content["kind"] == metadata.COUNT:
        return None
    return Series(
        run=run,
        tag=tag,
        kind=content["kind"],
        layer=content["layer"],
        quantity=content["quantity"],
        loss=content.get("loss"),
        direction=content.get("direction"),
        time_shape=tuple(content.get("time_shape", ())),
        axis=content.get("axis", metadata.TIME),
        depth=content.get("depth", 0),
        cell=content.get("cell", ""),
        description=entry.description,
        version=(entry.max_step, entry.max_wall_time),
    )
