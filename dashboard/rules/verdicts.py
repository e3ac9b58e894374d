"""The rule that turns probed rows into sentences: does this layer forget, since when, and what could help.

The tab, the report, `diagnose()` and a run's closing table all show the findings of this module. It works on
arrays [rows, time] of norms, NaN where padded, and needs neither tensorflow nor keras.

The horizon is the number of time steps that at least 1 % of the gradient reaches. Where the loss is at the end,
it is counted in the state gradient. Where most time steps receive a gradient from outside (`external`: a loss at
each of them, or a layer above), every state gradient is large and the count says nothing; there the horizon comes from
the gain: the number of time steps until the product of the row's median gain falls below 1 %, at most those between two
cuts where an action (`bptt_window`) cuts the gradient off. `Finding.source` and the
text say which of the two. The scalar `timestep/<layer>/horizon` follows the same rule.
"""

import dataclasses

import numpy as np

from looptape.dashboard import metadata
from looptape.dashboard.rules import flow_verdicts, health_verdicts
from looptape.dashboard.rules.findings import (
    ADVICE,
    UNCUT,
    WORDS,
    Finding,
    as_json,
    finding,
    memory_advice,
    softened,
    worst_first,
)

__all__ = ["ADVICE", "WORDS", "Finding", "as_json", "judge", "layer_arrays", "run_findings"]

REACHED = 0.01  # the share of a gradient that still counts as arriving
MIN_ROWS, MIN_STEP = 3, 100  # gated cells open during training: earlier rows are no reason for a verdict
VANISHING, SHORT = 0.1, 0.5  # horizons up to these shares of the time steps
VANISHED = 1e-6  # of a row's largest gradient: what is left at the first time steps is as good as nothing
EXPLODING, GROWING = 100.0, 10.0  # growth of the gradient back to the first time step: a verdict; while it is going on
UNCHANGED, CHANGED = 1e-4, 0.01  # relative differences of norms
STEADY = 0.9  # of the rows since a step: what they share has held since then
RISING = 1.25  # a horizon that grew by this factor over the last half of the rows is still opening
PEAK = 1.25  # an earlier horizon that was longer by this factor than the first and the present one is named
FLAT_LOSS = 0.02  # relative change of the loss between the third and the last quarter
NOISY_LOSS = 0.25  # a larger change is a trend, however noisy the loss
MIN_LOSSES = 8


def judge(layer, steps, state, *, gain=None, external=None, steered=None, loss=None, cell_class=""):
    """Returns the `Finding` about one layer.

    Args:
        layer: the layer's name.
        steps: training steps [rows], increasing.
        state: norms of the state gradient [rows, time]; NaN where no example is valid.
        gain: backward gains [rows, time], or None if not logged.
        external: norms of the gradient from outside the loop [rows, time], or None if not logged.
        steered: norms of the state gradient after actions [rows, time], or None if nothing acts on it.
        loss: (steps, values) of the total loss, or None.
        cell_class: name of the class of the layer's cell, for advice; "" if it is not known.

    NaN at the ends of a row counts as padding; any other NaN, and any Inf, is non-finite (`nonfinite_rows`).
    """
    steps, state = np.asarray(steps), np.asarray(state, dtype=np.float64)
    rows = len(steps)
    if not rows or not state.size:
        return Finding(f"{layer} has no rows yet.", layer, 0.0, "too early")
    bad = nonfinite_rows(state)
    if bad.any():
        first = int(steps[bad.argmax()])
        text = f"{layer} has NaN or Inf in {bad.sum()} of {rows} rows, first at step {first:,}."
        return finding(text, layer, float(bad.sum()), "NaN/Inf")
    source = "gain" if gain is not None and dense(external) else "state"
    time = int((~np.isnan(state)).any(axis=0).sum())
    cuts = cut_counts(state, steered, external)
    reach = gain_horizons(gain, time) if source == "gain" else state_horizons(state)
    reach = np.minimum(reach, np.ceil(time / (cuts + 1))) if source == "gain" else reach
    gains = np.full(rows, np.nan) if gain is None else median_gains(gain)
    details = {"source": source, "time": time, "steps": tuple(steps.tolist()), "horizons": _plain(reach)}
    if rows < MIN_ROWS or steps[-1] < MIN_STEP:
        text = f"{layer}: {rows} rows up to step {int(steps[-1]):,}, too early to judge. The first rows look alike."
        return finding(text, layer, float(rows), "too early", **details)
    late = slice(rows // 2, None)  # never the first rows alone
    if not np.nan_to_num(state[late]).any():
        text = f"No gradient arrives at {layer}: it was 0 at every time step since step {int(steps[late][0]):,}."
        return finding(text, layer, 0.0, "no gradient", **details)
    grown = gain_growth(gain, time) if source == "gain" else growth(state)
    if np.median(grown[late]) >= EXPLODING:
        size = float(np.median(grown[late]))
        text = (
            f"{layer} explodes: the gradient grows {size:,.0f} times from the last time steps back to the first, "
            f"since step {_since(steps, grown >= EXPLODING):,}{_loss_words(loss)}."
        )
        return finding(text, layer, size, "exploding", **details)
    left = np.ones(rows) if source == "gain" else first_shares(state)
    # Sequences that got shorter during training are judged by what they have.
    lengths = np.full(rows, time) if source == "gain" else (~np.isnan(state)).sum(axis=1)
    found = _judge_reach(layer, steps, reach, lengths, left, gains, _past_explosion(steps, grown), loss, details)
    cut = int(np.median(cuts[late]))
    if cut and found.word != "healthy":
        text = f"{found.text} An action cuts the gradient off at {cut} time step{'s' if cut > 1 else ''}."
        return dataclasses.replace(found, text=text, advice=UNCUT if found.advice else "")
    advised = memory_advice(found.word, cell_class, time) if found.advice else ""
    found = dataclasses.replace(found, advice=advised)
    return softened(found, cell_class, steps[-1], loss_trend(loss) == "falling")


def _past_explosion(steps, grown):
    """Words about an explosion that is over."""
    if not grown.max() >= EXPLODING:
        return ""
    last = int(steps[grown >= GROWING][-1])
    return f", exploded up to step {last:,} (grew {grown.max():,.0f} times)"


def _judge_reach(layer, steps, reach, lengths, left, gains, exploded, loss, details):
    time = details["time"]
    defined = ~np.isnan(reach)
    if not defined[len(reach) // 2 :].any():
        text = f"{layer}: no late row has a horizon, because its gain is not defined."
        return finding(text, layer, 0.0, "too early", **details)
    steps, reach, left, gains = steps[defined], reach[defined], left[defined], gains[defined]
    shares = reach / np.maximum(lengths[defined], 1)
    late = slice(-max(len(reach) // 4, 1), None)
    now, share, remains = (float(np.median(values[late])) for values in (reach, shares, left))
    short = shares <= SHORT
    vanished = (shares <= VANISHING) | (short & (left < VANISHED))
    if share <= VANISHING or (share <= SHORT and remains < VANISHED):
        word, holds = "vanishing", vanished
    elif share <= SHORT or remains < VANISHED:  # most of the way and then nothing, as behind a cut, is not healthy
        word, holds = "short", short | (left < VANISHED)
    else:
        word, holds = "healthy", ~short
    if word != "healthy" and _rising(reach):
        word = "opening"
    way = _way(details["source"], gains[late], word != "healthy")
    left_over = f"{remains:.0e}" if remains else "nothing"
    rest = f" At the first ones {left_over} of the gradient is left." if remains < VANISHED else ""
    loss_words = _loss_words(loss)
    trend = _trend(steps, reach, now, time, holds)
    text = f"{layer} reaches back {now:.0f} of {time} time steps{way}, {trend}{exploded}{loss_words}.{rest}"
    falling = "falling" in loss_words
    return finding(text, layer, now, word, advise=not (falling and word == "short"), **details)


def _way(source, gains, short):
    """Words about the gain: that the horizon comes from it, and where the horizon is short its median."""
    gains = gains[np.isfinite(gains)]
    parts = ["from the gain: gradients enter at most time steps"] if source == "gain" else []
    parts += [f"median gain {np.median(gains):.2g}"] if short and gains.size else []
    return f" ({'; '.join(parts)})" if parts else ""


def run_findings(layers, losses=None, *, health=None, cosines=None, noise=None, spikes=(), skips=(0, 0), **measured):
    """Returns the findings of one run, worst first. All rules are applied here.

    Args:
        layers: {name: {"steps": [rows], "state": [rows, time], "gain": …, "external": …, "steered": …,
            "cell_class": …, "backward": whether it reads its sequence from the end}}; only the first two must be there.
        losses: {minimizer: (steps, values)} of the total loss of each minimizer, "" for the trainer's own, or None. The
            layers of a named one begin with its name and a slash.
        health: see `health_verdicts.health_findings`, or None.
        cosines: see `health_verdicts.conflict_findings`, or None.
        noise: see `health_verdicts.noise_findings`, or None.
        spikes: training steps of spikes that were recorded.
        skips: (updates that were skipped, all updates).
        measured: `positions` and `shares`, see `flow_verdicts`.
    """
    losses = losses or {}
    found = [one for name, loss in losses.items() for one in _loss_findings(name, loss)]
    for name, rows in layers.items():
        own = [minimizer for minimizer in losses if minimizer and name.startswith(f"{minimizer}/")]
        loss = losses.get(max(own, key=len) if own else "")
        found.append(_judged(name, rows, loss))
    found += health_verdicts.health_findings(health or {})
    found += [] if layers else health_verdicts.unprobed_findings(health or {})
    found += flow_verdicts.position_findings(measured.get("positions") or {})
    found += flow_verdicts.share_findings(measured.get("shares") or {})
    found += health_verdicts.conflict_findings(cosines or {})
    found += health_verdicts.noise_findings(noise or {})
    found += health_verdicts.spike_findings(spikes)
    found += health_verdicts.skip_findings(*skips)
    troubled = any(one.tone in ("bad", "warn") or one.word in ("not probed", "too early") for one in found)
    # "All layers learn", in green, beside a network that forgets, or may forget, would be read as praise.
    return worst_first([one for one in found if not (troubled and one.word == "healthy" and not one.time)])


def _judged(layer, rows, loss):
    """As `judge`, of a layer as `run_findings` has it; one that reads from the end is judged in its own order."""
    known = {"loss": loss, "cell_class": rows.get("cell_class", "")}
    arrays = {key: np.asarray(rows[key]) for key in ("state", "gain", "external", "steered") if key in rows}
    if not rows.get("backward"):
        return judge(layer, rows["steps"], **arrays, **known)
    turned = {key: values[..., ::-1] for key, values in arrays.items()}
    return dataclasses.replace(judge(f"{layer} (reads from the end)", rows["steps"], **turned, **known), layer=layer)


def _loss_findings(minimizer, loss):
    steps, values = np.asarray(loss[0]), np.asarray(loss[1], dtype=np.float64)
    bad = ~np.isfinite(values)
    if not bad.any():
        return []
    of = f" of `{minimizer}`" if minimizer else ""
    text = f"The loss{of} is NaN or Inf in {bad.sum()} of {len(values)} rows, first at step {int(steps[bad][0]):,}."
    return [finding(text, None, float(bad.sum()), "NaN/Inf")]


def layer_arrays(layers):
    """Returns what `run_findings` takes of {layer: {quantity: rows}}, as read from event files.

    Rows have `steps` and `values`, with padding marked as `metadata.encode_row` does. A layer without `state` is
    left out, and so are `gain` and `external` where their steps differ from those of `state`. A NaN that is not
    padding becomes Inf, so that it is never taken for padding.
    """
    result = {}
    for layer, quantities in layers.items():
        if "state" not in quantities:
            continue
        steps = quantities["state"].steps
        kept = metadata.decode_row(quantities["state"].values)[1].any(axis=1)  # rows that are not all padding
        result[layer] = {"steps": steps[kept]}
        for name, rows in quantities.items():
            if not np.array_equal(rows.steps, steps):
                continue
            values, valid = metadata.decode_row(rows.values)
            if name == "state":
                values = np.where(valid & np.isnan(values), np.inf, values)
            result[layer][name] = values[kept]
    return result


def nonfinite_rows(state):
    """Returns, for each row of [rows, time], whether it holds an Inf, or a NaN between two numbers or everywhere.

    NaN at the ends of a row is padding: sequences of a batch are shorter at one end than the longest.
    """
    nan = np.isnan(state)
    number = ~nan
    seen_before = np.maximum.accumulate(number, axis=1)
    seen_after = np.maximum.accumulate(number[:, ::-1], axis=1)[:, ::-1]
    inside = (nan & seen_before & seen_after).any(axis=1)
    return np.isinf(state).any(axis=1) | inside | nan.all(axis=1)


def state_horizons(state):
    """Returns [rows]: at how many time steps the state gradient is above 1 % of the row's largest."""
    largest = np.nanmax(np.nan_to_num(state, nan=0.0), axis=1, keepdims=True)
    return (np.nan_to_num(state, nan=0.0) > REACHED * largest).sum(axis=1).astype(np.float64)


def gain_horizons(gain, time):
    """Returns [rows]: how many time steps back at least 1 % is left if each keeps the row's median gain."""
    result = median_gains(gain)
    for row, median in enumerate(result):
        if median >= 1:
            result[row] = time
        elif median <= 0:
            result[row] = 0
        elif not np.isnan(median):
            result[row] = min(time, np.floor(np.log(REACHED) / np.log(median) + 1e-4))
    return result


def cut_counts(state, steered, external):
    """Returns [rows]: at how many time steps an action cut the gradient off, so that only what enters there is left."""
    if steered is None:
        return np.zeros(len(state))
    entering = 0.0 if external is None else np.asarray(external, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # Inf of an action
        only_entering = np.abs(steered - entering) <= UNCHANGED * state
        return (only_entering & (np.abs(state - steered) > CHANGED * state)).sum(axis=1).astype(np.float64)


def median_gains(gain):
    """Returns [rows]: the median of the gains that are defined; NaN where none is."""
    rows = [row[np.isfinite(row)] for row in np.asarray(gain, dtype=np.float64)]
    return np.array([np.median(row) if row.size else np.nan for row in rows])


def growth(state):
    """Returns [rows]: the gradient at the first valid time step by the largest of the last tenth; 0 if undefined.

    Losses at several of the last time steps add up there, which is no explosion.
    """
    result = np.zeros(len(state))
    for row, values in enumerate(state):
        values = values[np.isfinite(values)]
        last = values[-max(len(values) // 10, 1) :]
        if values.size > 1 and last.max() > 0:
            # float64 holds any ratio of two float32 numbers.
            result[row] = values[0] / last.max()
    return result


def gain_growth(gain, time):
    """Returns [rows]: what the gains of a row make of a gradient over all time steps; 0 if undefined."""
    gain = np.asarray(gain, dtype=np.float64)
    usable = np.isfinite(gain) & (gain > 0)
    logs = np.log(np.where(usable, gain, 1.0)).sum(axis=1) / np.maximum(usable.sum(axis=1), 1)
    return np.where(usable.any(axis=1), np.exp(np.minimum(time * logs, 700.0)), 0.0)


def first_shares(state):
    """Returns [rows]: the median gradient of the first tenth of the time steps by the row's largest; 1 if undefined."""
    result = np.ones(len(state))
    for row, values in enumerate(state):
        values = values[np.isfinite(values)]
        if values.size and values.max() > 0:
            result[row] = np.median(values[: max(len(values) // 10, 1)]) / values.max()
    return result


def dense(external):
    """Whether most valid time steps receive at least 1 % of the largest gradient from outside, in the median row."""
    if external is None:
        return False
    external = np.asarray(external, dtype=np.float64)
    valid = np.isfinite(external)
    shares = state_horizons(external) / np.maximum(valid.sum(axis=1), 1)
    return bool(len(shares) and np.median(shares) > 0.5)


def loss_trend(loss):
    """Returns "flat", "falling", "rising", or None if there are too few values to tell."""
    if loss is None:
        return None
    values = np.asarray(loss[1], dtype=np.float64)
    values = values[np.isfinite(values)]
    if len(values) < MIN_LOSSES:
        return None
    quarter = len(values) // 4
    half = values[-2 * quarter :]
    before, after = np.median(half[:quarter]), np.median(half[quarter:])
    change = (after - before) / max(abs(before), 1e-12)
    # The loss of a batch is noisy: what lies within three standard errors of the two medians is no trend. Noise is what
    # scatters about a straight line: the slope itself is none. A change by a quarter always is a trend.
    places = np.arange(len(half))
    scatter = half - np.polyval(np.polyfit(places, half, 1), places)
    variance = np.sum(scatter**2) / (len(half) - 2)
    noise = 3 * 1.25 * np.sqrt(2 * variance / quarter) / max(abs(before), 1e-12)
    return "flat" if abs(change) < max(FLAT_LOSS, min(noise, NOISY_LOSS)) else "falling" if change < 0 else "rising"


def _loss_words(loss):
    trend = loss_trend(loss)
    return f", loss {'still falling' if trend == 'falling' else trend}" if trend else ""


def _rising(reach):
    half = reach[len(reach) // 2 :]
    if len(half) < 2:
        return False
    middle = max(len(half) // 2, 1)
    before, after = np.median(half[:middle]), np.median(half[middle:])
    return bool(after >= RISING * before and after > before + 1)


def _trend(steps, reach, now, time, holds):
    """Since when: the horizon itself where it never changed, else the verdict."""
    if (np.abs(reach - now) <= max(1.0, 0.05 * time)).all():
        return f"unchanged since step {int(steps[0]):,}"
    since = _since(steps, holds)
    if since > steps[0]:
        peak = int(np.argmax(reach))
        best = f", {reach[peak]:.0f} at step {int(steps[peak]):,}" if reach[peak] > PEAK * max(now, reach[0]) else ""
        return f"since step {since:,} ({reach[0]:.0f} at step {int(steps[0]):,}{best})"
    return f"since step {since:,} (between {reach.min():.0f} and {reach.max():.0f})"


def _since(steps, holds):
    """The first training step that holds and from which on nearly all do; the last step if there is none."""
    shares = np.cumsum(holds[::-1])[::-1] / np.arange(len(holds), 0, -1)
    good = np.flatnonzero(holds & (shares >= STEADY))
    return int(steps[good[0]] if good.size else steps[-1])


def _plain(values):
    return tuple(None if np.isnan(value) else float(value) for value in values)
