"""The findings about a run from what it logged, for the tab and the report. They are those of `diagnose()`.

Tags are translated into what `verdicts.run_findings` takes; no rule is here.
"""

from looptape.dashboard import health_rows, metadata
from looptape.dashboard.rules import verdicts

COSINE, MEAN = "optimizer/gradient_cosine/", "update-mean"
NOISE, TOTAL, EXAMPLES = "optimizer/noise_scale/", "total", "examples"
SKIPPED = "optimizer/skipped_updates"
SPIKE = "optimizer/spike_step"  # its value is the step: after a return to a checkpoint it is written there


def is_evidence(tag):
    """Whether a finding may be made of a scalar tag, by its present name."""
    return tag.startswith(("loss/", COSINE, NOISE)) or tag in ("loss", SPIKE, SKIPPED) or metadata.is_minimizer_tag(tag)


def findings(layers, scalars, health, cells=None, backward=(), positions=None, shares=None):
    """Returns the findings about one run, worst first.

    Args:
        layers: {layer: {quantity: Rows}}, see `verdicts.layer_arrays`.
        scalars: {tag: (steps, values)} by present names (`metadata.current_tag`).
        health: {tag: (content, {step: codes})}, see `health_rows.assembled`.
        cells: {layer: class of its cell}, as far as they are known.
        backward: layers that read their sequence from its end.
        positions: {layer: Rows} by position of the layer's output, in the order of calls.
        shares: {layer: {loss: Rows}}, each loss's share in the state gradient.
    """
    arrays = verdicts.layer_arrays(layers)
    for layer, own in arrays.items():
        own |= {"cell_class": (cells or {}).get(layer, ""), "backward": layer in backward}
    return verdicts.run_findings(
        arrays,
        {name: scalars[tag] for name, tag in metadata.total_loss_tags(scalars).items()},
        health=health_rows.assembled(health),
        cosines=cosines(scalars),
        noise=noise(scalars),
        spikes=[int(step) for step in scalars.get(SPIKE, ((), ()))[1]],
        skips=skips(scalars),
        positions={layer: _decoded(rows) for layer, rows in (positions or {}).items()},
        shares={layer: {loss: _decoded(rows) for loss, rows in own.items()} for layer, own in (shares or {}).items()},
    )


def _decoded(rows):
    return rows.steps, metadata.decode_row(rows.values)[0]


def skips(scalars):
    """Returns (updates that were skipped, all updates) as of the last row."""
    steps, values = scalars.get(SKIPPED, ((), ()))
    return (int(values[-1]), int(steps[-1])) if len(steps) else (0, 0)


def cosines(scalars):
    """Returns {pair of losses: cosines of their gradients}."""
    return {
        tag.removeprefix(COSINE): values
        for tag, (_, values) in scalars.items()
        if tag.startswith(COSINE) and not tag.endswith(MEAN)
    }


def noise(scalars):
    """Returns {label: (noise scale, examples per update, rows)}: "" is the whole update, "a" the loss a."""
    found = {}
    examples = [tag for tag in scalars if tag.startswith(NOISE) and tag.endswith(f"/{EXAMPLES}")]
    for tag, (_, values) in scalars.items():
        known = [other for other in examples if tag.startswith(other.removesuffix(EXAMPLES))]
        if tag in examples or not known or not len(values):
            continue
        own = max(known, key=len)
        minimizer = own.removesuffix(EXAMPLES).removeprefix(NOISE).rstrip("/")
        loss = tag.removeprefix(own.removesuffix(EXAMPLES))
        label = "/".join(part for part in (minimizer, "" if loss == TOTAL else loss) if part)
        # The first row has no scale yet: two are needed for a mean.
        found[label] = float(values[-1]), float(scalars[own][1][-1]), len(values) + 1
    return found
