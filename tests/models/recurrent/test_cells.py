"""Cells beyond Keras's, against NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.models import IdentityRNNCell, LoopRNN, MinimalGatedCell, OrthogonalRNNCell

INPUTS = np.random.default_rng(1).normal(size=(3, 6, 2)).astype(np.float32)


def run(cell, inputs=INPUTS, layer=LoopRNN):
    layer = layer(cell, return_sequences=True)
    outputs = layer(inputs)
    return np.asarray(outputs), {v.name: np.asarray(v) for v in cell.trainable_variables}


@pytest.mark.parametrize("make", [IdentityRNNCell, MinimalGatedCell, OrthogonalRNNCell])
def test_they_run_the_same_in_keras_and_under_xla(make):
    cell = make(4)
    expected, _ = run(cell)
    np.testing.assert_allclose(run(cell, layer=keras.layers.RNN)[0], expected, atol=1e-6)
    layer = LoopRNN(cell, return_sequences=True)
    layer.build(INPUTS.shape)
    compiled = tf.function(lambda values: layer(values), jit_compile=True)
    np.testing.assert_allclose(compiled(tf.constant(INPUTS)), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MinimalGatedCell(0), "`units` is 0; it must be at least 1"),
        (lambda: OrthogonalRNNCell(4, 0), "`reflections` is 0; both must be at least 1"),
        (lambda: OrthogonalRNNCell(4, start="zero"), "`start` is 'zero'; it must be 'identity' or 'random'"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
