"""One self-contained HTML page about finished or running runs: verdicts, maps, curves, flags, results.

    looptape report runs/a runs/b -o report.html

The page needs no network and no server. Verdicts are those of `verdicts`; maps are relative to the largest value of
their row, from 1 down to 1e-6, grey below it.
"""

import argparse
import base64
import html
import json
import math
import pathlib
import struct
import sys
import zlib

import numpy as np

from looptape.dashboard import events, layer_tables
from looptape.dashboard.rules import explanations, logged_run
from looptape.dashboard.server import binning

MAX_ROWS, MAX_COLUMNS, MAX_POINTS = 100, 200, 300
LOWEST = -6.0  # log10 of what still has a colour
SHADES = 64
VIRIDIS = ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725")
RUN_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#b8589a", "#c68a00", "#3a9fe0"),
    *("#6b6f76", "#8a7a00", "#7a3fb8", "#8c2d04", "#00a5a5", "#e0619b"),
)
DASHES = ("", "6 3", "2 3")  # of lines, where there are more of them than colours
BALANCE = ("08306b", "2171b5", "9ecae1", "f3f3f3", "fdbe85", "e6550d", "7f2704")
TONES = {"bad": "#d1242f", "warn": "#d98a00", "good": "#1a9c5b", "none": "#7d8590"}
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1f2328; max-width: 1100px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 22px; } h2 { font-size: 17px; margin: 28px 0 6px; overflow-wrap: anywhere; } h3 { font-size: 14px; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: 3px 10px 3px 0; text-align: left;
border-bottom: 1px solid #dde2e8; overflow-wrap: anywhere; vertical-align: top; } th { white-space: nowrap; }
td:first-child { min-width: 70px; } .maps { display: flex; flex-wrap: wrap; gap: 18px; }
figure { margin: 0; } figcaption { font-size: 12px; color: #59626d; max-width: 340px; } svg { max-width: 100%; }
img { width: 340px; image-rendering: pixelated; border: 1px solid #b9c0c9; background: #fff; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 6px; }
.try { color: #59626d; } a { color: inherit; } .overview td:nth-child(3) { white-space: nowrap; }
@media (max-width: 640px) { table, tbody, tr, th, td { display: block; } .overview tr:first-child { display: none; }
tr { padding: 5px 0; border-bottom: 1px solid #dde2e8; } th, td { border: 0; padding: 1px 0; white-space: normal; }
img { width: 100%; } }
"""


class Report:
    """The page, as a notebook shows it.

    Args:
        workdirs: directories of runs, as in `report`.
    """

    def __init__(self, workdirs):
        self.html = render(workdirs)

    def save(self, path):
        """Writes the page to one HTML file; an existing one is replaced. Returns its path."""
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self):
        # In a frame of its own: the page's style does not reach the notebook, nor the notebook's the page.
        page = html.escape(self.html, quote=True)
        return f'<iframe title="Looptape report" srcdoc="{page}" style="width:100%;height:640px;border:0"></iframe>'


def report(workdirs, path):
    """Writes the page about `workdirs` to `path` and returns its path.

    Args:
        workdirs: directories as given to `fit(workdir=…)`, each with event files in `train` or in itself.
        path: the HTML file to write; an existing one is replaced.
    """
    return Report(workdirs).save(path)


def render(workdirs):
    """Returns the page as text. Raises ValueError for a directory without event files."""
    workdirs = [pathlib.Path(workdir) for workdir in workdirs]
    if not workdirs:
        raise ValueError("`workdirs` is empty; a report needs at least one run. Give the directories of your runs.")
    runs = [_read(workdir) for workdir in workdirs]
    names = [run["name"] for run in runs]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Looptape report</title>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<style>{STYLE}</style></head><body><main><h1>{html.escape(', '.join(names))}</h1>",
        _overview(runs),
        "<h2>Loss</h2>",
        _curves(
            [(_of(run["name"], name), loss) for run in runs for name, loss in run["losses"].items()], fits_log=True
        ),
        _flags(runs),
    ]
    parts += [_run_section(run) for run in runs]
    words = {finding.word for run in runs for finding in run["findings"]}
    if words:
        parts += ["<h2>Why, and what to do</h2>", explanations.sections(words)]
    return "\n".join([*parts, "</main></body></html>\n"])


def main(arguments=None):
    """The command `looptape report`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="looptape report", description="Writes one HTML page about runs.")
    parser.add_argument("workdirs", nargs="+", help="directories of runs")
    parser.add_argument("-o", "--output", default="report.html", help="the file to write (report.html)")
    options = parser.parse_args(arguments)
    try:
        path = report(options.workdirs, options.output)
    except (ValueError, OSError) as error:
        print(f"looptape report: {error}", file=sys.stderr)
        return 1
    print(f"{path} ({path.stat().st_size / 1e6:.2f} MB)")
    return 0


def _read(workdir):
    train = workdir / "train" if any((workdir / "train").glob("events.out.tfevents.*")) else workdir
    if not any(train.glob("events.out.tfevents.*")):
        raise ValueError(
            f"{str(workdir)!r} holds no event files, neither in itself nor in `train`. Give the `workdir` of a run."
        )
    run = events.read_run(train)
    config = _json(workdir / "config.json")
    return {
        "name": workdir.name or str(workdir),
        "layers": run.layers,
        "losses": events.total_losses(run),
        "updates": layer_tables.updates(run.health),
        "findings": logged_run.findings(
            run.layers, run.scalars, run.health, run.cells, run.backward, run.positions, run.shares
        ),
        "config": config.get("config", config),
        "results": _json(workdir / "results.json").get("results", {}),
    }


def _json(path):
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _overview(runs):
    lines = ["<table class='overview'><tr><th>run</th><th>verdict</th><th>last loss</th><th>results</th></tr>"]
    for run in runs:
        said = "".join(_sentence(finding) for finding in run["findings"]) or "nothing to judge was logged"
        last = "<br>".join(html.escape(f"{n} ".lstrip()) + _number(v[-1]) for n, (_, v) in run["losses"].items()) or "–"
        results = ", ".join(f"{html.escape(str(k))} {_number(v)}" for k, v in run["results"].items()) or "–"
        lines.append(f"<tr><td>{html.escape(run['name'])}</td><td>{said}</td><td>{last}</td>")
        lines.append(f"<td>{results}</td></tr>")
    return "\n".join([*lines, "</table>"])


def _of(run, minimizer):
    """The name of a loss: that of the run, and of the minimizer where it is not the trainer's own."""
    return f"{run}: {minimizer}" if minimizer else run


def _sentence(finding):
    advice = f" <span class='try'>Try: {html.escape(finding.advice)}</span>" if finding.advice else ""
    dot = f"<span class='dot' style='background:{TONES[finding.tone]}'></span>"
    word = f"<a href='#{explanations.anchor(finding.word)}'><b>{html.escape(finding.word)}</b></a>"
    return f"<div>{dot}{word} {html.escape(finding.text)}{advice}</div>"


def _flags(runs):
    """The flags that differ, as a table; all of each run are in its own section."""
    names = sorted({name for run in runs for name in run["config"]})
    texts = {name: [_flag(run["config"][name]) if name in run["config"] else "" for run in runs] for name in names}
    varied = [name for name in names if len(set(texts[name])) > 1]
    if not varied:
        return ""
    head = "".join(f"<th>{html.escape(run['name'])}</th>" for run in runs)
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{html.escape(text)}</td>' for text in texts[name])}</tr>"
        for name in varied
    )
    return f"<h2>Flags that differ</h2><table><tr><th>flag</th>{head}</tr>{rows}</table>"


def _flag(value):
    return value if isinstance(value, str) and value else json.dumps(value)


def _run_section(run):
    parts = [f"<h2>{html.escape(run['name'])}</h2>"]
    figures = []
    for layer, quantities in run["layers"].items():
        if "state" in quantities and quantities["state"].values.size:
            figures.append(_map(layer, quantities["state"]))
    if run["updates"]:
        figures.append(_update_map(run["updates"]))
    if figures:
        parts.append(f"<div class='maps'>{''.join(figures)}</div>")
    curves = [
        (finding.layer, (finding.steps, [math.nan if h is None else h for h in finding.horizons]))
        for finding in run["findings"]
        if len(finding.horizons) > 1
    ]
    if curves:
        parts += ["<h3>Horizon, in time steps</h3>", _curves(curves)]
    if run["config"]:
        rows = "".join(
            f"<tr><td>{html.escape(str(name))}</td><td>{html.escape(json.dumps(value))}</td></tr>"
            for name, value in run["config"].items()
        )
        parts.append(f"<details><summary>All flags</summary><table>{rows}</table></details>")
    return "\n".join(parts)


def _map(layer, rows):
    values = binning.normalise_largest(rows.values)
    drawn = binning.picture(values, max_rows=MAX_ROWS)
    width = -(-drawn.codes.shape[1] // MAX_COLUMNS)
    codes = np.maximum.reduceat(drawn.codes, np.arange(0, drawn.codes.shape[1], width), axis=1)
    picture = png(_indices(codes, drawn.low, drawn.high)[::-1], palette())
    steps, time = rows.steps, rows.values.shape[1]
    caption = (
        f"{layer}: state gradient relative to the largest of its row, 1 (yellow) to 1e-6 (violet), below it grey, "
        f"NaN and Inf red. Time steps 0 to {time - 1} to the right, training steps {steps[0]:,} to {steps[-1]:,} up."
    )
    return _figure(picture, caption, 180)


def _update_map(table):
    """‖ΔW‖ / ‖W‖ of each layer over training, as the tab colours it; layers are named in the caption."""
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes = np.log10(np.array([[math.nan if v is None else v for v in row] for row in table["values"]]))
    below, above = np.clip((-4 - sizes) / 3, 0, 1), np.clip((sizes + 2) / 2, 0, 1)
    step = (SHADES - 1) / 2
    indices = np.where(below > 0, step * 0.8 * (1 - below), np.where(above > 0, step * (1.2 + 0.8 * above), step))
    indices = np.where(np.isnan(sizes), SHADES + 1, np.where(np.isneginf(sizes), SHADES, np.round(indices)))
    steps, layers = table["steps"], table["layers"]
    height = max(60, min(180, 14 * len(layers)))
    caption = (
        "How far an update moves each layer, ‖ΔW‖ / ‖W‖: neutral from 1e-4 to 1e-2, blue below (it hardly learns), "
        f"orange above (steps too large), grey 0. Training steps {steps[0]:,} to {steps[-1]:,} to the right; layers "
        f"from the top: {', '.join(layers)}."
    )
    return _figure(png(indices.astype(np.uint8), palette(BALANCE)), caption, height)


def _figure(picture, caption, height):
    source = base64.b64encode(picture).decode()
    return (
        f"<figure><img alt='{html.escape(caption, quote=True)}' src='data:image/png;base64,{source}' "
        f"style='height:{height}px'><figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _indices(codes, low, high):
    """Palette indices: 0 … SHADES − 1 from 1e-6 to 1, then vanished, no data, NaN or Inf."""
    result = np.full(codes.shape, SHADES, dtype=np.uint8)
    if low is not None:
        numbers = low + (codes.astype(np.float64) - binning.FIRST) * (high - low) / (binning.LAST - binning.FIRST)
        shade = np.round((numbers - LOWEST) / -LOWEST * (SHADES - 1)).clip(0, SHADES - 1).astype(np.uint8)
        usable = (codes >= binning.FIRST) & (codes <= binning.LAST) & (numbers >= LOWEST)
        result[usable] = shade[usable]
    result[codes == binning.PADDING] = SHADES + 1
    result[codes >= binning.INF] = SHADES + 2
    return result


def palette(colours=VIRIDIS):
    """Returns [SHADES + 3, 3] colours: shades between those given, then vanished, no data, NaN or Inf."""
    points = np.array([[int(colour[i : i + 2], 16) for i in (0, 2, 4)] for colour in colours], dtype=np.float64)
    at = np.linspace(0, len(points) - 1, SHADES)
    shades = np.stack([np.interp(at, np.arange(len(points)), points[:, i]) for i in range(3)], axis=1)
    special = [[0xB9, 0xBE, 0xC6], [0xFF, 0xFF, 0xFF], [0xE5, 0x00, 0x7D]]
    return np.concatenate([np.round(shades), special]).astype(np.uint8)


def png(indices, colours):
    """Returns the bytes of a PNG picture of palette indices [height, width]; `colours` is [at most 256, 3]."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width = indices.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), indices.astype(np.uint8)], axis=1).tobytes()
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            chunk(b"PLTE", colours.tobytes()),
            chunk(b"IDAT", zlib.compress(lines, 9)),
            chunk(b"IEND", b""),
        ]
    )


def _curves(named, fits_log=False):
    """An inline SVG of [(name, (steps, values))], thinned to `MAX_POINTS`; NaN breaks a line.

    With `fits_log` the axis is logarithmic if all values are positive and the largest is 20 times the smallest.
    """
    width, height, left, bottom = 700, 200, 60, 24
    series = [(name, np.asarray(s, np.float64), np.asarray(v, np.float64)) for name, (s, v) in named]
    finite = [values[np.isfinite(values)] for _, _, values in series]
    numbers = np.concatenate(finite) if finite else np.zeros(0)
    if not numbers.size:
        return "<p>Nothing to draw.</p>"
    logarithmic = fits_log and numbers.min() > 0 and numbers.max() > 20 * numbers.min()
    low, high = float(numbers.min()) if logarithmic else min(0.0, float(numbers.min())), float(numbers.max())
    scale = np.log10 if logarithmic else np.asarray
    first, last = min(s[0] for _, s, _ in series), max(s[-1] for _, s, _ in series)
    lines, keys = [], []
    for index, (name, steps, values) in enumerate(series):
        colour = RUN_COLOURS[index % len(RUN_COLOURS)]
        kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_POINTS)).round().astype(int))
        x = left + (steps[kept] - first) / max(last - first, 1) * (width - left - 8)
        share = (scale(values[kept]) - scale(low)) / max(scale(high) - scale(low), 1e-30)
        y = height - bottom - share * (height - bottom - 8)
        path, pen = [], "M"
        for here, there in zip(x, y, strict=True):
            if math.isfinite(there):
                path.append(f"{pen}{here:.1f} {there:.1f}")
            pen = "L" if math.isfinite(there) else "M"
        dash = DASHES[index // len(RUN_COLOURS) % len(DASHES)]
        style = f"stroke='{colour}' stroke-width='1.6' stroke-dasharray='{dash}'"
        lines.append(f"<path d='{''.join(path)}' fill='none' {style}/>")
        keys.append(f"<span class='dot' style='background:{colour}'></span>{html.escape(str(name))} &nbsp; ")
    axis = f"<text x='{left - 6}' y='28' text-anchor='end'>log</text>" if logarithmic else ""
    label = html.escape("Curves of " + ", ".join(str(name) for name, _, _ in series), quote=True)
    marks = (
        f"<path d='M{left} 8V{height - bottom}H{width - 8}' fill='none' stroke='#b9c0c9'/>"
        f"<text x='{left - 6}' y='14' text-anchor='end'>{_number(high)}</text>"
        f"<text x='{left - 6}' y='{height - bottom}' text-anchor='end'>{_number(low)}</text>"
        f"<text x='{left}' y='{height - 6}'>step {first:,.0f}</text>"
        f"<text x='{width - 8}' y='{height - 6}' text-anchor='end'>{last:,.0f}</text>"
    )
    picture = (
        f"<svg viewBox='0 0 {width} {height}' width='{width}' role='img' aria-label='{label}' font-size='11' "
        f"fill='#59626d'>{marks}{axis}{''.join(lines)}</svg>"
    )
    return f"<div>{''.join(keys)}</div>{picture}"


def _number(value):
    return f"{value:.4g}" if isinstance(value, int | float) else html.escape(str(value))


if __name__ == "__main__":
    sys.exit(main())
