"""`looptape.read`: what was written comes back, and several runs are put together."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.compat.proto import summary_pb2

import looptape
from looptape.analysis import plots, together
from looptape.dashboard import metadata, run_data
from tests.dashboard.event_files import RunWriter
from tests.trainer.tools import mse, read_events

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 5, 2)).astype("float32")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    model = keras.Sequential([keras.Input((5, 2)), keras.layers.GRU(3, name="gru"), keras.layers.Dense(1)])
    trainer = looptape.Trainer(model, "sgd", {"error": mse()}, probe_every=2)
    data = tf.data.Dataset.from_tensors((X, X[:, 0, :1])).repeat()
    options = {"log_every": 1, "eval_every": 2, "workdir": path, "progress": False}
    for steps in (2, 4):  # resumed in between
        trainer.fit(data, steps=steps, eval_dataset=data.take(1), **options)
    return path


def test_scalars_and_vectors_are_those_that_were_written(workdir):
    run = looptape.read(workdir)
    for name, prefix in (("train", ""), ("eval", "eval/")):
        expected = {}
        for step, values in read_events(workdir / name):
            for tag, value in values.items():
                expected.setdefault(prefix + tag, {})[step] = value
        for tag, by_step in expected.items():
            if tag in run.scalars:
                steps, values = run.scalars[tag]
            elif tag in run.vectors:
                steps, values = run.vectors[tag]
                assert values.shape == (len(by_step), 5)
            else:
                assert tag.endswith(("/rows", "/heatmap", "verdicts")) or "layout" in tag or "custom" in tag, tag
                continue
            assert steps.tolist() == sorted(by_step)
            np.testing.assert_array_equal(values, np.array([by_step[step] for step in sorted(by_step)]))
    assert run.scalars["loss/error"][0].tolist() == [1, 2, 3, 4] and run.scalars["eval/loss/error"][0].tolist() == [
        2,
        4,
    ]
    assert set(run.vectors) >= {"timestep/gru/state", "timestep/gru/gain"}
    assert (run.config, run.results) == ({}, {})
    assert repr(run) == f"RunData({str(workdir)!r}, {len(run.scalars)} scalars, {len(run.vectors)} vectors)"


def test_a_launched_run_has_its_configuration_and_results(workdir, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"experiment": "a", "config": {"seed": 3}}))
    assert looptape.read(tmp_path).config == {"seed": 3} and looptape.read(tmp_path).results == {}
    (tmp_path / "results.json").write_text(json.dumps({"step": 5, "results": {"loss": 0.5}}))
    assert looptape.read(tmp_path).results == {"loss": 0.5}
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json' is damaged: .*Restore it or delete it"):
        looptape.read(tmp_path)


def test_directories_without_a_run_are_answered(workdir, tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no directory '.*nowhere' to read a run from"):
        looptape.read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no run: there are neither event files in train or eval"):
        looptape.read(workdir / "train")


def test_no_tensorflow_is_imported(workdir):
    code = f"import sys, looptape; looptape.read({str(workdir)!r}); print('tensorflow' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_a_frame_has_a_row_per_step(workdir):
    pandas = pytest.importorskip("pandas")
    frame = looptape.read(workdir).frame()
    assert isinstance(frame, pandas.DataFrame) and frame.index.tolist() == [1, 2, 3, 4]
    assert frame["eval/loss/error"].isna().tolist() == [True, False, True, False]


def made(path, steps, values):
    return run_data.RunData(path, {"loss": (np.array(steps), np.array(values))}, {}, {}, {})


def test_runs_are_put_together_at_the_steps_they_share():
    runs = [made("a", [1, 2, 4], [1.0, 2.0, 4.0]), made("b", [2, 3, 4], [5.0, 6.0, 7.0])]
    steps, values = together(runs, "loss")
    assert steps.tolist() == [2, 4] and values.tolist() == [[2.0, 4.0], [5.0, 7.0]]
    with pytest.raises(KeyError, match="The run in 'a' has no scalar 'los'; it has loss"):
        together(runs, "los")
    with pytest.raises(ValueError, match="have no step of 'loss' in common"):
        together([made("a", [1], [1.0]), made("b", [2], [1.0])], "loss")
    with pytest.raises(ValueError, match="There are no runs to put together"):
        together([], "loss")
    with pytest.raises(TypeError, match="`runs` is the single run 'runs/a'; it must be a list of runs."):
        together("runs/a", "loss")


def test_a_picture_of_mean_and_spread():
    pytest.importorskip("matplotlib")
    values = np.array([[1.0, 2.0], [3.0, 6.0]])
    axes = plots.spread({"gru": ([0, 10], values)}, label="loss")
    with pytest.raises(ValueError, match="There are no curves to draw: `curves` is a tuple. Pass {name: looptape"):
        plots.spread(([0, 10], values))
    [line], [band] = axes.lines, axes.collections
    np.testing.assert_array_equal(line.get_ydata(), [2.0, 4.0])
    corners = band.get_paths()[0].vertices[:, 1]
    assert corners.min() == pytest.approx(2 - np.sqrt(2)) and corners.max() == pytest.approx(4 + np.sqrt(8))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["gru (2 runs)"]
    with pytest.raises(ValueError, match=r"'gru' has values of shape \(2, 2\) for 3 steps"):
        plots.spread({"gru": ([0, 1, 2], values)})


def test_tags_of_version_0_1_have_their_present_names(tmp_path):
    with RunWriter(tmp_path / "train") as writer:
        for tag in ("learning_rate", "gradient_norm/global", "skipped_updates", "loss/error", "accuracy", "own/mean"):
            writer.write(1, [summary_pb2.Summary.Value(tag=tag, simple_value=0.5)])
        writer.write(1, metadata.position_summaries("attention", [1.0, 2.0], [True, True], 0, 1))
    run = looptape.read(tmp_path)
    moved = {"optimizer/learning_rate", "optimizer/gradient_norm/global", "optimizer/skipped_updates"}
    assert set(run.scalars) == {*moved, "loss/error", "metrics/accuracy", "own/mean"}
    assert list(run.vectors) == ["position/attention/output"]
