"""Lists checkpoints: looptape checkpoints <work directory, or its `checkpoints`> [--contents]"""

import os
import sys
import time

from looptape.trainer.checkpoints.store import DAMAGED, PREFIX, REPLACED, TEMPORARY, Store, read_manifest, verify


def report(directory, contents=False):
    """The lines to print about a directory of checkpoints. Nothing is moved or removed."""
    names = sorted(os.listdir(directory))
    store = Store(directory)
    found, best = store.names(), store.best()
    lines = [f"{len(found)} checkpoints in {directory}"]
    good = None
    for name in found:
        path = os.path.join(directory, name)
        problem = verify(path)
        good = good if problem else path
        lines.append("  " + (f"{name}  DAMAGED: {problem}" if problem else _line(path, name == best)))
    for name in names:
        if name.startswith(DAMAGED):
            lines.append(f"  {name}  was found damaged and set aside; delete it, or look into it")
        if name.startswith((TEMPORARY, REPLACED)):
            lines.append(f"  {name}  was being written when the process died; the next start removes it")
    if good is None:
        return lines, False
    lines += ["", f"{os.path.basename(good)} holds:", *_contents(read_manifest(good), contents)]
    return lines, True


def _line(path, best):
    manifest = read_manifest(path)
    size = sum(size for size, _ in manifest["files"].values())
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.path.getmtime(path)))
    score = "" if manifest["score"] is None else f"  score {manifest['score']:.6g}" + (" (best)" if best else "")
    return f"{os.path.basename(path)}  good  {size / 1e6:9.2f} MB  {saved}{score}"


def _contents(manifest, all_of_them):
    """Number of variables and values in each section; with `all_of_them` each variable."""
    sections = {}
    for key, content in manifest["contents"].items():
        if "format" in manifest:
            section, _, path = key.partition("/")
        else:  # format 1 numbers the variables
            section, path = key.rpartition("_")[0] or key, manifest["names"][key]
        sections.setdefault(section, []).append((path, content))
    lines = []
    for section, items in sections.items():
        values = sum(_count(content[0]) for _, content in items if isinstance(content, list))
        lines.append(f"  {section:12} {len(items):5} × {f'{values:,} values' if values else items[0][1]}")
        if all_of_them:
            lines += [f"    {path}  {content}" for path, content in items]
    host = {name: value for name, value in manifest["host"].items() if isinstance(value, int | float | str)}
    return [*lines, "  host         " + ", ".join(f"{name} {value}" for name, value in host.items())]


def _count(shape):
    product = 1
    for size in shape:
        product *= size
    return product


def main(arguments):
    contents = "--contents" in arguments
    paths = [argument for argument in arguments if argument != "--contents"]
    if len(paths) != 1:
        print(f"{paths} was given; exactly one directory is needed. {__doc__}", file=sys.stderr)
        return 2
    directory = paths[0]
    below = os.path.join(directory, "checkpoints")
    directory = below if os.path.isdir(below) else directory
    if not os.path.isdir(directory) or not any(PREFIX in name or TEMPORARY in name for name in os.listdir(directory)):
        print(f"{directory} has no checkpoints. Give the `workdir` of a run.", file=sys.stderr)
        return 2
    lines, good = report(directory, contents)
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
