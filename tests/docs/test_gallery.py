"""Every script of the gallery runs, and trains the weights that its original trains; the page's table is true."""

import importlib
import json
import types

import matplotlib
import numpy as np
import pytest

from docs import make_gallery

SMALL = {
    "actor_critic": {"EPISODES": 2, "LENGTH": 6, "UNITS": 4},
    "addition": {"BATCH": 4, "UNITS": 4},
    "contrastive_pairs": {"BATCH": 8, "UNITS": 4},
    "dcgan": {"BATCH": 8, "FILTERS": 2, "LATENT": 2},
    "diffusion": {"BATCH": 4, "UNITS": 4},
    "distillation": {"BATCH": 4, "TEACHER_UNITS": 4, "STUDENT_UNITS": 3},
    "next_frame": {"BATCH": 2, "FILTERS": 2, "FRAMES": 3, "SIDE": 8},
    "transfer_learning": {"FILTERS": 2},
    "transformer": {"BATCH": 4, "LENGTH": 5, "WIDTH": 4},
    "variational_autoencoder": {"BATCH": 4, "UNITS": 4, "SIDE": 8},
    "weather": {"BATCH": 4, "UNITS": 4, "PAST": 6},
    "wgan_gp": {"BATCH": 4, "UNITS": 4, "LATENT": 2},
}
STEPS = 4
# All others are equal bit for bit. The norm that gradients are clipped to is summed in another order; layers in the
# hoisted form are equal to 1e-6.
ROUNDING = {
    "transformer": {"rtol": 1e-3, "atol": 1e-4},
    "addition": {"rtol": 1e-5, "atol": 1e-6},
    "weather": {"rtol": 1e-5, "atol": 1e-6},
}


def run(name, tmp_path, **constants):
    """The names of a script that ran with small sizes."""
    matplotlib.use("Agg")
    source = make_gallery.script(name).read_text()
    source = make_gallery.shortened(source, {"STEPS": STEPS, **SMALL[name], **constants})
    path = tmp_path / f"{name}.py"  # a real file, whose source AutoGraph can read
    path.write_text(source)
    space = {"__name__": name}
    exec(compile(source, str(path), "exec"), space)
    return types.SimpleNamespace(**space)


# The others are long tests.
QUICK = {"addition", "variational_autoencoder", "wgan_gp"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in make_gallery.names()]
)
def test_a_script_trains_the_weights_of_its_original(name, tmp_path, capsys):
    script = run(name, tmp_path)
    assert capsys.readouterr().out
    ours = [np.array(value) for value in script.trainer.model.get_weights()]
    steps = int(script.trainer.step)
    original = importlib.import_module(f"docs.gallery.by_hand.{name}").compiled(script)
    network = make_gallery.network(original)
    before = network.get_weights()
    data = script.make_data().take(steps).cache()  # Keras looks at a batch before it begins
    original.fit(data.repeat(), steps_per_epoch=steps, shuffle=False, verbose=0)
    assert any(np.any(a != b) for a, b in zip(before, network.get_weights(), strict=True))
    for one, other in zip(ours, network.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, **ROUNDING.get(name, {"rtol": 0, "atol": 0}))


def test_the_table_has_every_example_and_its_lines():
    rows = {match[2]: match[0] for match in make_gallery.ROW.finditer(make_gallery.PAGE.read_text())}
    assert sorted(rows) == make_gallery.names() == sorted(SMALL)
    for name, row in rows.items():
        ours, theirs = make_gallery.lines(name)
        assert f"| {ours} / {theirs} |" in row, f"{name}: run `python -m docs.make_gallery table`"
        assert ("equal bits" in row) == (name not in ROUNDING)


@pytest.mark.parametrize("name", make_gallery.names())
def test_the_notebook_is_that_of_the_script(name):
    cells = json.loads((make_gallery.HERE / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    found = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    assert found == make_gallery.cells(make_gallery.script(name).read_text())
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert outputs and all(output.get("name") != "stderr" and output["output_type"] != "error" for output in outputs)
