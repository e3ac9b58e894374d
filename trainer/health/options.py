"""The options of health rows, checked."""

from collections.abc import Iterable

PARTS = ("activations", "histograms", "positions")


def check_parts(parts: str | Iterable[str]) -> tuple[str, ...]:
    """The parts of a health row beyond the norms, from a list of names or a text with commas.

    >>> check_parts("positions,activations")
    ('activations', 'positions')
    """
    given = [part.strip() for part in parts.split(",") if part.strip()] if isinstance(parts, str) else list(parts)
    unknown = [part for part in given if part not in PARTS]
    if unknown:
        raise ValueError(
            f"`health` is {parts!r}; it may hold {', '.join(map(repr, PARTS))}. Leave out {unknown}; norms, ratios and "
            "the noise scale are always included."
        )
    return tuple(part for part in PARTS if part in given)
