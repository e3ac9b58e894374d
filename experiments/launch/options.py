"""Options of an experiment: a frozen dataclass whose fields become flags with a help text and limits."""

import dataclasses
import difflib
import math
import types
import typing

_KEY = "option"


class Refused(ValueError):
    """Refuses to run, with a message for the user and no traceback. `build` may raise it, too.

    >>> raise Refused("There is no file data.npz. Pass --data_path.")
    Traceback (most recent call last):
    looptape.experiments.launch.options.Refused: There is no file data.npz. Pass --data_path.
    """


@dataclasses.dataclass(frozen=True)
class Option:
    """The properties of one config field besides its default."""

    name: str
    kind: type  # int, float, str or bool
    optional: bool  # whether None is allowed
    default: object
    help: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple | None = None
    parse: typing.Callable | None = None  # turns the text into its value, or raises; the config keeps the text
    resume: str = "refuse"  # resuming with another value: "refuse", "accept", or "ignore"

    def limits(self):
        """Returns the allowed values in words, or ""."""
        if self.choices is not None:
            return "one of " + ", ".join(map(str, self.choices))
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {limit}" for word, limit in words.items() if limit is not None)


def option(
    default,
    help,
    *,
    least=None,
    above=None,
    most=None,
    below=None,
    choices=None,
    parse=None,
    resume="refuse",
):
    """Declares a config field: its default, its help text, and the allowed values.

    Args:
        default: the flag's default; its type is the field's annotation (int, float, str, bool, or one `| None`).
        help: one line for `--help`.
        least: the smallest allowed number; `above` excludes the limit itself.
        above: see `least`.
        most: the largest allowed number; `below` excludes the limit itself.
        below: see `most`.
        choices: the allowed values.
        parse: called with a text value to check it; the config keeps the text.
        resume: "accept" if a run may resume with another value. The default refuses that, because most options
            change the model or the data. "ignore" if the option is not a property of the run.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Config(Checked):
    ...     units: int = option(64, "size of the state", least=1)
    >>> Config(units=8)
    Config(units=8)
    """
    metadata = {
        "help": help,
        "least": least,
        "above": above,
        "most": most,
        "below": below,
        "choices": None if choices is None else tuple(choices),
        "parse": parse,
        "resume": resume,
    }
    return dataclasses.field(default=default, metadata={_KEY: metadata})


def options(config_class):
    """Returns {name: Option} of a config class, in the order of its fields.

    A field that only changes the default (`steps: int = 500`) keeps the inherited help text and limits.
    """
    hints = typing.get_type_hints(config_class)
    found = {}
    for field in dataclasses.fields(config_class):
        metadata = next(
            (
                inherited.metadata[_KEY]
                for cls in config_class.__mro__
                for inherited in [getattr(cls, "__dataclass_fields__", {}).get(field.name)]
                if inherited is not None and _KEY in inherited.metadata
            ),
            {"help": ""},
        )
        kind, optional = _kind(config_class, field.name, hints[field.name])
        found[field.name] = Option(field.name, kind, optional, field.default, **metadata)
    return found


def check(option, value):
    """Converts the value to the option's type. Raises a `ValueError` or `TypeError` that lists the allowed values."""
    if value is None and option.optional:
        return None
    value = _convert(option, value)
    if option.choices is not None and value not in option.choices:
        near = difflib.get_close_matches(str(value), [str(choice) for choice in option.choices], n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "See --help."
        raise ValueError(f"`{option.name}` is {value!r}; it must be {option.limits()}. {hint}")
    outside = (
        (option.least is not None and not value >= option.least)
        or (option.above is not None and not value > option.above)
        or (option.most is not None and not value <= option.most)
        or (option.below is not None and not value < option.below)
    )
    if outside or (option.kind is float and not math.isfinite(value)):
        allowed = option.limits() or "finite"
        none = ", or none" if option.optional else ""
        raise ValueError(f"`{option.name}` is {value}; it must be {allowed}{none}. Its default is {option.default}.")
    if option.parse is not None:
        try:
            option.parse(value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"`{option.name}` is {value!r}: {error}") from error
    return value


def from_text(option, text):
    """Parses the text of a flag. "none" means None where allowed; `1e4` is also an integer."""
    if option.optional and text.lower() in ("none", ""):
        return None
    if option.kind is str:
        return check(option, text)
    try:
        if option.kind is bool:
            value = {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        elif option.kind is int:
            value = int(text) if not any(mark in text.lower() for mark in ".e") else _whole(float(text))
        else:
            value = float(text)
    except (ValueError, KeyError, OverflowError):
        raise ValueError(_wrong_type(option, text)) from None
    return check(option, value)


def to_text(value):
    """Returns a text that `from_text` parses back to the same value."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


# Options that change what is seen of a run, not what it reaches.
OBSERVING = {"log_every", "eval_every", "checkpoint_every", "probe_every", "health_every", "health"}


def run_values(config):
    """Returns {name: value} of the options that define the run, without its directory and what it prints."""
    return {name: getattr(config, name) for name, known in options(type(config)).items() if known.resume != "ignore"}


class Checked:
    """Base of config classes: checks every field on construction, from flags or in Python."""

    def __post_init__(self):
        for name, known in options(type(self)).items():
            object.__setattr__(self, name, check(known, getattr(self, name)))


def _kind(config_class, name, hint):
    arguments = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
    kinds = [kind for kind in arguments if kind is not type(None)]
    if len(kinds) != 1 or kinds[0] not in (int, float, str, bool):
        raise TypeError(
            f"The field `{name}` of {config_class.__name__} is annotated {hint}; it must be int, float, str or bool, "
            "or one of them with `| None`. Use a str with `parse` for anything else."
        )
    return kinds[0], len(arguments) > 1


def _convert(option, value):
    fits = {
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, int | float) and not isinstance(value, bool),
        str: isinstance(value, str),
    }[option.kind]
    if not fits:
        raise TypeError(_wrong_type(option, value))
    return option.kind(value)


def _wrong_type(option, value):
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[option.kind]
    limits = f" ({option.limits()})" if option.limits() else ""
    none = " or none" if option.optional else ""
    default = to_text(option.default) or "empty"
    return f"`{option.name}` is {value!r}; it must be {words}{none}{limits}. Its default is {default}."


def _whole(number):
    if number != int(number):
        raise ValueError
    return int(number)
