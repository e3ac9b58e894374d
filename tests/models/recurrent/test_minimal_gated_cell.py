"""The minimal gated cell, against its formula in NumPy."""

import keras
import numpy as np

from looptape.models import LoopRNN, MinimalGatedCell

INPUTS = np.random.default_rng(1).normal(size=(3, 6, 2)).astype(np.float32)


def run(cell, inputs=INPUTS, layer=LoopRNN):
    layer = layer(cell, return_sequences=True)
    outputs = layer(inputs)
    return np.asarray(outputs), {v.name: np.asarray(v) for v in cell.trainable_variables}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_the_minimal_gated_cell_is_its_formula():
    cell = MinimalGatedCell(4, gate_bias=-0.7)
    outputs, weights = run(cell)
    np.testing.assert_allclose(weights["bias"], [-0.7] * 4 + [0.0] * 4)
    for name in ("gate_kernel", "candidate_kernel"):
        np.testing.assert_allclose(weights[name] @ weights[name].T, np.eye(4), atol=1e-5)
    gate_input, candidate_input = np.split(weights["kernel"], 2, axis=1)
    hidden = np.zeros((3, 4))
    for t in range(6):
        gate = sigmoid(INPUTS[:, t] @ gate_input + hidden @ weights["gate_kernel"] - 0.7)
        candidate = np.tanh(INPUTS[:, t] @ candidate_input + (gate * hidden) @ weights["candidate_kernel"])
        hidden = (1 - gate) * hidden + gate * candidate
        np.testing.assert_allclose(outputs[:, t], hidden, atol=1e-6)


def test_a_minimal_gated_unit_has_two_thirds_of_a_gru():
    cell, gru = MinimalGatedCell(8), keras.layers.GRUCell(8, reset_after=False)
    run(cell), run(gru)
    assert cell.count_params() * 3 == gru.count_params() * 2
