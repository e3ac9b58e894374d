"""A finished run as a SavedModel, loaded in a process that has no Looptape."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer, _command, models
from looptape.experiments.tools import serving
from tests.trainer.tools import mse

X = np.random.default_rng(0).normal(size=(4, 5, 2)).astype("float32")
SERVED = """
import sys
sys.modules["looptape"] = None  # as where it is not installed
import numpy as np, tensorflow as tf
with np.load(sys.argv[1]) as file:
    x, names = file["x"], [name for name in file if name != "x"]
    for name in names:
        loaded = tf.saved_model.load(sys.argv[2] + "/" + name)
        found = loaded.serve(x).numpy()
        print(name, float(np.abs(found - file[name]).max()))
assert not [name for name in sys.modules if name.startswith("looptape.")]
"""
LAYERS = {
    "loop": lambda: models.LoopRNN(models.MinimalGatedCell(3)),
    "identity": lambda: keras.layers.RNN(models.IdentityRNNCell(3)),
    "orthogonal": lambda: keras.layers.RNN(models.OrthogonalRNNCell(3)),
}


def trained(layer, workdir, **options):
    model = keras.Sequential([keras.Input((None, 2)), layer, keras.layers.Dense(1)])
    trainer = Trainer(model, keras.optimizers.SGD(0.1), {"error": mse()}, **options)
    data = tf.data.Dataset.from_tensors((X, X[:, 0, :1])).repeat()
    trainer.fit(data, steps=3, eval_dataset=data.take(1), eval_every=1, workdir=workdir, progress=False)
    return trainer


def test_finished_runs_are_served_without_looptape(tmp_path, capfd):
    expected = {}
    for name, layer in LAYERS.items():
        trainer = trained(layer(), tmp_path / "runs" / name)
        expected[name] = trainer.model(X).numpy()
        assert _command.main(["export", str(tmp_path / "runs" / name), str(tmp_path / "served" / name)]) == 0
        assert "Load it with `model = tf.saved_model.load(" in capfd.readouterr().out
    np.savez(tmp_path / "expected.npz", x=X, **expected)
    command = [sys.executable, "-c", SERVED, str(tmp_path / "expected.npz"), str(tmp_path / "served")]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = dict(line.split() for line in ran.stdout.splitlines())
    assert found.keys() == LAYERS.keys() and all(float(error) < 1e-6 for error in found.values())


def test_averaged_weights_are_served(tmp_path):
    trainer = trained(LAYERS["identity"](), tmp_path / "run", ema_decay=0.5)
    serving.export(str(tmp_path / "run"), str(tmp_path / "served"), "averaged")
    with trainer.averaged_weights():
        expected = trainer.model(X).numpy()
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    found = loaded.serve(X).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(expected - trainer.model(X).numpy()).max() > 1e-4


def test_what_cannot_be_exported_is_answered(tmp_path, capsys):
    with pytest.raises(ValueError, match=r"There is no file '.*model\.keras': the run is not finished"):
        serving.export(str(tmp_path), str(tmp_path / "served"))
    (tmp_path / "model.keras").write_text("")
    with pytest.raises(ValueError, match="the run kept no best weights. Use --weights=final"):
        serving.export(str(tmp_path), str(tmp_path / "served"), "best")
    with pytest.raises(ValueError, match="`weights` is 'last'; it must be one of final, averaged, best"):
        serving.export(str(tmp_path), str(tmp_path / "served"), "last")
    with pytest.raises(ValueError, match="exists already. Choose a directory that does not"):
        serving.export(str(tmp_path), str(tmp_path))
    assert _command.main(["export", str(tmp_path)]) == 2
    assert "`looptape export` takes a work directory, a directory to write to" in capsys.readouterr().err
    assert _command.main(["export", str(tmp_path), str(tmp_path)]) == 2
