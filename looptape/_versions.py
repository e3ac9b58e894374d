"""The versions of TensorFlow and Keras that were tried together; docs/versions.md has the table."""

import warnings

TRIED = {("2.18", "3.8"), ("2.18", "3.15"), ("2.19", "3.10"), ("2.20", "3.11"), ("2.21", "3.15")}


def warn_of_untried(tensorflow, keras):
    """Warns if nobody has tried these versions together.

    >>> warn_of_untried("2.21.0", "3.15.1")
    """
    pair = tuple(".".join(version.split(".")[:2]) for version in (tensorflow, keras))
    if pair not in TRIED:
        tried = ", ".join(f"{one} with {other}" for one, other in sorted(TRIED))
        warnings.warn(
            f"TensorFlow {tensorflow} with Keras {keras} was never tried with Looptape; these pairs were: {tried}. "
            "Install one of them, or run the tests that docs/versions.md names.",
            stacklevel=3,
        )
