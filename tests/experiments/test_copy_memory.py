"""Copy memory: its data against NumPy, its baseline, and that it is learnt."""

import numpy as np
import pytest
import tensorflow as tf

from looptape import launch
from looptape.experiments.copy_memory import CELLS, Config, build, data, sequences


def test_the_symbols_come_back_after_the_delay():
    inputs, targets = (value.numpy() for value in sequences(400, 7, [1, 2]))
    assert inputs.shape == (400, 27, 10) and targets.shape == (400, 27)
    np.testing.assert_array_equal(inputs.sum(axis=-1), 1)
    tokens = inputs.argmax(axis=-1)
    symbols = tokens[:, :10]
    assert set(np.unique(symbols)) == set(range(1, 9)) and np.bincount(symbols.ravel())[1:].min() > 400
    np.testing.assert_array_equal(tokens[:, 10:16], 0)
    np.testing.assert_array_equal(tokens[:, 16], 9)  # as many time steps before the first answer as the delay has
    np.testing.assert_array_equal(tokens[:, 17:], 0)
    np.testing.assert_array_equal(targets[:, :17], 0)
    np.testing.assert_array_equal(targets[:, 17:], symbols)


def test_the_baseline_is_the_cross_entropy_of_knowing_when_but_not_what():
    config = Config(delay=5, units=4, eval_examples=200)
    experiment = build(config)
    _, targets = sequences(100, 5, [0, -1])
    probabilities = np.zeros((100, 25, 9))
    probabilities[:, :15, 0] = 1.0
    probabilities[:, 15:, 1:] = 1 / 8
    chosen = np.take_along_axis(probabilities, targets.numpy()[..., None], axis=-1)
    assert experiment.goals[0].baseline == pytest.approx(-np.log(chosen).mean(), rel=1e-6)
    # A model whose logits are all 0 knows nothing at all.
    for weight in experiment.trainer.model.get_layer("logits").weights:
        weight.assign(tf.zeros_like(weight))
    assert experiment.trainer.evaluate(experiment.eval_dataset)["cross_entropy"] == pytest.approx(np.log(9), rel=1e-5)


def test_batches_are_all_different_and_their_position_is_saved(tmp_path):
    config = Config(delay=2, batch_size=4, eval_examples=4)
    dataset, held_out = data(config)
    iterator = iter(dataset)
    seen = [next(iterator)[1].numpy() for _ in range(3)]
    rows = np.concatenate([*seen, *(targets.numpy() for _, targets in held_out)])
    assert len(np.unique(rows, axis=0)) == len(rows) == 16
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "position"))
    expected = next(iterator)[1].numpy()
    again = iter(dataset)
    tf.train.Checkpoint(iterator=again).read(path)
    np.testing.assert_array_equal(next(again)[1].numpy(), expected)


def test_the_orthogonal_cell_learns_it():
    """Below a fifth of the baseline over a delay of 10, by what the model answers."""
    made = []
    config = Config(delay=10, steps=200, jit_compile=False, probe_every=0, eval_every=None)
    results = launch.run(config, lambda config: made.append(build(config)) or made[0], show=False)
    inputs, targets = (value.numpy() for value in sequences(500, 10, [7, 7]))
    logits = made[0].trainer.model(inputs).numpy()
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    cross_entropy = -np.log(np.take_along_axis(probabilities, targets[..., None], axis=-1)).mean()
    assert results["cross_entropy"] == pytest.approx(cross_entropy, rel=0.1)
    assert cross_entropy < 0.2 * made[0].goals[0].baseline
    answers = logits.argmax(axis=-1)[:, -10:]
    assert (answers == targets[:, -10:]).mean() > 0.95


def test_every_cell_builds_a_model():
    for cell in CELLS:
        experiment = build(Config(cell=cell, units=4, delay=3, eval_examples=2))
        assert experiment.trainer.model(tf.zeros([2, 23, 10])).shape == (2, 23, 9)
        assert experiment.trainer.model.get_layer(cell).cell.state_size in (4, [4, 4])
