"""The rows of a run so far, kept on the host for `diagnose`: of time steps and variables, losses, cosines."""

import numpy as np

from looptape.dashboard import metadata
from looptape.trainer.health.update_norms import ROWS

MOST = 500  # rows kept of one series; when there are more, every other one is dropped
TIMESTEP_QUANTITIES = ("state", "gain", "external", "steered")
COSINE, MEAN = "gradient_cosine/", "update-mean"


class Series:
    """(step, value) pairs in the order of their steps: thinned evenly when they become too many, the last one kept."""

    def __init__(self):
        self.steps, self.values = [], []
        self._stride = 1  # every so many pairs one is kept
        self._since = 0  # pairs since the latest one that is kept for good

    def add(self, step, value):
        self.cut(step - 1)  # a step that comes again, after a return to a checkpoint, replaces what came after it
        self._since += 1
        if self.steps and 1 < self._since <= self._stride:
            self.steps.pop()
            self.values.pop()
        elif self._since > self._stride:
            self._since = 1
        self.steps.append(int(step))
        self.values.append(value)
        if len(self.steps) > MOST:
            self.steps, self.values = self.steps[::2], self.values[::2]
            self._stride, self._since = 2 * self._stride, self._stride

    def cut(self, step):
        """Forgets what came after a step."""
        while self.steps and self.steps[-1] > step:
            self.steps.pop()
            self.values.pop()
            self._since = self._stride


class History:
    """The rows of one trainer, from its beginning or from the event files of the run it resumes."""

    def __init__(self):
        self._layers = {}  # {layer: {quantity: Series of [time]}}
        self._cells = {}  # {layer: class of its cell}
        self._backward = set()  # layers that read their sequence from its end
        self._health = {}  # {minimizer: {variables: Series of [4, variables]}}
        self._dead = {}  # {minimizer: {layers: Series of [layers]}}
        self._scalars = {}  # {tag: Series}
        self._positions = {}  # {layer: Series of [positions]}, in the order of calls
        self._shares = {}  # {layer: {loss: Series of [time]}}

    def add_timesteps(self, layer, quantity, step, vector, cell=None, direction=None):
        """`cell` is the class of the layer's cell, None where it has none; `direction` as in the metadata of a tag."""
        if direction == metadata.BACKWARD:
            self._backward.add(layer)
        if cell is not None:
            self._cells[layer] = cell
        if quantity in TIMESTEP_QUANTITIES:
            self._layers.setdefault(layer, {}).setdefault(quantity, Series()).add(step, np.asarray(vector))

    def add_positions(self, layer, step, vector):
        self._positions.setdefault(layer, Series()).add(step, np.asarray(vector))

    def add_share(self, layer, loss, step, vector):
        self._shares.setdefault(layer, {}).setdefault(loss, Series()).add(step, np.asarray(vector))

    def add_health(self, minimizer, variables, step, rows):
        """`rows` is [4, variables] in the order of `update_norms.ROWS`."""
        own = self._health.setdefault(minimizer, {})
        own.setdefault(tuple(variables), Series()).add(step, np.asarray(rows, np.float32))

    def add_dead(self, minimizer, layers, step, shares):
        own = self._dead.setdefault(minimizer, {})
        own.setdefault(tuple(layers), Series()).add(step, np.asarray(shares))

    def add_scalars(self, step, values):
        """Keeps what verdicts are made of among {tag: value}."""
        for tag, value in values.items():
            tag = metadata.current_tag(tag)
            if tag.startswith("loss/") or metadata.is_minimizer_tag(tag) or (COSINE in tag and not tag.endswith(MEAN)):
                self._scalars.setdefault(tag, Series()).add(step, float(value))

    def rewind(self, step):
        """Forgets all that came after a step, which training goes back to."""
        for series in self._all():
            series.cut(step)

    def _all(self):
        for nested in (*self._layers.values(), *self._health.values(), *self._dead.values(), *self._shares.values()):
            yield from nested.values()
        yield from self._positions.values()
        yield from self._scalars.values()

    def layers(self):
        """Arguments for `verdicts.run_findings`: rows padded with NaN to the longest."""
        found = {}
        for layer, quantities in self._layers.items():
            if "state" not in quantities:
                continue
            steps = quantities["state"].steps
            same = {name: series for name, series in quantities.items() if series.steps == steps}
            found[layer] = {"steps": np.array(steps), "cell_class": self._cells.get(layer, "")}
            found[layer]["backward"] = layer in self._backward
            found[layer] |= {name: _stacked(series.values) for name, series in same.items()}
        return found

    def health(self):
        """Arguments for `health_verdicts.health_findings`; after a change of what is trained, the present variables."""
        found = {}
        for minimizer, parts in self._health.items():
            variables, series = _latest(parts)
            if series.steps:
                rows = np.stack(series.values)
                own = {name: rows[:, index] for index, name in enumerate(ROWS)}
                found[minimizer] = {"variables": list(variables), "steps": np.array(series.steps), **own}
                if minimizer in self._dead:
                    layers, shares = _latest(self._dead[minimizer])
                    found[minimizer]["dead"] = {"layers": list(layers), "values": shares.values}
        return found

    def measured(self):
        """What `verdicts.run_findings` takes of positions and loss shares."""
        return {
            "positions": {layer: (s.steps, _stacked(s.values)) for layer, s in self._positions.items() if s.steps},
            "shares": {
                layer: {loss: (s.steps, _stacked(s.values)) for loss, s in own.items() if s.steps}
                for layer, own in self._shares.items()
            },
        }

    def losses(self):
        """{minimizer: (steps, values)} of their total losses."""
        tags = metadata.total_loss_tags(self._scalars)
        return {name: (self._scalars[tag].steps, self._scalars[tag].values) for name, tag in tags.items()}

    def cosines(self):
        """{pair of losses: cosines of their gradients, one for each probed update}."""
        return {tag.partition(COSINE)[2]: s.values for tag, s in self._scalars.items() if COSINE in tag}


def _latest(parts):
    return max(parts.items(), key=lambda item: item[1].steps[-1] if item[1].steps else -1)


def _stacked(vectors):
    length = max(len(vector) for vector in vectors)
    padded = [np.pad(np.asarray(v, np.float64), (0, length - len(v)), constant_values=np.nan) for v in vectors]
    return np.stack(padded)
