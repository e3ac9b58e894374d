"""The optional launcher by Ray: without Ray it says what to install; with it two workers train."""

import importlib.util
import sys

import pytest

from experiments import ray_cluster
from trainer import checkpoints


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(ImportError, match=r"optional dependency. Install it by `pip install looptape\[ray\]`"):
        ray_cluster.run(2, ["experiments.adding_problem"])


def test_the_experiment_is_needed(capsys):
    with pytest.raises(SystemExit):
        ray_cluster.main(["--workers=2", "--"])
    assert "there is no experiment; write it after --" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Ray uses what it has deprecated itself
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_two_workers_by_ray(tmp_path):
    flags = ("--steps=4", "--length=4", "--units=2", "--jit_compile=false", "--probe_every=0", "--eval_examples=10")
    ray_cluster.run(2, ["experiments.adding_problem", *flags, f"--workdir={tmp_path}"], restarts=0)
    assert checkpoints.Store(str(tmp_path / "checkpoints")).newest()[1]["step"] == 4
