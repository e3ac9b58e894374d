"""Finds a combiner by its name, for flags."""

import difflib
import inspect


def combiner_from_name(name, **arguments):
    """Returns a new combiner by its name, e.g. for `--combiner=gradnorm --combiner_args=alpha=1.5`.

    It knows every combiner that `losses.combiners` exports. Case, "_" and "-" do not matter.

    >>> combiner_from_name("GradNorm", alpha=0.5).alpha
    0.5
    """
    classes = {cls.name: cls for cls in sorted(exported(), key=lambda cls: cls.name)}
    known = {plain(key): cls for key, cls in classes.items()}
    if plain(name) not in known:
        hint = nearest(name, list(classes))
        raise ValueError(f"{name!r} is not a combiner;{hint} it must be one of {list(classes)}. Correct the name.")
    cls = known[plain(name)]
    valid = cls.arguments()
    for argument in arguments:
        if argument not in valid:
            raise ValueError(
                f"{argument!r} is not an argument of the combiner {cls.name!r};{nearest(argument, valid)} "
                f"it must be one of {valid}. Correct or remove it."
            )
    try:
        return cls(**arguments)
    except TypeError as error:  # text where a number belongs, and the like
        defaults = {name: value for name, value in cls().get_config().items() if name in arguments}
        raise ValueError(
            f"The combiner {cls.name!r} was given {arguments}; the values must be of the same kind as the defaults "
            f"{defaults} ({error}). Correct them."
        ) from error


def exported():
    """The combiner classes that the package exports."""
    from looptape.losses import combiners  # the package imports this module

    values = [getattr(combiners, name) for name in combiners.__all__]
    return [v for v in values if inspect.isclass(v) and issubclass(v, combiners.Combiner) and v.name]


def plain(name):
    """Returns the name in lower case without "_" and "-"."""
    return str(name).lower().replace("_", "").replace("-", "")


def nearest(name, choices):
    """Returns a suggestion, or "" if no choice is close."""
    found = difflib.get_close_matches(str(name).lower(), choices, n=1)
    return f" did you mean {found[0]!r}?" if found else ""
