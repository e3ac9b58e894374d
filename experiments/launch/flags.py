"""Makes absl flags from a config class when an experiment is launched."""

import difflib
import os
import shutil
import sys
import textwrap

from absl import app, flags

from looptape.experiments.launch.config import Config
from looptape.experiments.launch.options import from_text, options, run_values, to_text


def run(main, config_class, name, doc):
    """Parses the command line and calls `main(config)`, as `absl.app.run` does. Does not return."""

    def parse(arguments):
        define(config_class, name, doc, flags.FLAGS)
        try:
            return parse_config(config_class, arguments, flags.FLAGS)
        except (flags.Error, ValueError, TypeError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            sys.exit(2)

    app.run(main, flags_parser=parse)


def define(config_class, name, doc, flag_values):
    """Defines one key flag per field of the config class, and the help flags."""
    for option in options(config_class).values():
        flag = _flag(option)
        flags.DEFINE_flag(flag, flag_values, module_name=name)
        flag_values.register_key_flag_for_module(sys.argv[0], flag)
    for cls in (_Help, _HelpShort):
        flags.DEFINE_flag(cls(lambda: help_text(config_class, name, doc)), flag_values, module_name=name)


def parse_config(config_class, arguments, flag_values):
    """Parses a command line, whose first element is the program's name, into a config."""
    known = options(config_class)
    try:
        rest = flag_values(list(arguments))[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, [*known, *flag_values], n=1, cutoff=0.5)
        hint = f" did you mean --{near[0]}?" if near else ""
        raise flags.Error(f"--{error.flagname} is not a flag;{hint} --help lists them all.") from None
    except flags.IllegalFlagValueError as error:
        raise flags.Error(str(error).partition(": ")[2] if "`" in str(error) else str(error)) from None
    if rest:
        raise flags.Error(f"{rest} was given without a flag; an experiment accepts only flags. Write --name=value.")
    return config_class(**{name: flag_values[name].value for name in known})


# The groups of the common flags by the first flag of each, in the order of `Config`.
_GROUPS = {
    "workdir": "The run",
    "optimizer": "The update",
    "precision": "The machine",
    "log_every": "Logging, evaluation, checkpoints",
    "fast_dev_run": "Debugging",
}


def help_text(config_class, name, doc, width=None):
    """Returns the `--help` text in at most 80 columns: docstring, the experiment's own flags, common flags by group."""
    width = width or min(max(shutil.get_terminal_size().columns, 60), 80)
    known, common = options(config_class), options(Config)
    groups = {f"Flags of {name}": [option for option in known.values() if option.name not in common]}
    title = "Common flags"
    for option_name in common:
        title = _GROUPS.get(option_name, title)
        groups.setdefault(title, []).append(known[option_name])
    lines = [*_wrapped(doc, width), ""]
    for title, group in groups.items():
        if group:
            lines += [f"{title}:", *(line for option in group for line in _describe(option, width)), ""]
    closing = "--flagfile=FILE reads flags from a file; --helpfull also shows absl's own flags."
    return "\n".join([*lines, *textwrap.wrap(closing, width)])


def _wrapped(doc, width):
    """Rewraps a docstring into lines. Indented paragraphs are commands; a backslash continues them."""
    lines = []
    for paragraph in doc.strip().split("\n\n"):
        lines += [""] if lines else []
        indented = paragraph.startswith((" ", "\t", "|", "- "))
        if not indented:
            lines += textwrap.wrap(paragraph, width, break_on_hyphens=False)
            continue
        for line in paragraph.split("\n"):
            further = " " * (len(line) - len(line.lstrip()) + 4)
            parts = [line]
            if len(line) > width:
                parts = textwrap.wrap(line, width - 2, subsequent_indent=further, break_on_hyphens=False)
            lines += [*(f"{part} \\" for part in parts[:-1]), parts[-1]]
    return lines


def flag_lines(config):
    """Returns ["--name=value", …] of a config, the lines of a flag file that replays the run in another workdir."""
    return [f"--{name}={to_text(value)}" for name, value in run_values(config).items()]


def _describe(option, width):
    head = f"  --{option.name}={to_text(option.default)}"
    limits = f" ({option.limits()})" if option.limits() else ""
    indent = 30
    body = textwrap.wrap(option.help + limits, width - indent, break_on_hyphens=False)
    if len(head) < indent - 1:
        first = head.ljust(indent) + (body.pop(0) if body else "")
        return [first.rstrip(), *(" " * indent + line for line in body)]
    return [head, *(" " * indent + line for line in body)]


class _Parser(flags.ArgumentParser):
    syntactic_help = ""

    # absl keeps one parser per set of constructor arguments; ours differ in what cannot be hashed.
    def __new__(cls, *_):
        return object.__new__(cls)

    def __init__(self, option):
        self._option = option

    def parse(self, argument):
        return from_text(self._option, argument) if isinstance(argument, str) else argument

    def flag_type(self):
        return self._option.kind.__name__


class _Serializer(flags.ArgumentSerializer):
    def serialize(self, value):
        return to_text(value)


def _flag(option):
    help = f"{option.help}{f' ({option.limits()})' if option.limits() else ''}"
    if option.kind is bool:
        return flags.BooleanFlag(option.name, option.default, help)
    return flags.Flag(_Parser(option), _Serializer(), option.name, option.default, help)


class _Help(flags.BooleanFlag):
    NAME = "help"

    def __init__(self, text):
        super().__init__(self.NAME, False, "show this help", allow_override=True, allow_hide_cpp=True)
        self._text = text

    def parse(self, argument):
        if self._parse(argument):
            try:
                print(self._text(), flush=True)
            except BrokenPipeError:  # `--help | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)


class _HelpShort(_Help):
    NAME = "helpshort"
