"""Tables of health rows for the tab and the report: a line for each layer or variable, a column for each training step.

They are made of {tag: (content, {step: codes})} as `HealthReader` and `events` read them. Imports neither tensorflow
nor keras.
"""

import numpy as np

from looptape.dashboard import health_rows
from looptape.dashboard.rules.health_verdicts import short_paths

MAX_ROWS = 240  # training steps of a table


def updates(tags):
    """The update-to-weight ratio of every layer, as `_table` gives it: ‖ΔW‖ / ‖W‖ of all its variables together."""
    found = {}
    for minimizer, parts in _parts(tags, ("ratio", "weight")).items():
        for own in parts:
            if own.keys() == {"ratio", "weight"}:
                names, ratios = own["ratio"]
                for layer, values in layer_ratios(names, ratios, own["weight"][1]).items():
                    found.setdefault(_joined(minimizer, layer), {}).update(values)
    return _table(found)


def variables(tags, quantity):
    """One of `health_rows.QUANTITIES` of every variable, as `_table` gives it; "dead" is of every layer."""
    found = {}
    for minimizer, parts in _parts(tags, (quantity,)).items():
        for own in parts:
            names, by_step = own[quantity]
            for step, row in by_step.items():
                for name, value in zip(names, row, strict=True):
                    found.setdefault(_joined(minimizer, name), {})[step] = float(value)
    return _table(found)


def _parts(tags, quantities):
    """{minimizer: [{quantity: (names, {step: values})}]} of the quantities, a dict for each list of variables.

    A first part that the paths of all variables of a minimizer share is left out, as in verdicts.
    """
    numbered = {}
    for content, by_step in tags.values():
        if content["quantity"] in quantities:
            rows = {step: health_rows.decode(content["quantity"], codes) for step, codes in by_step.items()}
            own = numbered.setdefault(content["minimizer"], {}).setdefault(content["part"], {})
            own[content["quantity"]] = content["variables"], rows
    found = {}
    for minimizer, parts in sorted(numbered.items()):
        every = list(dict.fromkeys(name for own in parts.values() for names, _ in own.values() for name in names))
        short = dict(zip(every, short_paths(every), strict=True))
        found[minimizer] = [
            {quantity: ([short[name] for name in names], rows) for quantity, (names, rows) in own.items()}
            for _, own in sorted(parts.items())
        ]
    return found


def layer_ratios(names, ratios, weights):
    """Returns {layer: {step: ‖ΔW‖ / ‖W‖ of all its variables}}.

    Args:
        names: paths of the variables; a layer is a path without its last part.
        ratios: {step: [variables]} of ‖ΔW‖ / ‖W‖.
        weights: {step: [variables]} of ‖W‖.
    """
    layers = {}
    for index, name in enumerate(names):
        layers.setdefault(name.rpartition("/")[0] or name, []).append(index)
    found = {layer: {} for layer in layers}
    for step in sorted(ratios.keys() & weights.keys()):
        ratio, weight = (np.asarray(rows[step], np.float64) for rows in (ratios, weights))
        for layer, columns in layers.items():
            with np.errstate(all="ignore"):
                # A ratio to a weight of 0, such as a new bias, is infinite and its norm unknown: it is left out.
                known = np.isfinite(ratio[columns]) | (weight[columns] > 0)
                moved, size = ratio[columns][known] * weight[columns][known], weight[columns][known]
                found[layer][step] = float(np.linalg.norm(moved) / np.linalg.norm(size))
    return found


def _joined(minimizer, layer):
    return f"{minimizer}/{layer}" if minimizer else layer


def _table(by_name):
    """{"layers": names, "steps", "values": [name][step]}, or None if there is nothing.

    Steps are thinned to `MAX_ROWS`. None marks a step that the name has not, or a value that is not finite.
    """
    steps = sorted({step for values in by_name.values() for step in values})
    if not steps:
        return None
    kept = [steps[i] for i in _thinned(len(steps), MAX_ROWS)]
    values = [[number(values.get(step)) for step in kept] for values in by_name.values()]
    return {"layers": list(by_name), "steps": kept, "values": values}


def number(value):
    """A number of four digits for JSON; None if it is not finite."""
    return float(f"{value:.4g}") if value is not None and np.isfinite(value) else None


def _thinned(count, most):
    return range(count) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]
