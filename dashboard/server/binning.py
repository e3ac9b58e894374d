"""From rows to a picture small enough to send: aligned, normalised, compared, coded in 16 bits, merged.

A cell is a uint16 code. Codes are ordered by how much a merged cell must show of what went into it, so that
merging is a maximum: a NaN is never hidden by a number, nor a number by a zero.

    0 padding    1 exactly zero    2 … 65533 numbers, linear from `low` to `high`    65534 Inf    65535 NaN

Numbers are log10 of the values (differences and shares: the values themselves). All functions are pure.
"""

import dataclasses

import numpy as np

from looptape.dashboard import metadata

PADDING, ZERO, FIRST, LAST, INF, NAN = 0, 1, 2, 65533, 65534, 65535
MAX_ROWS, MAX_COLUMNS, MAX_CELLS = 400, 1000, 200_000
BLOCK_CELLS = 100_000


@dataclasses.dataclass(frozen=True)
class Picture:
    """Data of a heat map. Row k merges the kept rows from `starts[k]` up to the next start."""

    codes: np.ndarray  # uint16 [pictured rows, columns]
    starts: np.ndarray  # uint32 [pictured rows]
    peaks: np.ndarray  # uint32 [pictured rows]: the kept row with the largest value
    nonfinite: np.ndarray  # uint32 [pictured rows]: how many of its rows hold a NaN or an Inf
    low: float | None  # the numbers at codes FIRST and LAST; None if there is no number at all
    high: float | None
    column_width: int  # time steps per column


def valid(values):
    return metadata.decode_row(values)[1]


def lengths(values):
    """Returns, for each row of [rows, time], how long it is up to the last step that is not padding."""
    mask = valid(values)
    if not values.shape[1]:
        return np.zeros(len(values), dtype=np.int64)
    return np.where(mask.any(axis=1), values.shape[1] - np.argmax(mask[:, ::-1], axis=1), 0)


def align_end(values, width=None):
    """Moves each row of [rows, time] to the right, so that its last valid time step is in the last column."""
    width = width or values.shape[1]
    source = np.arange(width)[None, :] - (width - lengths(values))[:, None]
    padded = _padding((len(values), max(width, values.shape[1]) + 1))
    padded[:, : values.shape[1]] = values
    # A negative source means "before the row begins": the last column, which is always padding.
    return np.take_along_axis(padded, np.where(source < 0, padded.shape[1] - 1, source), axis=1)


def widen(values, width):
    """Pads [rows, time] on the right up to `width` time steps."""
    wide = _padding((len(values), width))
    wide[:, : values.shape[1]] = values
    return wide


def normalise_last(values):
    """Divides each row by its value at the last time step that has a number other than zero.

    Zero is passed over, because the cell state's gradient is zero at the last step by definition.
    """
    if not values.size:
        return values
    usable = np.isfinite(values) & (values > 0)
    last = values.shape[1] - 1 - np.argmax(usable[:, ::-1], axis=1)
    divisor = np.take_along_axis(values, last[:, None], axis=1)
    divisor = np.where(usable.any(axis=1, keepdims=True), divisor, np.float32(1))
    with np.errstate(over="ignore"):
        return metadata.encode_row(values / divisor, valid(values))


def normalise_largest(values):
    """Divides each row by its largest finite value: 1 where the gradient is largest, 0.01 at the horizon."""
    if not values.size:
        return values
    usable = np.isfinite(values) & (values > 0)
    divisor = np.max(values, axis=1, keepdims=True, where=usable, initial=0)
    divisor = np.where(divisor > 0, divisor, np.float32(1))
    return metadata.encode_row(values / divisor, valid(values))


def difference(rows, baseline, *, end=False):
    """Returns (steps, values): log10 of `rows` minus log10 of the baseline's row at the nearest step.

    Only steps within the baseline's own range are compared. Inf means that exactly one of the two is zero.
    """
    width = max(rows.values.shape[1], baseline.values.shape[1])
    if not len(rows.steps) or not len(baseline.steps):
        return rows.steps[:0], _padding((0, width))
    inside = (rows.steps >= baseline.steps[0]) & (rows.steps <= baseline.steps[-1])
    steps, ours = rows.steps[inside], rows.values[inside]
    right = np.searchsorted(baseline.steps, steps).clip(0, len(baseline.steps) - 1)
    left = (right - 1).clip(0)
    nearer_left = steps - baseline.steps[left] < np.abs(baseline.steps[right] - steps)
    theirs = baseline.values[np.where(nearer_left, left, right)]
    place = align_end if end else widen
    ours, theirs = place(ours, width), place(theirs, width)
    both = valid(ours) & valid(theirs)
    with np.errstate(all="ignore"):
        # In float64: which float32 log10(100) is depends on the processor.
        change = np.log10(ours, dtype=np.float64) - np.log10(theirs, dtype=np.float64)
        result = np.where((ours == 0) & (theirs == 0), 0, change).astype(np.float32)
    return steps, metadata.encode_row(result, both)


def encode(values, logarithmic):
    """Returns (codes, low, high) of an array [rows, …]. A negative norm is no norm: NaN."""
    low, high = np.inf, -np.inf
    for block in _blocks(values):
        numbers = values[block]
        usable = np.isfinite(numbers) & (numbers > 0) if logarithmic else np.isfinite(numbers)
        low = min(low, float(numbers.min(where=usable, initial=np.inf)))
        high = max(high, float(numbers.max(where=usable, initial=-np.inf)))
    if logarithmic and low <= high:
        low, high = float(np.log10(low)), float(np.log10(high))
    codes = np.empty(values.shape, dtype=np.uint16)
    for block in _blocks(values):
        _encode_block(values[block], logarithmic, low, high, codes[block])
    return (codes, low, high) if low <= high else (codes, None, None)


def _encode_block(values, logarithmic, low, high, codes):
    codes[...] = NAN
    codes[~valid(values)] = PADDING
    codes[np.isinf(values)] = INF
    usable, numbers = np.isfinite(values), values
    if logarithmic:
        codes[values == 0] = ZERO
        usable &= values > 0
        numbers = np.log10(values, where=usable, out=np.zeros_like(values))
    scale = (LAST - FIRST) / (high - low) if high > low else 0.0
    shares = np.where(usable, numbers - low, 0) * scale
    np.copyto(codes, (shares.clip(0, LAST - FIRST) + (FIRST + 0.5)).astype(np.uint16), where=usable)


def _blocks(values):
    """Slices of rows, so that what is computed on the way stays small beside what is kept."""
    size = max(BLOCK_CELLS // max(int(np.prod(values.shape[1:])), 1), 1)
    return [slice(start, start + size) for start in range(0, len(values), size)]


def picture(values, *, logarithmic=True, by_magnitude=False, max_rows=MAX_ROWS):
    """Merges [rows, time] into a `Picture`. Each cell takes the largest value (or magnitude)."""
    codes, low, high = encode(values, logarithmic)
    rows, time = codes.shape
    column_width = max(-(-time // MAX_COLUMNS), 1)
    columns = -(-time // column_width)
    wanted = min(max_rows, rows, max(MAX_CELLS // max(columns, 1), 1))
    if not rows or not time:
        empty = np.zeros(0, np.uint32)
        return Picture(codes[:0], empty, empty, empty, low, high, column_width)
    starts = np.arange(wanted) * rows // wanted
    # The code of the number 0 is the centre that magnitudes are measured from; it may lie outside the range.
    centre = FIRST - low * (LAST - FIRST) / (high - low) if by_magnitude and low is not None and high > low else None
    merged = _merge(_merge(codes, starts, 0, centre), np.arange(columns) * column_width, 1, centre)
    bad = (codes >= INF).any(axis=1)
    largest = codes.max(axis=1)
    ends = np.append(starts[1:], rows)
    peaks = [start + int(largest[start:end].argmax()) for start, end in zip(starts, ends, strict=True)]
    return Picture(
        codes=merged,
        starts=starts.astype(np.uint32),
        peaks=np.array(peaks, dtype=np.uint32),
        nonfinite=np.add.reduceat(bad, starts, dtype=np.uint32),
        low=low,
        high=high,
        column_width=column_width,
    )


def _merge(codes, starts, axis, centre):
    if len(starts) == codes.shape[axis]:
        return codes
    largest = np.maximum.reduceat(codes, starts, axis=axis)
    if centre is None:
        return largest
    # Specials keep their order; among numbers the one farther from the centre wins.
    numbers = np.where(codes < FIRST, np.uint16(INF), codes)
    smallest = np.minimum.reduceat(numbers, starts, axis=axis)
    farther = (smallest <= LAST) & (largest <= LAST) & (centre - smallest > largest - centre)
    return np.where(farther, smallest, largest)


def _padding(shape):
    values = np.empty(shape, dtype=np.float32)
    values.view(np.uint32)[...] = metadata.PADDING_BITS
    return values


def merged_row(rows, step, width):
    """Returns the row of a training step as a list: the largest of every `width` columns, None where none is finite.

    Empty where the step has no row.
    """
    found = np.flatnonzero(rows.steps == step)
    if not found.size:
        return []
    values = rows.values[found[0]].astype(np.float64)
    values = np.where(np.isfinite(values), values, -np.inf)
    largest = np.maximum.reduceat(values, np.arange(0, len(values), width)).tolist() if len(values) else []
    return [float(f"{value:.4g}") if value > -np.inf else None for value in largest]
