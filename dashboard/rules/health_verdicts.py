"""The rules that turn health rows into sentences: which layer does not learn, moves too far, is dead; noise; conflicts.

As `verdicts`, whose `run_findings` is the one place that applies all rules. Pure Python on arrays.
"""

import numpy as np

from looptape.dashboard.rules.findings import finding

MIN_ROWS, MIN_STEP = 3, 10  # before anything is judged; of the rows only the later half counts
STILL = 1e-8  # a layer that moves less, by its norm, stands still: float32 has seven digits
LAGGING = 100.0  # a layer whose ratio is so many times below the median of the others hardly learns
TOO_LARGE = 0.1  # an update of more than a tenth of the weight, update after update
DEAD = 0.5  # share of a layer's units
CONFLICTING, MIN_COSINES = 0.5, 8  # share of probed updates in which two losses pull apart; rows it is judged on
OPPOSED = -0.05  # median cosine: of gradients that are nearly orthogonal half the signs are negative by chance
LISTED = 3  # layers with the same finding; more than these share one sentence
NOISY = 10.0  # noise scale by batch


def health_findings(health):
    """Findings about the variables of each minimizer.

    Args:
        health: {minimizer: {"variables": names, "steps": [rows], "gradient", "weight", "ratio", "zeros": [rows,
            variables]}}; "zeros" may be absent. With "dead": {"layers": names, "values": [rows, layers]} also units.
    """
    found = []
    for minimizer, rows in health.items():
        found += _minimizer_findings(f"{minimizer}/" if minimizer else "", rows)
    return found


def _minimizer_findings(prefix, rows):
    steps, variables = np.asarray(rows["steps"]), list(rows["variables"])
    gradient, weight, ratio = (np.asarray(rows[name], np.float64) for name in ("gradient", "weight", "ratio"))
    found = []
    bad = ~np.isfinite(gradient)
    if bad.any():
        first = int(bad.any(axis=1).argmax())
        name, count = variables[int(bad[first].argmax())], int(bad.any(axis=1).sum())
        text = f"{prefix}{name}: the gradient was NaN or Inf in {count} of {len(steps)} health rows, first at step "
        found.append(finding(f"{text}{int(steps[first]):,}.", prefix + name, count, "NaN/Inf"))
    late = slice(len(steps) // 2, None)
    usable = np.isfinite(gradient[late]).all(axis=1)
    if len(steps) < MIN_ROWS or steps[-1] < MIN_STEP or not usable.any():
        return found
    gradient, weight, ratio = gradient[late][usable], weight[late][usable], ratio[late][usable]
    layers = layers_of(variables)
    moved = {}  # {layer: median over rows of the ratio of its largest variable: a bias that grows from 0 says nothing}
    for layer, columns in layers.items():
        name = prefix + layer
        if not gradient[:, columns].any():
            text = f"No gradient arrives at {name}: it was 0 since step {int(steps[late][0]):,}."
            found.append(finding(text, name, 0.0, "no gradient"))
            continue
        main = columns[int(np.argmax(weight[:, columns].mean(axis=0)))]
        moved[layer] = size = float(np.median(ratio[:, main]))
        if size < STILL:
            text = f"{name}: update-to-weight ratio {f'{size:.0e}' if size else 0}: it does not move."
            found.append(finding(text, name, size, "not learning"))
        elif size > TOO_LARGE:
            text = f"{name}: each update moves it by {size:.2g} of its norm: the steps are too large."
            found.append(finding(text, name, size, "too large"))
    found += _lagging(prefix, moved)
    dead = rows.get("dead")
    shown = _summed_up(found, "not learning", "hardly move: update-to-weight ratios of", f"{len(layers)} layers")
    shown += _summed_up(_dead(prefix, dead), "dead units", "have dead units: shares of", "the layers")
    return shown or [_healthy(prefix, moved)]


def _summed_up(findings, word, text, total):
    """The findings, those of a word in one sentence where there are more than `LISTED`."""
    same = sorted((one for one in findings if one.word == word), key=lambda one: one.value)
    if len(same) <= LISTED:
        return findings
    first = next(one for one in findings if one.word == word)
    low, high = (format(same[i].value, ".0%" if word == "dead units" else ".0e") for i in (0, -1))
    names = ", ".join([one.layer for one in findings if one.word == word][:LISTED])
    sentence = f"{len(same)} of {total} {text} {low} to {high} ({names}, …)."
    others = [one for one in findings if one.word != word]
    return [finding(sentence, first.layer, first.value, word), *others]


def _lagging(prefix, moved):
    found = []
    for layer, ratio in moved.items():
        others = [other for name, other in moved.items() if name != layer]
        typical = float(np.median(others)) if others else 0.0
        if others and ratio >= STILL and ratio * LAGGING < typical:
            below = f"{typical / ratio:,.0f} × below the others"
            text = f"{prefix}{layer}: update-to-weight ratio {ratio:.0e}, {below}: it hardly learns."
            found.append(finding(text, prefix + layer, ratio, "not learning"))
    return found


def _dead(prefix, dead):
    if dead is None or len(dead["values"]) < MIN_ROWS:
        return []
    values = np.asarray(dead["values"], np.float64)
    shares = np.median(values[len(values) // 2 :], axis=0)
    return [
        finding(f"{prefix}{layer}: {share:.0%} of its units put out 0 for every example.", prefix + layer, share, word)
        for layer, share, word in zip(dead["layers"], shares, ["dead units"] * len(shares), strict=True)
        if share >= DEAD
    ]


def _healthy(prefix, moved):
    least, most = min(moved.values()), max(moved.values())
    label = prefix.rstrip("/") or None
    count = "both" if len(moved) == 2 else f"all {len(moved)}"
    every = f"{count} layers learn" if len(moved) > 1 else "the only layer learns"
    every = f"{label}: {every}" if label else every[0].upper() + every[1:]
    low, high = f"{least:.0e}", f"{most:.0e}"
    size = low if low == high else f"{low} to {high}"
    whose = "them by {} of their norm" if len(moved) > 1 else "it by {} of its norm"
    return finding(f"{every}: an update moves {whose.format(size)}.", label, most, "healthy")


def unprobed_findings(health):
    """A finding about recurrent layers whose variables are known, of a run without any rows of time steps."""
    names = []
    for minimizer, rows in health.items():
        prefix = f"{minimizer}/" if minimizer else ""
        names += [prefix + layer for layer in recurrent_layers(rows["variables"])]
    if not names:
        return []
    listed = ", ".join(names[:LISTED]) + (", …" if len(names) > LISTED else "")
    whose, they = ("its", "it forgets") if len(names) == 1 else ("their", "they forget")
    text = f"{listed}: {whose} time steps were not probed; whether {they} is not known."
    return [finding(text, names[0], len(names), "not probed")]


def recurrent_layers(variables):
    """The recurrent layers among those that variables belong to, by the names that Keras gives cells and their weights.

    >>> recurrent_layers(["model/gru/gru_cell/kernel", "model/gru/gru_cell/recurrent_kernel", "model/head/kernel"])
    ['gru']
    """
    found = {}
    for path in short_paths(variables):
        *layers, variable = path.split("/")
        cell = next((i for i, part in enumerate(layers) if i and part.endswith("cell")), None)
        if cell is not None or variable.startswith("recurrent"):
            found["/".join(layers[:cell])] = True
    return [name for name in found if name]


def conflict_findings(cosines):
    """Findings about pairs of losses, or that none is in conflict.

    `cosines`: {"a-b": cosines of their gradients, one for each probed update}.
    """
    found, peaceful = [], {}
    for pair, values in cosines.items():
        values = np.asarray(values, np.float64)
        values = values[np.isfinite(values)]
        if len(values) < MIN_COSINES:
            continue
        share = float((values < 0).mean())
        middle = float(np.median(values))
        if share > CONFLICTING and middle <= OPPOSED:
            text = (
                f"Losses {_pair(pair)} conflict in {share:.0%} of the {len(values)} probed updates "
                f"(median cosine {middle:.2f})."
            )
            found.append(finding(text, None, share, "conflict"))
        else:
            peaceful[pair] = share, len(values), middle
    if found or not peaceful:
        return found
    pair, (share, count, middle) = max(peaceful.items(), key=lambda item: item[1])
    most = "at most " if len(peaceful) > 1 else ""
    updates = f"the {count} probed updates (median cosine {middle:.2f})"
    text = f"Losses do not conflict: the gradients of {_pair(pair)} were opposed in {most}{share:.0%} of {updates}."
    return [finding(text, None, share, "healthy")]


def _pair(pair):
    first, dash, second = pair.partition("-")
    return f"`{first}` and `{second}`" if dash and "-" not in second else f"`{pair}`"


def noise_findings(noise):
    """Findings about the batch. `noise`: {label: (noise scale, examples per update, rows)}; "" is the whole update."""
    found = []
    for label, (scale, examples, rows) in noise.items():
        if rows < MIN_ROWS or not scale > NOISY * examples:
            continue
        of = f"loss `{label}`: " if label else ""
        size = f"{scale:,.0f} examples" if np.isfinite(scale) else "without bound"
        text = f"{of}the batch of {examples:,.0f} examples is small: the gradient noise scale is {size}."
        found.append(finding(text[0].upper() + text[1:] if not label else text, None, scale, "noisy"))
    return found


def skip_findings(skipped, updates):
    """A finding if not one of the updates was applied; skips before some that were are counted elsewhere."""
    if not updates or skipped < updates:
        return []
    all_of = f"all {updates:,} were" if updates > 1 else "the only one was"
    return [finding(f"No update was applied: {all_of} skipped (non-finite).", None, skipped, "no update")]


def spike_findings(steps):
    """A finding if spikes were recorded. `steps`: the training steps of those."""
    if not steps:
        return []
    shown = ", ".join(f"{step:,}" for step in steps[:5]) + (", …" if len(steps) > 5 else "")
    plural = "s" if len(steps) > 1 else ""
    return [finding(f"{len(steps)} spike{plural} at step{plural} {shown}.", None, len(steps), "spikes")]


def layers_of(variables):
    """{layer: indices of its variables} from paths; a first part that all share is left out.

    >>> layers_of(["model/dense/kernel", "model/dense/bias", "model/head/kernel"])
    {'dense': [0, 1], 'head': [2]}
    """
    layers = {}
    for index, path in enumerate(short_paths(variables)):
        layers.setdefault(path.rpartition("/")[0] or path, []).append(index)
    return layers


def short_paths(variables):
    """The paths without a first part that all share, such as the name of the model.

    >>> short_paths(["model/dense/kernel", "model/head/kernel"])
    ['dense/kernel', 'head/kernel']
    """
    parts = [name.split("/") for name in variables]
    if all(len(path) > 2 for path in parts) and len({path[0] for path in parts}) == 1:
        parts = [path[1:] for path in parts]
    return ["/".join(path) for path in parts]
