"""Finds the experiments: every file here that has a `Config` and a `build`. Reads them without importing."""

import ast
import pathlib

_HERE = pathlib.Path(__file__).parent


def experiments(directory=_HERE):
    """{name: first line of the docstring} of the experiments in a directory, sorted."""
    found = {}
    for path in sorted(pathlib.Path(directory).glob("*.py")):
        tree = ast.parse(path.read_text())
        names = {getattr(node, "name", None) for node in tree.body}
        if {"Config", "build"} <= names:
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def text(directory=_HERE):
    """What `python -m experiments` prints."""
    found = experiments(directory)
    width = max(map(len, found), default=0)
    lines = [f"  python -m experiments.{name.ljust(width)}  {line}" for name, line in found.items()]
    return "\n".join(
        [
            *lines,
            "",
            "--help shows the flags of an experiment. `python -m experiments.sweep --help`: many runs of one.",
        ]
    )
