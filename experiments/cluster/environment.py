"""Seconds that environment variables give."""

import math
import os

from looptape.experiments.launch.options import Refused


def seconds(name, default, zero=True):
    """The number of seconds in an environment variable, or the default.

    Args:
        name: of the variable.
        default: where it is not set, or empty.
        zero: whether 0 is allowed.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return float(default)
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not (found >= 0 if zero else found > 0) or math.isinf(found):
        wanted = "a number of seconds, or 0 for never" if zero else "a number of seconds above 0"
        raise Refused(f"{name} is {text!r}; it must be {wanted}. Use e.g. {name}={default:g}, or leave it out.")
    return found
