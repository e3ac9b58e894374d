"""The temporal order problem: its data against a plain reading, its weights, and that Ω is trained."""

import dataclasses

import keras
import numpy as np

from looptape import timesteps
from looptape.experiments.temporal_order import Config, build, sequences

SMALL = Config(length=10, units=4, batch_size=4, eval_examples=8, probe_every=0, eval_every=None, jit_compile=False)


def test_the_class_is_which_symbols_came_in_which_order():
    inputs, classes = (value.numpy() for value in sequences(300, 50, [1, 2]))
    symbols = inputs.argmax(axis=-1)
    assert inputs.shape == (300, 50, 6) and np.all(inputs.sum(axis=-1) == 1)
    for row, found in zip(symbols, classes[:, 0], strict=True):
        places = np.flatnonzero(row >= 4)
        assert len(places) == 2 and 5 <= places[0] < 10 and 25 <= places[1] < 30
        assert found == 2 * (row[places[0]] - 4) + row[places[1]] - 4
    assert np.bincount(classes[:, 0], minlength=4).min() > 40
    assert len(np.unique(symbols[symbols < 4])) == 4


def test_the_recurrent_weights_begin_with_a_spectral_radius():
    kernel = (
        build(dataclasses.replace(SMALL, units=20, radius=0.7)).trainer.model.get_layer("rnn").cell.recurrent_kernel
    )
    np.testing.assert_allclose(np.abs(np.linalg.eigvals(kernel.numpy())).max(), 0.7, rtol=1e-5)


def test_omega_is_trained_or_left_out():
    for omega, names in ((0.0, ["cross_entropy"]), (2.0, ["cross_entropy", "omega"])):
        experiment = build(dataclasses.replace(SMALL, omega=omega, form="full"))
        assert list(experiment.trainer.losses) == names
    assert experiment.trainer.losses["omega"] == timesteps.Omega("rnn", form="full")
    keras.utils.set_random_seed(0)
    history = experiment.trainer.fit(experiment.dataset, steps=2, progress=False).history
    assert history["omega"][-1] > 0 and experiment.trainer.loss_weights["omega"] == 2.0
    assert "omega" not in experiment.trainer.evaluate(experiment.eval_dataset)
