"""The report: one file, no network, what was logged; read back from event files with known values."""

import base64
import html
import json
import re
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from tensorboard.compat.proto import summary_pb2

from looptape.dashboard import events, health_rows, metadata, report
from looptape.dashboard.rules import explanations, findings
from looptape.dashboard.server import binning
from tests.dashboard.event_files import RunWriter, state_rows

TIME = 40
STEPS = [50 * (row + 1) for row in range(12)]


def write_run(workdir, *, decay, layers=("lstm",), rows=12, time=TIME, loss=0.17, flags=None):
    with RunWriter(workdir / "train") as writer:
        for index, layer in enumerate(layers):
            values = state_rows(rows, time, decay=decay, seed=index)
            for row in range(rows):
                writer.row(50 * (row + 1), layer, {"state": values[row]})
        for step in range(10, 50 * rows, 10):
            writer.write(step, [summary_pb2.Summary.Value(tag="loss/total", simple_value=loss)])
    (workdir / "config.json").write_text(json.dumps({"config": {"cell": "lstm", "steps": 600, **(flags or {})}}))
    (workdir / "results.json").write_text(json.dumps({"results": {"error": 0.125}}))
    return workdir


def decode(picture):
    """Palette indices of a PNG picture without filters."""
    width, height = struct.unpack(">II", picture[16:24])
    start = picture.index(b"IDAT") + 4
    (length,) = struct.unpack(">I", picture[start - 8 : start - 4])
    lines = np.frombuffer(zlib.decompress(picture[start : start + length]), np.uint8).reshape(height, width + 1)
    return lines[:, 1:]


def test_the_page_says_what_the_runs_did_and_needs_no_network(tmp_path):
    runs = [
        write_run(tmp_path / "healthy", decay=0.0, flags={"cell": "gru"}),
        write_run(tmp_path / "vanishing", decay=1.0),
    ]
    page = report.report(runs, tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "lstm reaches back 2 of 40 time steps" in page or "lstm reaches back 3 of 40 time steps" in page
    assert "lstm reaches back 40 of 40 time steps, unchanged since step 50, loss flat." in page
    assert "error 0.125" in page and "<td>0.17</td>" in page
    differing = page[page.index("Flags that differ") : page.index("</table>", page.index("Flags that differ"))]
    assert "cell" in differing and "steps" not in differing
    assert not re.search(r"(src|href)='(?!data:|#)|https?://|<script|@import|url\(", page)


def test_maps_show_what_was_logged(tmp_path):
    workdir = tmp_path / "run"
    with RunWriter(workdir / "train") as writer:
        writer.row(10, "lstm", {"state": [1e-9, 1e-6, 1e-3, 1]})
        writer.row(20, "lstm", {"state": [0, np.nan, 5, 5]}, valid=[True, True, True, False])
    page = report.render([workdir])
    (picture,) = re.findall(r"base64,([^']+)", page)
    shades = report.SHADES
    vanished, missing, bad = shades, shades + 1, shades + 2
    # The newest row is on top.
    expected = [[vanished, bad, shades - 1, missing], [vanished, 0, round((shades - 1) / 2), shades - 1]]
    found = decode(base64.b64decode(picture)).astype(int)
    assert np.abs(found - expected).max() <= 1 and (found[0] == expected[0]).all()


def test_ten_runs_of_six_layers_stay_below_two_megabytes(tmp_path):
    layers = [f"layer{index}" for index in range(6)]
    run = write_run(tmp_path / "run", decay=0.1, layers=layers, rows=120, time=400)
    path = report.report([run] * 10, tmp_path / "report.html")
    assert path.stat().st_size < 2_000_000


def test_names_become_text(tmp_path):
    workdir = write_run(tmp_path / "<b>run'&", decay=0.0, layers=("<script>alert(1)</script>'",), flags={"<i>": "<u>'"})
    page = report.render([workdir])
    assert "<script" not in page and "<b>run" not in page and "<i>" not in page and "<u>" not in page


def test_event_files_are_read_as_written(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        for step in (1, 2, 3):
            writer.row(step, "lstm", {"state": [step, np.nan, 9]}, valid=[True, True, False])
        writer.write(3, [summary_pb2.Summary.Value(tag="loss/error", simple_value=0.5)])
    with RunWriter(tmp_path / "run", index=1) as writer:
        writer.row(3, "lstm", {"state": [30, 1, 9]})
        writer.row(4, "lstm", {"state": [40, 1, 9]})
    path = writer.path
    path.write_bytes(path.read_bytes()[:-10])  # as after a crash
    run = events.read_run(tmp_path / "run")
    rows = run.layers["lstm"]["state"]
    assert rows.steps.tolist() == [1, 2, 3]
    assert rows.values[:, 0].tolist() == [1, 2, 30]
    assert metadata.decode_row(rows.values)[1].tolist() == [[True, True, False]] * 2 + [[True, True, True]]
    assert events.total_losses(run) == {"": ((3,), (0.5,))}
    assert binning.valid(rows.values).sum() == 7


def test_a_directory_without_runs_is_named(tmp_path, capsys):
    with pytest.raises(ValueError, match="holds no event files.*Give the `workdir` of a run"):
        report.render([tmp_path])
    with pytest.raises(ValueError, match="`workdirs` is empty"):
        report.render([])
    assert report.main([str(tmp_path), "-o", str(tmp_path / "report.html")]) == 1
    assert "holds no event files" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_the_command_needs_no_tensorflow(tmp_path):
    run = write_run(tmp_path / "run", decay=0.0)
    code = (
        "import sys; sys.modules['tensorflow'] = sys.modules['keras'] = None\n"
        "from looptape.dashboard import report; sys.exit(report.main(sys.argv[1:]))"
    )
    output = tmp_path / "page.html"
    done = subprocess.run([sys.executable, "-c", code, str(run), "-o", str(output)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "MB" in done.stdout and output.exists()


def test_a_notebook_shows_the_page_in_a_frame(tmp_path):
    run = write_run(tmp_path / "run", decay=0.0)
    made = report.Report([run])
    shown = made._repr_html_()
    assert shown.startswith("<iframe") and shown.count("<iframe") == 1
    inner = re.search(r'srcdoc="([^"]*)"', shown).group(1)
    assert html.unescape(inner) == made.html == report.render([run])
    assert made.save(tmp_path / "a" / "page.html").read_text(encoding="utf-8") == made.html


def test_every_word_is_explained_where_its_link_leads(tmp_path):
    page = report.render([write_run(tmp_path / "vanishing", decay=1.0)])
    assert "href='#why-vanishing'" in page and "<section id='why-vanishing'>" in page
    assert "An LSTM: give the forget gate a bias of about log T" in page and "why-exploding" not in page, (
        "only what is in the page"
    )
    assert set(explanations.WHY) == set(findings.WORDS)
    everything = explanations.page()
    assert all(f"id='{explanations.anchor(word)}'" in everything for word in findings.WORDS)


def test_models_without_a_loop_have_a_map_and_losses_of_any_size_are_told_apart(tmp_path):
    """Two runs whose losses differ by a factor of 100,000; the small one is not drawn as a line at 0."""
    names = ["dense/kernel", "head/kernel"]
    for name, size in (("large", 1000.0), ("small", 0.01)):
        with RunWriter(tmp_path / name / "train") as writer:
            for step in (10, 20, 30):
                rows = {"ratio": np.array([1e-3, 0.0]), "weight": np.ones(2)}
                values = [health_rows.summary(quantity, row, names) for quantity, row in rows.items()]
                writer.write(step, [*values, summary_pb2.Summary.Value(tag="loss/error", simple_value=size / step)])
    page = report.render([tmp_path / "large", tmp_path / "small"])
    assert page.count("layers from the top: dense, head.") == 4, "caption and label of two maps"
    assert ">log</text>" in page
    drawn = re.findall(r"<path d='(M[^V]+?)' fill", page)
    large, small = ([float(y) for y in re.findall(r"[ML][0-9.]+ ([0-9.]+)", path)] for path in drawn)
    assert large[0] < large[-1] < small[0] < small[-1] and small[-1] - small[0] > 5, "both fall visibly"
