"""Echo: its losses against NumPy, and that a run fills loss shares and the credit matrix."""

import numpy as np
import pytest
import tensorflow as tf

from looptape import launch
from looptape.dashboard import metadata
from looptape.experiments.echo import Config, build, sequences
from looptape.trainer.summaries import event_writer

SMALL = {"length": 8, "near": 1, "far": 3, "units": 4, "eval_examples": 6, "batch_size": 4, "jit_compile": False}


@pytest.mark.long
def test_each_loss_asks_for_the_bit_of_so_many_time_steps_ago():
    trainer = build(Config(**SMALL)).trainer
    bits = sequences(5, 8, [1, 2]).numpy()
    assert set(np.unique(bits)) == {0.0, 1.0}
    logits = trainer.model(2 * bits - 1).numpy()
    expected = {}
    for index, (name, lag) in enumerate({"near": 1, "far": 3}.items()):
        right, answers = bits[:, :-lag, 0], logits[:, lag:, index]
        expected[name] = np.mean(np.log1p(np.exp(-answers)) * right + np.log1p(np.exp(answers)) * (1 - right))
    found = trainer.evaluate(tf.data.Dataset.from_tensors(bits))
    assert found["near"] == pytest.approx(expected["near"], rel=1e-5)
    assert found["far"] == pytest.approx(expected["far"], rel=1e-5)


def test_a_run_fills_loss_shares_and_the_credit_matrix(tmp_path):
    config = Config(**SMALL, steps=4, eval_every=2, probe_every=2, workdir=str(tmp_path))
    launch.run(config, build, name="echo", show=False)
    rows = {}
    for step, value in event_writer.read(tmp_path / "train"):
        if metadata.parse_content(value.metadata.plugin_data.content):
            rows.setdefault(value.tag, {})[step] = tf.make_ndarray(value.tensor)
    near, far = (rows[f"timestep/gru/loss_share/{loss}"] for loss in ("near", "far"))
    assert sorted(near) == [1, 2, 4]
    np.testing.assert_allclose(near[4] + far[4], 1.0, rtol=1e-4)
    credit = rows["timestep/gru/credit"]
    assert sorted(credit) == [2, 4] and credit[4].shape == (8, 8)
    assert np.all(np.triu(credit[4], 1) == 0) and np.all(credit[4][3:, 1] > 0)


def test_echoes_beyond_the_sequence_are_refused():
    with pytest.raises(ValueError, match="`length` is 8, with echoes of 2 and 15 time steps; it must be longer"):
        Config(length=8)
