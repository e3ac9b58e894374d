"""Draws the map of the packages from their imports: docs/pictures/modules.png.

python -m docs.make_map
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "how-it-works.md"
PACKAGES = ("losses", "dashboard", "trainer", "models", "experiments")


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["looptape", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def modules(package):
    """{module: path} of a package."""
    return {name_of(path): path for path in sorted((ROOT / package).rglob("*.py"))}


def imports(path, known):
    """The modules among `known` that a file imports at its top level."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in whole.values()}
    own = name_of(path)
    return {name for name in found if name in known and name != own}


def package_edges():
    """{package: packages that it imports}."""
    edges = {}
    for package in PACKAGES:
        found = set()
        for path in modules(package).values():
            found |= {name.removeprefix("looptape.").split(".")[0] for name in imports_anywhere(path)}
        edges[package] = {name for name in found if name in PACKAGES and name != package}
    return edges


def imports_anywhere(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layers(package):
    """[[module, …], …]: each imports only from the layers before. A loop of imports is an error."""
    known = modules(package)
    needs = {name: imports(path, known) for name, path in known.items()}
    for name in list(needs):  # a package's `__init__` names its parts; that is not an edge of the map
        if known[name].name == "__init__.py" and name == f"looptape.{package}":
            del needs[name]
    placed, result = set(), []
    while len(placed) < len(needs):
        ready = sorted(name for name, own in needs.items() if name not in placed and own & needs.keys() <= placed)
        if not ready:
            raise ValueError(f"These modules import each other in a circle: {sorted(needs.keys() - placed)}.")
        placed |= set(ready)
        result.append(ready)
    return result


def draw(path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = {"losses": (0, 0), "dashboard": (2, 0), "trainer": (1, 1), "models": (1, 2), "experiments": (1, 3)}
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for package, targets in package_edges().items():
        for target in targets:
            (x, y), (u, v) = places[package], places[target]
            bend = 0.0 if abs(y - v) == 1 else (0.3 if u < x else -0.9)
            style = {"arrowstyle": "-|>", "color": "0.45", "shrinkA": 30, "shrinkB": 30 if u == x else 48}
            axes.annotate("", (u, v), (x, y), arrowprops={**style, "connectionstyle": f"arc3,rad={bend}"})
    for package, (x, y) in places.items():
        box = {"boxstyle": "round,pad=0.5", "facecolor": "#eaf2f8", "edgecolor": "#0072B2"}
        axes.text(x, y, package, ha="center", va="center", bbox=box)
    axes.set_xlim(-0.6, 2.6)
    axes.set_ylim(-0.4, 3.4)
    axes.axis("off")
    figure.savefig(path, dpi=120)


def main():
    draw(ROOT / "docs" / "pictures" / "modules.png")


if __name__ == "__main__":
    main()
