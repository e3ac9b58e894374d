"""The identity cell keeps its state until it is trained."""

import numpy as np

from looptape.models import IdentityRNNCell, LoopRNN

INPUTS = np.random.default_rng(1).normal(size=(3, 6, 2)).astype(np.float32)


def run(cell, inputs=INPUTS, layer=LoopRNN):
    layer = layer(cell, return_sequences=True)
    outputs = layer(inputs)
    return np.asarray(outputs), {v.name: np.asarray(v) for v in cell.trainable_variables}


def test_the_identity_cell_keeps_its_state_until_it_is_trained():
    cell = IdentityRNNCell(4, scale=0.5, kernel_scale=0.2, bias_initializer="random_normal")
    outputs, weights = run(cell)
    np.testing.assert_array_equal(weights["recurrent_kernel"], 0.5 * np.eye(4))
    assert 0.05 < weights["kernel"].std() < 0.5
    hidden = np.zeros((3, 4))
    for t in range(6):
        hidden = np.maximum(INPUTS[:, t] @ weights["kernel"] + 0.5 * hidden + weights["bias"], 0)
        np.testing.assert_allclose(outputs[:, t], hidden, atol=1e-6)
