"""Pictures and texts after each evaluation: what is in the event files, also after a resume."""

import json
import os
import types

import numpy as np
import pytest
import tensorflow as tf

from looptape import launch
from looptape.experiments.records import media
from looptape.trainer.loggers.interface import Guarded
from looptape.trainer.summaries import event_writer
from tests.experiments import line


def shown(workdir, steps, functions, **options):
    """Runs the line with the callback."""

    def build(config):
        made = line.build(config)
        callback = media.Show(made.trainer, config.workdir, functions(made.trainer))
        return launch.Experiment(made.trainer, made.dataset, made.eval_dataset, callbacks=(callback,))

    config = line.Config(workdir=workdir, steps=steps, eval_every=2, **options)
    launch.run(config, build, name="line", show=False)


def test_texts_and_images_of_every_evaluation_once(tmp_path):
    workdir = str(tmp_path / "run")
    pixels = np.linspace(0, 1, 12, dtype=np.float32).reshape(2, 6, 1)

    def functions(trainer):
        return {"note": lambda: f"at {trainer._engine.counters.step}", "picture": lambda: pixels}

    shown(workdir, 4, functions, loggers="jsonl")
    # What a killed run wrote after its last checkpoint is written again, not twice.
    late = event_writer.EventWriter(os.path.join(workdir, "shown"), 4)
    for step in (5, 6):
        late.write(step, [event_writer.text("note", "lost")])
    late.close()
    shown(workdir, 8, functions, loggers="jsonl")
    with open(os.path.join(workdir, "metrics.jsonl")) as file:
        rows = [json.loads(line) for line in file]
    assert [row["values"] for row in rows if row["run"] == "shown"] == [{"note": f"at {s}"} for s in (2, 4, 6, 8)]
    [flags] = [row["values"] for row in rows if row["run"] == "config"]
    assert flags["steps"] == 8 and flags["eval_every"] == 2
    values = list(event_writer.read(os.path.join(workdir, "shown")))
    notes = {step: value.tensor.string_val[0].decode() for step, value in values if value.tag == "note"}
    assert notes == {step: f"at {step}" for step in (2, 4, 6, 8)}
    assert [step for step, value in values if value.tag == "note"] == [2, 4, 6, 8]
    pictures = [value.tensor.string_val for _, value in values if value.tag == "picture"]
    assert len(pictures) == 4 and pictures[0][:2] == [b"6", b"2"]
    np.testing.assert_array_equal(tf.io.decode_png(pictures[0][2]), np.round(255 * pixels).astype(np.uint8))


def test_an_evaluation_that_is_made_once_more_replaces_what_was_shown(tmp_path):
    engine = types.SimpleNamespace(loggers=Guarded(()))
    trainer = types.SimpleNamespace(step=tf.Variable(3), _engine=engine)
    callback = media.Show(trainer, str(tmp_path), {"note": lambda: f"{trainer.step.numpy()}"})
    for _ in range(2):
        callback.on_train_begin()
        callback.on_test_end()
        callback.on_train_end()
    trainer.step.assign(5)
    callback.on_train_begin()
    for step in (6, 8, 6):  # the last one after a return to a checkpoint
        trainer.step.assign(step)
        callback.on_test_end()
    callback.on_train_end()
    assert sorted(step for step, _ in event_writer.read(os.path.join(tmp_path, "shown"))) == [3, 6]


def test_without_a_workdir_nothing_is_called():
    def fails():
        raise AssertionError

    shown(None, 2, lambda trainer: {"note": fails})


def test_tiles():
    images = np.arange(3 * 2 * 2, dtype=np.float32).reshape(3, 2, 2, 1)
    expected = np.array([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 0, 0], [10, 11, 0, 0]], np.float32)
    np.testing.assert_array_equal(media.tiled(images, 2)[..., 0], expected)


def test_code_keeps_its_lines():
    assert media.code("a\n  b") == "    a\n      b\n"


def test_several_images_at_once_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'picture' gave an array of shape \(2, 3, 3, 1\).*Use `tiled`"):
        shown(str(tmp_path), 2, lambda trainer: {"picture": lambda: np.zeros((2, 3, 3, 1))})
