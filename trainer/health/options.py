"""The options of health rows, checked."""

from collections.abc import Iterable

PARTS = ("activations", "histograms", "positions")


def check_parts(parts: str | Iterable[str]) -> tuple[str, ...]:
    """The parts of a health row beyond the norms, from a list of names or a text with commas.

    >>> check_parts("positions,activations")
    ('activations', 'positions')
    """
    named = isinstance(parts, str) or (isinstance(parts, Iterable) and all(isinstance(part, str) for part in parts))
    if not named:
        raise TypeError(
            f"`health` is {parts!r}; it must be a text such as 'activations,positions' or a list of such names. "
            "Leave it out for norms, ratios and the noise scale alone."
        )
    given = [part.strip() for part in parts.split(",") if part.strip()] if isinstance(parts, str) else list(parts)
    unknown = [part for part in given if part not in PARTS]
    if unknown:
        raise ValueError(
            f"`health` is {parts!r}; it may hold {', '.join(map(repr, PARTS))}. Leave out {unknown}; norms, ratios and "
            "the noise scale are always included."
        )
    return tuple(part for part in PARTS if part in given)


def check_measured(parts: tuple[str, ...], health_every: int) -> None:
    """Refuses parts of a health row where there are no health rows."""
    if parts and not health_every:
        raise ValueError(
            f"`health` is {','.join(parts)!r}, but `health_every` is 0, so nothing is measured. Set e.g. "
            "health_every=50, or leave `health` out."
        )
