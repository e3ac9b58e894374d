"""Health rows from TensorBoard's data provider, kept for a while: for the map of updates, dead units and verdicts."""

from tensorboard.data import provider

from looptape.dashboard import health_rows
from looptape.dashboard.server.cache import BoundedCache

CACHE_BYTES = 8 * 2**20
CACHE_SECS = 60
MAX_ROWS = 10_000
JUDGED = tuple(quantity for quantity in health_rows.QUANTITIES if quantity != "zeros")  # what verdicts are made of


class HealthReader:
    """Lists and reads health rows. Safe to use from several threads."""

    def __init__(self, data_provider):
        self._provider = data_provider
        self._cache = BoundedCache(CACHE_BYTES, CACHE_SECS)

    def versions(self, ctx, experiment, run=None):
        """Returns {run: version} of the runs that have health rows; a version changes when there are new ones."""
        return {name: _version(tags) for name, tags in self._list(ctx, experiment, run).items() if tags}

    def rows(self, ctx, experiment, run, quantities=JUDGED):
        """Returns {tag: (content, {step: codes})}, as `health_rows.assembled` takes it; {} if there are none."""
        tags = self._list(ctx, experiment, run).get(run, {})
        version = _version(tags)
        key = experiment, run, quantities
        found = self._cache.get(key, version)
        if found is None:
            found = self._read(ctx, experiment, run, tags, quantities)
            size = sum(codes.nbytes + 100 for _, by_step in found.values() for codes in by_step.values())
            self._cache.put(key, version, found, size)
        return found

    def _read(self, ctx, experiment, run, tags, quantities):
        contents = {tag: health_rows.parse_content(entry.plugin_content) for tag, entry in tags.items()}
        contents = {tag: content for tag, content in contents.items() if content and content["quantity"] in quantities}
        if not contents:
            return {}
        data = self._provider.read_tensors(
            ctx,
            experiment_id=experiment,
            plugin_name=health_rows.PLUGIN_NAME,
            downsample=MAX_ROWS,
            run_tag_filter=provider.RunTagFilter(runs=[run], tags=list(contents)),
        ).get(run, {})
        return {tag: (content, {d.step: d.numpy for d in data.get(tag, ())}) for tag, content in contents.items()}

    def _list(self, ctx, experiment, run):
        filtered = None if run is None else provider.RunTagFilter(runs=[run], tags=None)
        plugin = health_rows.PLUGIN_NAME
        return self._provider.list_tensors(ctx, experiment_id=experiment, plugin_name=plugin, run_tag_filter=filtered)


def _version(tags):
    return max(((entry.max_step, entry.max_wall_time) for entry in tags.values()), default=None)
