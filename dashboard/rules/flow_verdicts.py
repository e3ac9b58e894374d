"""The rules about where the gradient arrives without a loop, and from which loss it comes: positions and loss shares.

As `verdicts`, whose `run_findings` is the one place that applies all rules. Pure Python on arrays, NaN where padded.
"""

import dataclasses

import numpy as np

from looptape.dashboard.rules.findings import finding

MIN_ROWS, MIN_STEP = 3, 10  # before anything is judged; of the rows only the later half counts
REACHED = 0.01  # the share of a row's largest gradient that still counts as arriving
VANISHING, SHORT = 0.1, 0.5  # reached positions up to these shares of all
LITTLE = 0.05  # of the gradient in the first half of the time steps: a loss that carries less is named
_ADVICE = "check masks and pooling; attention over all positions, or a skip connection, shortens the way."


def position_findings(positions):
    """Whether the gradient reaches all positions of the first layer that has some; layers above have a shorter way.

    Args:
        positions: {layer: (steps [rows], norms [rows, positions])} in the order of calls.
    """
    layer, (steps, values) = next(iter(positions.items()), (None, ((), ())))
    late = _late(steps, values)
    if late is None:
        return []
    largest = np.nanmax(np.nan_to_num(late), axis=1)
    count = int((~np.isnan(late)).any(axis=0).sum())
    if count < 2 or not largest.any():  # a gradient of 0 everywhere has a finding of its own
        return []
    late, largest = late[largest > 0], largest[largest > 0]
    reached = float(np.median((np.nan_to_num(late) > REACHED * largest[:, np.newaxis]).sum(axis=1)))
    only = "" if reached > SHORT * count else "only "
    text = (
        f"The gradient reaches {only}{reached:.0f} of {count} positions of {layer}, the first layer that has positions."
    )
    if reached > SHORT * count:
        return [finding(text, layer, reached, "healthy")]
    word = "vanishing" if reached <= VANISHING * count else "short"
    return [dataclasses.replace(finding(text, layer, reached, word), advice=_ADVICE)]


def share_findings(shares):
    """Which losses carry next to nothing of a layer's gradient in the first half of its time steps.

    Args:
        shares: {layer: {loss: (steps [rows], shares of the state gradient [rows, time])}}.
    """
    found = []
    for layer, losses in shares.items():
        late = {loss: _late(*rows) for loss, rows in losses.items()}
        if len(late) < 2 or any(rows is None for rows in late.values()):
            continue
        carried = {loss: _early(rows) for loss, rows in late.items()}
        total = sum(carried.values())
        if not np.isfinite(total) or total <= 0:
            continue
        carried = {loss: size / total for loss, size in carried.items()}
        little = {loss: size for loss, size in carried.items() if size < LITTLE}
        if not little:
            continue
        named = " and ".join(f"`{loss}` carries {size:.0%}" for loss, size in little.items())
        most = max(carried, key=lambda loss: carried[loss])
        text = f"{named} of the gradient of {layer} in the first half of the time steps, `{most}` {carried[most]:.0%}."
        found.append(finding(text, layer, min(little.values()), "one-sided"))
    return found


def _late(steps, values):
    """The later half of the rows as float64; None if there are too few."""
    if len(steps) < MIN_ROWS or steps[-1] < MIN_STEP:
        return None
    return np.asarray(values, np.float64)[len(steps) // 2 :]


def _early(rows):
    """The mean size of a share in the first half of the time steps; NaN where it is not known at any."""
    early = np.abs(rows[:, : max(rows.shape[1] // 2, 1)])
    known = np.isfinite(early)
    return float(early[known].mean()) if known.any() else float("nan")
