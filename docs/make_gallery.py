"""Makes the gallery's notebooks and the table of docs/gallery.md.

python -m docs.make_gallery table                writes the table again, with the line counts of today
python -m docs.make_gallery times [name …]       measures the time per update, interleaved, and writes the table
python -m docs.make_gallery notebooks [name …]   runs the scripts as notebooks; needs the extra `notebooks`
"""

import ast
import importlib
import os
import pathlib
import re
import runpy
import statistics
import sys
import tempfile
import time
import types

from looptape import _quiet

HERE = pathlib.Path(__file__).parent / "gallery"
PAGE = HERE.parent / "gallery.md"
ROUNDS, UPDATES = 5, 100
ROW = re.compile(r"^\| \[(.*?)\]\(gallery/(\w+)\.py\) \| (.*?) \| (.*?) \| \d+ / \d+ \| (.*?) \| (.*?) \|$", re.M)


def names():
    """The examples, sorted."""
    return sorted(path.stem for path in HERE.glob("*.py"))


def script(name):
    return HERE / f"{name}.py"


def network(original):
    """What an original trains: the model itself, or its part that the script's `make_model` made."""
    for attribute in ("network", "pair", "student", "encoder", "denoiser"):
        if hasattr(original, attribute):
            return getattr(original, attribute)
    return original


def shortened(source, constants):
    """A script's source with other values of the constants at its top."""
    for name, value in constants.items():
        source, count = re.subn(rf"^{name} = [^#\n]*", f"{name} = {value}", source, flags=re.M)
        if count != 1:
            raise ValueError(f"{name} is assigned {count} times; it must be once, at the top of the script.")
    return source


# ---- Lines.


def lines(name):
    """(ours, the original's): lines that define and build the training. Model, data and blank lines do not count."""
    return _size(script(name), _is_training), _size(HERE / "by_hand" / f"{name}.py", _is_defined) - 2


def _size(path, counts):
    """Lines that are not blank, of the statements that count."""
    text = path.read_text()
    found = [ast.get_source_segment(text, node) for node in ast.parse(text).body if counts(node)]
    return sum(bool(line.strip()) for source in found for line in source.splitlines())


def _is_training(node):
    if isinstance(node, ast.ClassDef):
        return "Trainer" in map(ast.unparse, node.bases)
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in ("trainer", "first", "optimizers")
    return isinstance(node, ast.FunctionDef) and node.name == "trainer_of"


def _is_defined(node):
    """Everything but imports; `def compiled` and its `return`, two lines, belong to the test."""
    return isinstance(node, ast.ClassDef | ast.FunctionDef)


# ---- Times.


def times(name):
    """(ours, the original's) in milliseconds per update: medians of interleaved rounds in one process."""
    import matplotlib

    matplotlib.use("Agg")
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / f"{name}.py"
        path.write_text(shortened(script(name).read_text(), {"STEPS": 10}))
        made = types.SimpleNamespace(**runpy.run_path(str(path)))
        original = importlib.import_module(f"docs.gallery.by_hand.{name}").compiled(made)
        data = made.make_data().repeat()
        found = [], []
        for round_ in range(ROUNDS + 1):  # the first one traces
            start = time.perf_counter()
            made.trainer.fit(data, steps=int(made.trainer.step) + UPDATES, log_every=UPDATES, progress=False)
            middle = time.perf_counter()
            original.fit(data, steps_per_epoch=UPDATES, shuffle=False, verbose=0)
            end = time.perf_counter()
            if round_:
                found[0].append(middle - start)
                found[1].append(end - middle)
    return tuple(1000 * statistics.median(seconds) / UPDATES for seconds in found)


# ---- The table.


def write_table(measured=None):
    """Writes line counts, and times where they were measured, into the rows of the page."""

    def row(match):
        title, name, shows, original, time_, equal = match.groups()
        ours, theirs = lines(name)
        if name in (measured or {}):
            time_ = "{:.2g} / {:.2g} ms".format(*measured[name])
        return f"| [{title}](gallery/{name}.py) | {shows} | {original} | {ours} / {theirs} | {time_} | {equal} |"

    PAGE.write_text(ROW.sub(row, PAGE.read_text()))


# ---- Notebooks.


def cells(source):
    """[(kind, text)] of a script in the percent format, as editors and Jupytext read it."""
    found = []
    for part in re.split(r"^# %%", source, flags=re.M)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            found.append(("markdown", "\n".join(line.removeprefix("#").removeprefix(" ") for line in _lines(body))))
        else:
            found.append(("code", "\n".join(_lines(body))))
    return found


def _lines(body):
    return body.strip("\n").rstrip().splitlines()


def notebook(name):
    """A notebook of the script, not run yet."""
    import nbformat

    kinds = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    made = [kinds[kind](text, id=f"cell-{i}") for i, (kind, text) in enumerate(cells(script(name).read_text()))]
    language = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=made, metadata=language)


def write_notebook(name):
    """Runs a script as a notebook and writes it with its outputs."""
    import nbclient
    import nbformat

    made = notebook(name)
    os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)
    nbclient.NotebookClient(made, timeout=600, kernel_name="python3", record_timing=False).execute()
    made.metadata.pop("language_info", None)
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_harmless(output)]
    nbformat.write(made, HERE / "notebooks" / f"{name}.ipynb")


def _is_harmless(output):
    """Whether an output is only what TensorFlow writes on some machines without a reason to worry."""
    known = output["output_type"] == "stream" and output["name"] == "stderr"
    return known and all(_quiet.is_harmless(line) for line in "".join(output["text"]).splitlines())


def main(arguments):
    task, *chosen = arguments or ["table"]
    if task == "table":
        write_table()
    elif task == "times":
        measured = {}
        for name in chosen or names():
            measured[name] = times(name)
            print(name, *(f"{value:.3g}" for value in measured[name]), "ms", flush=True)
        write_table(measured)
    elif task == "notebooks":
        for name in chosen or names():
            write_notebook(name)
            print(name, flush=True)
    else:
        raise SystemExit(f"{task!r} was given; it must be table, times or notebooks. See the top of {__file__}.")


if __name__ == "__main__":
    main(sys.argv[1:])
