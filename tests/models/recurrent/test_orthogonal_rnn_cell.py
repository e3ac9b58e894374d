"""The orthogonal cell, against Householder matrices and its formula in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.models import LoopRNN, OrthogonalRNNCell
from looptape.models.recurrent.orthogonal_rnn_cell import modulus_relu, reflect

INPUTS = np.random.default_rng(1).normal(size=(3, 6, 2)).astype(np.float32)


def run(cell, inputs=INPUTS, layer=LoopRNN):
    layer = layer(cell, return_sequences=True)
    outputs = layer(inputs)
    return np.asarray(outputs), {v.name: np.asarray(v) for v in cell.trainable_variables}


@pytest.mark.parametrize("columns", [1, 2, 5])
def test_reflections_are_the_product_of_householder_matrices(columns):
    vectors = np.random.default_rng(2).normal(size=(5, columns))
    product = np.eye(5)
    for column in vectors.T:
        product = product @ (np.eye(5) - 2 * np.outer(column, column) / (column @ column))
    hidden = np.random.default_rng(3).normal(size=(4, 5))
    turned = reflect(tf.constant(hidden), tf.constant(vectors)).numpy()
    np.testing.assert_allclose(turned, hidden @ product, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(hidden, axis=1), rtol=1e-12)


def test_the_orthogonal_cell_is_its_formula():
    cell = OrthogonalRNNCell(5, reflections=3, start="random")
    run(cell)
    cell.bias.assign([-0.1, 0.2, 0.0, -0.3, 0.1])
    outputs, weights = run(cell)
    matrix = reflect(tf.eye(5), cell.vectors.value).numpy()
    hidden = np.zeros((3, 5))
    for t in range(6):
        values = INPUTS[:, t] @ weights["kernel"] + hidden @ matrix
        hidden = np.sign(values) * np.maximum(np.abs(values) + weights["bias"], 0)
        np.testing.assert_allclose(outputs[:, t], hidden, atol=1e-5)


@pytest.mark.parametrize(("reflections", "determinant"), [(4, 1), (3, -1)])
def test_the_orthogonal_cell_starts_as_an_identity_or_a_reflection(reflections, determinant):
    cell = OrthogonalRNNCell(6, reflections)
    run(cell)
    matrix = reflect(tf.eye(6), cell.vectors.value).numpy()
    assert np.linalg.det(matrix) == pytest.approx(determinant, abs=1e-5)
    assert np.linalg.matrix_rank(matrix - np.eye(6), tol=1e-4) == reflections % 2


def test_it_stays_orthogonal_and_keeps_the_norm_of_a_gradient_while_it_trains():
    """Oracle: with an orthogonal recurrent matrix and zero biases the state gradient has one norm at all times."""
    cell = OrthogonalRNNCell(8, start="random")
    cell.build((None, 2))
    optimizer = keras.optimizers.Adam(0.1)
    for _ in range(5):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(LoopRNN(cell)(INPUTS) - 1.0))
        optimizer.apply(tape.gradient(loss, [v.value for v in cell.trainable_variables]), cell.trainable_variables)
    matrix = reflect(tf.eye(8), cell.vectors.value).numpy()
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(8), atol=1e-5)
    cell.bias.assign(tf.zeros(8))
    states, hidden = [], tf.zeros([3, 8])
    with tf.GradientTape() as tape:
        tape.watch(hidden)
        for t in range(6):
            states.append(hidden)
            hidden = cell(INPUTS[:, t], [hidden])[0]
            tape.watch(hidden)
        loss = tf.reduce_sum(tf.square(hidden))
    norms = [np.linalg.norm(gradient, axis=1) for gradient in tape.gradient(loss, states)]
    np.testing.assert_allclose(norms, np.broadcast_to(norms[-1], (6, 3)), rtol=1e-4)


def test_the_modulus_relu_is_the_identity_without_a_bias():
    values = tf.constant([-2.0, -0.5, 0.0, 0.5, 2.0])
    np.testing.assert_array_equal(modulus_relu(values, 0.0), values)
    np.testing.assert_allclose(modulus_relu(values, -1.0), [-1.0, 0.0, 0.0, 0.0, 1.0])
