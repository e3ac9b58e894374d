"""A combiner by its name, for flags."""

import difflib
import inspect


def combiner_from_name(name, **arguments):
    """A new combiner, e.g. for `--combiner=gradnorm --combiner_args=alpha=1.5`.

    Every combiner that `losses.combiners` exports is found. Case, "_" and "-" do not matter.

    >>> combiner_from_name("GradNorm", alpha=0.5).alpha
    0.5
    """
    classes = {cls.name: cls for cls in exported()}
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
    from losses import combiners  # the package imports this module

    values = [getattr(combiners, name) for name in combiners.__all__]
    return [v for v in values if inspect.isclass(v) and issubclass(v, combiners.Combiner) and v.name]


def plain(name):
    """The name without case, "_" and "-", under which combiners are found."""
    return str(name).lower().replace("_", "").replace("-", "")


def nearest(name, choices):
    """A suggestion, or nothing if no choice is near."""
    found = difflib.get_close_matches(str(name).lower(), choices, n=1)
    return f" did you mean {found[0]!r}?" if found else ""
