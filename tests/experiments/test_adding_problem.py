"""The adding problem: its data against NumPy, and that it is learnt."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import launch
from looptape.experiments.adding_problem import CELLS, Config, build, data, sequences


def test_the_target_is_the_sum_of_the_two_marked_numbers():
    inputs, targets = (value.numpy() for value in sequences(500, 11, [1, 2]))
    numbers, markers = inputs[..., 0], inputs[..., 1]
    assert inputs.shape == (500, 11, 2) and targets.shape == (500, 1)
    assert set(np.unique(markers)) == {0.0, 1.0}
    np.testing.assert_array_equal(markers[:, :5].sum(axis=1), 1)
    np.testing.assert_array_equal(markers[:, 5:].sum(axis=1), 1)
    np.testing.assert_allclose(targets[:, 0], (numbers * markers).sum(axis=1), rtol=1e-6)
    # Every position is marked about equally often, and the numbers are uniform: 1/6 is what a constant 1 reaches.
    assert markers[:, :5].mean(axis=0).min() > 0.1 and markers[:, 5:].mean(axis=0).min() > 0.1
    assert abs(np.mean((targets - 1.0) ** 2) - 1 / 6) < 0.02
    assert numbers.min() >= 0 and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.02


def test_batches_are_all_different_and_held_out_ones_too():
    config = Config(length=10, batch_size=6, eval_examples=6)
    dataset, held_out = data(config)
    seen = [batch[0].numpy() for batch in dataset.take(5)] + [batch[0].numpy() for batch in held_out]
    assert sum(len(batch) for batch in seen[5:]) == 6
    rows = np.concatenate(seen)
    assert len(np.unique(rows, axis=0)) == len(rows)
    other, _ = data(Config(length=10, batch_size=6, eval_examples=6, seed=1))
    assert not np.array_equal(next(iter(other))[0], seen[0])


def test_the_position_in_the_data_is_saved(tmp_path):
    dataset, _ = data(Config(length=10, batch_size=4))
    iterator = iter(dataset)
    for _ in range(3):
        next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "position"))
    expected = next(iterator)[0].numpy()
    again = iter(dataset)
    tf.train.Checkpoint(iterator=again).read(path)
    np.testing.assert_array_equal(next(again)[0].numpy(), expected)


def test_it_is_learnt():
    """Far below the 0.167 of a constant, by what the model answers: a wrong loss would agree with itself."""
    config = Config(length=8, units=16, steps=250, jit_compile=False, probe_every=0, eval_every=None, eval_examples=500)
    made = []
    results = launch.run(config, lambda config: made.append(build(config)) or made[0], show=False)
    inputs, targets = sequences(1000, 8, [7, 7])
    error = np.mean((made[0].trainer.model(inputs) - targets) ** 2)
    assert error < 0.02
    assert results["error"] == pytest.approx(error, rel=0.3)


def test_every_cell_builds_a_model():
    for cell in CELLS:
        experiment = build(Config(cell=cell, units=4, length=6, eval_examples=2))
        outputs = experiment.trainer.model(tf.zeros([3, 6, 2]))
        assert outputs.shape == (3, 1)
        assert isinstance(experiment.trainer.model.get_layer(cell), keras.layers.RNN)
