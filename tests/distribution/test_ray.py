"""The optional launcher by Ray: without Ray it says what to install; with it two workers train."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from looptape.experiments.cluster import ray
from looptape.trainer.checkpoints import store as checkpoints


def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(ImportError, match=r"optional dependency. Install it with `pip install looptape\[ray\]`"):
        ray.run(2, ["experiments.adding_problem"])


def test_the_experiment_is_needed(capsys):
    with pytest.raises(SystemExit):
        ray.main(["--workers=2", "--"])
    assert "there is no experiment; write it after --" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--workers=0"], ["--workers=two"], ["--workers=2", "--restarts=-2"]])
def test_numbers_that_make_no_sense(arguments, capsys):
    with pytest.raises(SystemExit):
        ray.main([*arguments, "--", "adding_problem"])
    assert "was given; it must be a number of at least" in capsys.readouterr().err


def config(code, **options):
    return {"command": [sys.executable, "-c", code], "directory": os.getcwd(), "returns": True, **options}


def test_only_codes_that_a_restart_can_change_are_failures():
    assert ray.work(config("")) is None
    assert ray.work(config("raise SystemExit(2)")) == 2
    with pytest.raises(RuntimeError, match="ended with code 75; its log says why"):
        ray.work(config("raise SystemExit(75)"))
    with pytest.raises(RuntimeError, match="ended with code 2;"):  # an older Ray would take a value for success
        ray.work(config("raise SystemExit(2)", returns=False))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_worker_ends_with_the_process_of_ray_that_holds_it(tmp_path):
    path = tmp_path / "pid"
    code = f"import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"from looptape.experiments.cluster import ray; ray.work({config(code)!r})"]
    )
    end = time.monotonic() + 60
    while not (path.exists() and path.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    worker = int(path.read_text())
    assert alive(worker)
    holder.kill()
    holder.wait()
    end = time.monotonic() + 10
    while alive(worker) and time.monotonic() < end:
        time.sleep(0.05)
    ended = not alive(worker)
    if not ended:
        os.kill(worker, signal.SIGKILL)
    assert ended


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # Z: nobody waits for it
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Ray uses what it has deprecated itself
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_two_workers_by_ray(tmp_path):
    flags = ("--steps=4", "--length=4", "--units=2", "--jit_compile=false", "--probe_every=0", "--eval_examples=10")
    assert ray.run(2, ["experiments.adding_problem", *flags, f"--workdir={tmp_path}"], restarts=0) == 0
    assert checkpoints.Store(str(tmp_path / "checkpoints")).newest()[1]["step"] == 4


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Ray uses what it has deprecated itself
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_wrong_flags_are_not_tried_again_by_ray(capfd):
    assert ray.run(2, ["experiments.adding_problem", "--no_such_flag=1"], restarts=3) == 2
    told = capfd.readouterr()
    assert (told.out + told.err).count("--no_such_flag is not a flag") <= 2  # by each of the two workers
