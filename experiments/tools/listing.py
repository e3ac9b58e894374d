"""Finds experiments by name, path or module, without importing them: files that define `Config` and `build`."""

import ast
import difflib
import importlib.machinery
import os
import pathlib
import sys
from typing import NamedTuple

import looptape

HERE = pathlib.Path(__file__).parent.parent  # of the experiments that come with Looptape
_NEEDED = {
    "Config": "its flags; write `class Config(launch.Config):` with at least `pass`",
    "build": "the trainer and the data; write `def build(config):` that returns launch.Experiment(trainer, dataset)",
}


class NotAnExperiment(ValueError):
    """The target cannot be launched; the message says why and what to do."""


class Program(NamedTuple):
    """An experiment that can be started.

    Args:
        name: name of the experiment.
        path: path of its file.
        module: module to start it by, or None to start it by its path.
    """

    name: str
    path: str
    module: str | None

    @property
    def command(self):
        """The command that starts it in a new process, without flags."""
        return [sys.executable, *(["-m", self.module] if self.module else [self.path])]


def experiments(directory=HERE):
    """Returns {name: first docstring line} of the experiments in a directory, sorted. Skips unreadable files."""
    found = {}
    for path in sorted(pathlib.Path(directory).glob("*.py")):
        try:
            tree = _parsed(path)
        except NotAnExperiment:
            continue
        if set(_NEEDED) <= _names(tree):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def text(directory="."):
    """Returns the output of `looptape list`: Looptape's experiments, and those in a directory."""
    own = {} if os.path.samefile(directory, HERE) else experiments(directory)
    groups = [
        ("Experiments of Looptape:", experiments()),
        ("In this directory:", {f"{n}.py": d for n, d in own.items()}),
    ]
    width = max(len(name) for _, found in groups for name in found)
    lines = []
    for title, found in groups:
        if found:
            lines += [
                title,
                *(f"  looptape run {name.ljust(width)}  {line}".rstrip() for name, line in found.items()),
                "",
            ]
    return "\n".join(
        [
            *lines,
            "--help shows the flags of an experiment. `looptape new my_experiment.py` writes a starter file;",
            "`looptape sweep --help` explains how to run one many times.",
        ]
    )


def find(target, directory="."):
    """Returns the `Program` of one of Looptape's experiments, a file or a module. Raises `NotAnExperiment`.

    >>> find("adding_problem").module
    'looptape.experiments.adding_problem'
    """
    known = experiments()
    if target in known:
        return Program(target, str(HERE / f"{target}.py"), f"looptape.experiments.{target}")
    if not target:
        raise NotAnExperiment(
            f"No experiment given; it must be one of {', '.join(known)}, or the path of a file. Write e.g. "
            "--experiment=adding_problem."
        )
    path = os.path.join(directory, target)
    if target.endswith(".py") or os.sep in target or os.path.exists(path) and not os.path.isdir(path):
        check(path, target)
        return Program(pathlib.Path(path).stem, os.path.normpath(path), None)
    path = _module_file(target, directory)
    if path is None:
        own = [] if os.path.samefile(directory, HERE) else [f"{name}.py" for name in experiments(directory)]
        near = difflib.get_close_matches(target, [*known, *own], n=1) or difflib.get_close_matches(
            f"{target}.py", own, n=1
        )
        hint = f"Did you mean {near[0]!r}?" if near else "`looptape list` shows all experiments."
        raise NotAnExperiment(
            f"{target!r} is not an experiment: it must be the name of a Looptape experiment, the path of a Python "
            f"file, or a module. {hint}"
        )
    check(path, target)
    return Program(target.rpartition(".")[2], path, target)


def check(path, shown=None):
    """Raises `NotAnExperiment` for a file that cannot be launched. Reads the file without importing it."""
    shown = shown or path
    if not os.path.isfile(path):
        kind = "is a directory" if os.path.isdir(path) else "does not exist"
        near = difflib.get_close_matches(os.path.basename(path), _python_files(os.path.dirname(path)), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "Write one with `looptape new my_experiment.py`."
        raise NotAnExperiment(f"{shown!r} {kind}; an experiment is one Python file. {hint}")
    if not path.endswith(".py"):
        raise NotAnExperiment(
            f"{shown!r} is not a Python file; an experiment is a file that ends in .py. Rename it, or correct the path."
        )
    tree = _parsed(path)
    for name, what in _NEEDED.items():
        if name not in _names(tree):
            raise NotAnExperiment(f"{shown!r} has no `{name}`; an experiment needs one for {what}.")
    if not any(isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body):
        raise NotAnExperiment(
            f"{shown!r} has a Config and a build, but does nothing when it is run; it must launch itself at its "
            'end. Add the lines `if __name__ == "__main__":` and `launch.main(Config, build)`.'
        )
    _check_shadow(os.path.dirname(os.path.abspath(path)))


def _check_shadow(directory):
    """Raises if a module named looptape lies next to the experiment, whose `import looptape` would find it."""
    ours = os.path.realpath(os.path.dirname(looptape.__file__))
    file, package = os.path.join(directory, "looptape.py"), os.path.join(directory, "looptape", "__init__.py")
    for hiding in (file, package):
        if os.path.exists(hiding) and os.path.realpath(os.path.dirname(hiding)) != ours:
            raise NotAnExperiment(
                f"{hiding} has the name of this package; experiments next to it would import it instead. Rename it."
            )


def _parsed(path):
    try:
        return ast.parse(pathlib.Path(path).read_bytes())
    except (SyntaxError, ValueError, OSError) as error:
        raise NotAnExperiment(f"{str(path)!r} is not valid Python: {error}. Correct the file.") from None


def _names(tree):
    """Returns the names that a module defines, assigns or imports at its top level."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def _module_file(module, directory):
    """Returns the file of a module that Python would find from a directory, or None. Imports no packages."""
    places, spec = [os.path.abspath(directory), *sys.path], None
    for part in module.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, places) if places and part.isidentifier() else None
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return spec.origin if spec.origin and spec.origin.endswith(".py") and not places else None


def _python_files(directory):
    try:
        return [name for name in os.listdir(directory or ".") if name.endswith(".py")]
    except OSError:
        return []
