"""The bound on compiled shapes, and that compiled loops are compiled."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.recurrent import internals
from looptape.trainer.recurrent.hoisted import compilation, scan, standard
from looptape.trainer.recurrent.hoisted.compilation import CompiledShapes


def test_shapes_past_the_limit_are_refused_with_one_warning():
    shapes = CompiledShapes("encoder", limit=2)
    assert shapes.admit(10, 4) is True
    assert shapes.admit(12, 4) is True
    with pytest.warns(UserWarning, match="'encoder' was compiled for 2 shapes; a batch of 4 sequences of length 14"):
        assert shapes.admit(14, 4) is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shapes.admit(16, 4) is False
        assert shapes.admit(10, 4) is True


@pytest.fixture
def recorded(monkeypatch):
    """Names of the loops that ran, as they ran."""
    ran = []

    def noting(name, loop):
        def run(*arguments, **options):
            results = loop(*arguments, **options)
            if internals.in_xla():  # the plain loop, being compiled
                return results
            with tf.control_dependencies([tf.py_function(lambda: ran.append(name), [], [])]):
                return tf.nest.map_structure(tf.identity, results)

        return run

    for name in ("forward", "backward"):
        monkeypatch.setattr(scan, name, noting(f"plain {name}", getattr(scan, name)))
        monkeypatch.setattr(compilation, name, noting(f"compiled {name}", getattr(compilation, name)))
    return ran


def test_many_lengths_in_one_program(recorded):
    """Lengths are unknown when the update is traced: the bound holds when it runs, with the same gradients."""
    layer = keras.layers.GRU(3)
    layer.build((None, None, 2))
    shapes = CompiledShapes("gru", limit=1)

    @tf.function(input_signature=[tf.TensorSpec([None, None, 2])])
    def gradients(x):
        with tf.GradientTape() as tape:
            last, *_ = standard.inner_loop(layer, x, [tf.zeros([tf.shape(x)[0], 3])], compiled=shapes)
        return tape.gradient(last, [weight.value for weight in layer.weights])

    rng = np.random.default_rng(0)
    ran = {}
    for length in (4, 5, 4):
        x = tf.constant(rng.normal(size=(2, length, 2)), tf.float32)
        recorded.clear()
        if length == 5:
            with pytest.warns(UserWarning, match="sequences of length 5"):
                found = gradients(x)
        else:
            found = gradients(x)
        ran[length] = list(recorded)
        with tf.GradientTape() as tape:
            last = layer(x)
        for a, b in zip(found, tape.gradient(last, [weight.value for weight in layer.weights]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert ran == {4: ["compiled forward", "compiled backward"], 5: ["plain forward", "plain backward"]}


def test_compiled_loops_run_in_xla():
    """XLA has no operation for strings; the plain loop has."""
    layer = keras.layers.SimpleRNN(2)
    layer.build((None, None, 2))

    def act(t, adjoints, valid):
        return [adjoint + tf.cast(tf.strings.length(tf.strings.as_string(t)) * 0, tf.float32) for adjoint in adjoints]

    def gradient(compiled):
        with tf.GradientTape() as tape:
            last, *_ = standard.inner_loop(layer, tf.ones([1, 3, 2]), [tf.zeros([1, 2])], act=act, compiled=compiled)
        return tape.gradient(last, layer.cell.kernel.value)

    assert gradient(False).shape == (2, 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="AsString"):
        gradient(True)


def test_loops_inside_a_compiled_program_are_not_compiled_again():
    layer = keras.layers.SimpleRNN(2)
    layer.build((None, None, 2))
    shapes = CompiledShapes("simple_rnn")

    @tf.function(jit_compile=True)
    def last(x):
        return standard.inner_loop(layer, x, [tf.zeros([1, 2])], compiled=shapes)[0]

    x = tf.ones([1, 3, 2])
    np.testing.assert_allclose(last(x), layer(x), rtol=1e-6)
    assert shapes.seen == set()


def test_large_batches_are_cut_for_the_threads(monkeypatch):
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: 2)
    assert compilation.parts(64, 256) == 2
    assert compilation.parts(8, 16) == 1
    assert compilation.parts(None, 256) == 2
    assert compilation.parts(None, 8) == 1
    assert compilation.parts(16, 64) == 2
    monkeypatch.setattr(tf.config.threading, "get_inter_op_parallelism_threads", lambda: 1)
    assert compilation.parts(64, 256) == 1
