"""The command `looptape`: lists, runs and writes experiments. Imports TensorFlow only if a command needs it."""

import difflib
import functools
import os
import runpy
import sys
import textwrap

_HELP = ("-h", "--help", "help")


def main(arguments=None):
    """Runs a command line, by default the command line of the process. Returns the exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in _HELP:
        print(_overview())
        return 0
    if name == "--version":
        import looptape

        print(looptape.__version__)
        return 0
    if name not in _COMMANDS:
        near = difflib.get_close_matches(name, _COMMANDS, n=1)
        hint = f"Did you mean `looptape {near[0]}`?" if near else "See `looptape --help`."
        if name.endswith(".py"):
            hint = f"Did you mean `looptape run {name}`?"
        return _refuse(f"{name!r} is not a command; it must be one of {', '.join(_COMMANDS)}. {hint}")
    try:
        outcome = _COMMANDS[name](rest)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("looptape", "tensorflow", "keras", "absl"):
            raise
        return _refuse(f"{error}; Looptape is not fully installed here. Reinstall it with `pip install looptape`.")
    return outcome() if callable(outcome) else outcome  # a user's file, whose own errors are shown as they are


def _list(arguments):
    """lists Looptape's experiments and those in a directory (default: the current one)"""
    from looptape.experiments.tools import listing

    if _asks_for_help(arguments):
        return _explain("list [directory]", _list)
    if len(arguments) > 1 or (arguments and not os.path.isdir(arguments[0])):
        return _refuse(f"{' '.join(arguments)!r} was given; `looptape list` takes one directory, or none. Correct it.")
    print(listing.text(*arguments))
    return 0


def _run(arguments):
    """runs an experiment: a name, the path of a file, or a module, with its flags"""
    from looptape import _quiet
    from looptape.experiments.tools import listing

    if not arguments or arguments[0] in _HELP:
        return _explain(
            "run <name, path or module> [flags]", _run, "looptape run adding_problem --help  shows its flags"
        )
    if arguments[0].startswith("-"):
        return _refuse(
            f"{arguments[0]!r} comes before the experiment; flags come after it. Write `looptape run <name> …`."
        )
    try:
        program = listing.find(arguments[0])
    except listing.NotAnExperiment as error:
        return _refuse(error)
    sys.argv = [program.path, *arguments[1:]]
    _quiet.import_tensorflow()
    return functools.partial(_start, program)


def _start(program):
    """Runs an experiment as `python <path>` or `python -m <module>` would, in this process."""
    if program.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(program.path)))
        runpy.run_path(program.path, run_name="__main__")
    return 0


def _sweep(arguments):
    """runs an experiment with every combination of some flags"""
    from looptape.experiments.tools import sweep

    sweep.launch(arguments)


def _compare_combiners(arguments):
    """runs an experiment with several combiners and seeds, and compares them with the plain sum"""
    from looptape.experiments.tools import compare_combiners

    compare_combiners.launch(arguments)


def _cluster(arguments):
    """runs several workers of an experiment or a command on this machine"""
    from looptape.experiments.cluster import local

    return local.main(arguments)


def _ray(arguments):
    """runs several workers of an experiment on a Ray cluster"""
    from looptape.experiments.cluster import ray

    return ray.main(arguments)


def _checkpoints(arguments):
    """prints what a work directory holds, and whether its checkpoints are good"""
    if _asks_for_help(arguments):
        return _explain("checkpoints <workdir> [--contents]", _checkpoints, "--contents  lists every variable")
    from looptape.trainer.checkpoints import __main__ as checkpoints

    return checkpoints.main(arguments)


def _report(arguments):
    """writes a self-contained HTML page about runs: verdicts, maps, curves, flags, results"""
    from looptape.dashboard import report

    return report.main(arguments)


def _docs(arguments):
    """opens the guides in a browser, or prints where they are"""
    import pathlib

    if _asks_for_help(arguments):
        return _explain("docs [--path]", _docs, "--path  prints the path and opens nothing")
    if set(arguments) - {"--path"}:
        return _refuse(f"{' '.join(arguments)!r} was given; `looptape docs` takes only --path. Leave the rest out.")
    checkout = pathlib.Path(__file__).resolve().parent.parent
    site, guides = checkout / "build" / "site" / "index.html", checkout / "docs" / "first-run.md"
    if site.exists():
        print(site)
        if "--path" not in arguments:
            import webbrowser

            webbrowser.open(site.as_uri())
        return 0
    if guides.exists():
        print(f"{guides.parent}\nThis folder has the guides as Markdown. `make docs` in {checkout} builds the site.")
        return 0
    url = _project_url()
    if "--path" in arguments:
        return _refuse(
            f"the installation in {checkout} does not include the guides, so they have no path. Read them "
            f"{f'at {url}' if url else 'in docs/ of a clone of the repository'}."
        )
    where = f"at {url}" if url else "in docs/ of Looptape's repository, where `make docs` builds the site"
    print(f"This installation does not include the guides. They are {where}.")
    print("Offline, `python -m pydoc looptape` lists all names, and `pydoc looptape.trainer.trainer` explains `fit`.")
    return 0


def _project_url():
    """Returns the address of the documentation or the project that the installed package names, or None."""
    from importlib import metadata

    try:
        known = metadata.metadata("looptape")
    except metadata.PackageNotFoundError:
        return None
    named = dict(each.split(", ", 1) for each in known.get_all("Project-URL") or ())
    first = {name.lower(): url for name, url in named.items()}
    return first.get("documentation") or known.get("Home-page") or next(iter(named.values()), None)


def _export(arguments):
    """exports the model of a finished run as a SavedModel, which TensorFlow can serve without Looptape"""
    weights = [word.removeprefix("--weights=") for word in arguments if word.startswith("--weights=")]
    paths = [word for word in arguments if not word.startswith("--")]
    if _asks_for_help(arguments):
        return _explain("export <workdir> <directory> [--weights=final]", _export, "--weights  final, averaged or best")
    if len(paths) != 2 or len(paths) + len(weights) != len(arguments) or len(weights) > 1:
        return _refuse(
            f"{arguments} was given; `looptape export` takes a work directory, a directory to write to, and "
            "--weights=final, averaged or best. Correct it."
        )
    from looptape import _quiet
    from looptape.experiments.tools import serving

    _quiet.import_tensorflow()
    try:
        serving.export(*paths, *weights)
    except ValueError as error:
        return _refuse(error)
    print(f"Wrote {paths[1]}. Load it with `model = tf.saved_model.load({paths[1]!r})`; `model.serve(inputs)`.")
    return 0


def _new(arguments):
    """writes a commented starter experiment that runs as it is"""
    from looptape.experiments.tools import new_file

    if _asks_for_help(arguments):
        return _explain("new <my_experiment.py>", _new)
    if len(arguments) != 1:
        return _refuse(
            f"{arguments} was given; `looptape new` takes one path. Write e.g. `looptape new my_experiment.py`."
        )
    try:
        new_file.write(arguments[0])
    except (ValueError, OSError) as error:
        return _refuse(error)
    print(f"Wrote {arguments[0]}. Try `looptape run {arguments[0]} --steps=100 --workdir=runs/first`.")
    return 0


_COMMANDS = {
    "list": _list,
    "run": _run,
    "sweep": _sweep,
    "compare-combiners": _compare_combiners,
    "cluster": _cluster,
    "ray": _ray,
    "checkpoints": _checkpoints,
    "report": _report,
    "export": _export,
    "docs": _docs,
    "new": _new,
}


def _overview():
    lines = [_wrapped(f"  looptape {name:17} ", command.__doc__, 29) for name, command in _COMMANDS.items()]
    return "\n".join(["usage: looptape <command> …", "", *lines, "", "looptape <command> --help explains one of them."])


def _asks_for_help(arguments):
    return bool(set(_HELP) & set(arguments))


def _explain(usage, command, *further):
    print("\n".join([f"usage: looptape {usage}", "", _wrapped("", f"It {command.__doc__}.", 0), *further]))
    return 0


def _wrapped(first, text, indent):
    """A text of at most 80 columns that begins with `first`; further lines are indented."""
    return textwrap.fill(text, 80, initial_indent=first, subsequent_indent=" " * indent)


def _refuse(problem):
    print(f"looptape: {problem}", file=sys.stderr)
    return 2
