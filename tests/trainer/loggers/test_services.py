"""MLflow in a local store and Weights & Biases offline, against the packages themselves."""

import json
import os
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from looptape import loggers
from tests.reliability.tools import REPOSITORY
from tests.trainer.loggers.test_loggers import fit, written


def sent(workdir, name):
    return json.loads((workdir / f"{name}.json").read_text())


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_each_row_once_after_a_resume(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    store = f"sqlite:///{tmp_path}/mlflow.db"

    def logger():
        return loggers.MLflow(experiment="tests", tracking_uri=store, config={"learning_rate": 0.1})

    fit(4, tmp_path, [logger()])
    fit(8, tmp_path, [logger()])
    client = mlflow.MlflowClient(tracking_uri=store)
    [run] = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.run_id == sent(tmp_path, "mlflow")["id"] and run.info.status == "FINISHED"
    assert run.data.params == {"learning_rate": "0.1"}
    expected = written(tmp_path)
    for tag in ("train/loss/error", "eval/loss/error"):
        history = client.get_metric_history(run.info.run_id, tag)
        name, _, plain = tag.partition("/")
        assert {metric.step: metric.value for metric in history} == pytest.approx(
            {step: value for (own, step, other), value in expected.items() if (own, other) == (name, plain)}
        )
        assert len(history) == len({metric.step for metric in history}) >= 2


@pytest.mark.filterwarnings("ignore")
def test_mlflow_takes_pictures_and_texts(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    logger = loggers.MLflow(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    logger.open(str(tmp_path), 0)
    png = tf.io.encode_png(tf.zeros([4, 4, 3], tf.uint8)).numpy()
    logger.write("train", 1, {"map[0]": loggers.Picture(png), "note": "**text**"})
    logger.write("train", 1, {"sound": loggers.Audio(b"RIFF"), "many": 1.5})  # more of the same step
    run = sent(tmp_path, "mlflow")["id"]
    logger.close()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    folders = {item.path for item in client.list_artifacts(run, "train")}
    assert folders == {"train/map_0_", "train/note", "train/sound"}
    [sound] = client.list_artifacts(run, "train/sound")
    assert sound.path == "train/sound/1.wav"
    assert [each.value for each in client.get_metric_history(run, "train/many")] == [1.5]


_KILLED = """
import os, sys
from looptape import loggers
from tests.trainer.loggers.test_loggers import fit

class Killed(loggers.MLflow):
    def _send(self, step, values):
        super()._send(step, values)
        if step == 6:
            os.kill(os.getpid(), 9)  # sent, and not noted yet

workdir, store = sys.argv[1:]
fit(8, workdir, [Killed(experiment="tests", tracking_uri=store)], checkpoint_every=3)
"""


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_each_row_once_after_a_kill(tmp_path):
    """The process is killed between sending a row and noting that it was sent."""
    mlflow = pytest.importorskip("mlflow")
    store, workdir = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": REPOSITORY, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", _KILLED, str(workdir), store]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert killed.returncode == -9, killed.stderr
    fit(8, workdir, [loggers.MLflow(experiment="tests", tracking_uri=store)], checkpoint_every=3)
    client = mlflow.MlflowClient(tracking_uri=store)
    run = sent(workdir, "mlflow")["id"]
    for tag in client.get_run(run).data.metrics:
        steps = [each.step for each in client.get_metric_history(run, tag)]
        assert steps == ([4, 8] if tag.startswith("eval/") else [2, 4, 6, 8]), tag


def records(path):
    """The records of a W&B file: after 7 bytes, blocks of 32 KB in the format of LevelDB's logs."""
    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32_768 - at % 32_768 < 7:  # too little is left of a block
            at += 32_768 - at % 32_768
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            yield whole
            whole = b""


def whole(path, seconds=60):
    """The records of a run that has ended. W&B writes them in a process of its own, which may still be at it."""
    from wandb.proto import wandb_internal_pb2

    end = time.monotonic() + seconds
    while True:
        found = [wandb_internal_pb2.Record.FromString(data) for data in records(path)]
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        assert time.monotonic() < end, f"{path} has no end after {seconds} s"
        time.sleep(0.2)


@pytest.mark.filterwarnings("ignore")
def test_wandb_takes_everything_of_one_step(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = loggers.WandB(mode="offline")
    logger.open(str(tmp_path), 0)
    png = tf.io.encode_png(tf.zeros([4, 4, 3], tf.uint8)).numpy()
    wav = tf.audio.encode_wav(tf.zeros([80, 1]), 8000).numpy()
    buckets = np.array([[0.0, 0.5, 3.0], [0.5, 1.0, 1.0]])
    logger.write("train", 1, {"loss": 0.5, "vector": np.array([1.0, np.nan, 3.0])})
    logger.write("train", 1, {"map": loggers.Picture(png), "sound": loggers.Audio(wav), "note": "a < b"})
    logger.write("train", 1, {"outputs": loggers.Histogram(buckets)})
    logger.close()
    [file] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    values = {}
    for record in whole(file):
        items = record.history.item if record.WhichOneof("record_type") == "history" else ()
        values |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
    assert values["train/loss"] == 0.5
    assert values["train/outputs/values"] == [3, 1] and values["train/outputs/bins"] == [0.0, 0.5, 1.0]
    kinds = {name: values[f"train/{name}/_type"] for name in ("vector", "map", "sound", "note")}
    assert kinds == {"vector": "histogram", "map": "image-file", "sound": "audio-file", "note": "html-file"}
    files = file.parent / "files" / "media"
    assert [path.read_bytes() for path in files.glob("audio/**/*.wav")] == [wav]
    assert ["a &lt; b" in path.read_text() for path in files.glob("html/**/*.html")] == [True]


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_has_each_row_once_after_a_resume(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def logger():
        return loggers.WandB(mode="offline", config={"learning_rate": 0.1})

    fit(4, tmp_path, [logger()])
    fit(8, tmp_path, [logger()])
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and all(sent(tmp_path, "wandb")["id"] in file.name for file in files)
    found, config = [], {}
    for record in (record for file in files for record in whole(file)):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        config |= {item.key: item.value_json for item in record.run.config.update}
    assert config["learning_rate"] == "0.1" and wandb.__version__
    values = {(row["step"], tag): value for row in found for tag, value in row.items() if tag == "train/loss/error"}
    expected = {
        (step, "train/loss/error"): value
        for (own, step, tag), value in written(tmp_path).items()
        if (own, tag) == ("train", "loss/error")
    }
    assert values == pytest.approx(expected, rel=1e-6)
    steps = [row["step"] for row in found if "train/loss/error" in row]
    assert len(steps) == len(set(steps)) >= 4
