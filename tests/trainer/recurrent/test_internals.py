"""The names of Keras and TensorFlow that are not public, held against the installed versions."""

import ast
import functools
import inspect
import pathlib
import re

import keras
import pytest
import tensorflow as tf

from looptape.trainer import probing, recurrent
from looptape.trainer.recurrent import internals

FOLDERS = [pathlib.Path(package.__file__).parent for package in (probing, recurrent)]


def test_nothing_else_reaches_for_an_underscore_or_a_private_module():
    for path in [path for folder in FOLDERS for path in folder.rglob("*.py")]:
        if path.name == "internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith(("keras.src", "tensorflow.python")), path.name
            if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr) and node.attr != "_replace":
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                assert owner in ("self",), f"{path.name}: {ast.unparse(node)}"


def test_the_loop_of_keras_is_called_as_we_replace_it():
    for cls in (keras.layers.RNN, keras.layers.LSTM, keras.layers.GRU):
        assert list(inspect.signature(cls.inner_loop).parameters) == [
            "self",
            "sequences",
            "initial_state",
            "mask",
            "training",
        ]
    source = inspect.getsource(keras.layers.RNN.call)
    assert "last_output, outputs, states = self.inner_loop(" in source
    for cls in (keras.layers.SimpleRNN, keras.layers.ConvLSTM1D):
        assert cls.inner_loop is keras.layers.RNN.inner_loop


def test_cells_and_layers_have_what_we_ask_for():
    layer = keras.layers.Bidirectional(keras.layers.LSTM(2))
    assert internals.sublayers(layer) == [layer.forward_layer, layer.backward_layer]
    assert internals.takes_training(keras.layers.LSTMCell(2))
    assert not internals.takes_training(keras.layers.Flatten())
    cells = [keras.layers.LSTMCell(2), keras.layers.GRUCell(3)]
    assert keras.layers.StackedRNNCells(cells).cells == cells


def test_variables_are_read_past_casts_and_scopes():
    variable = keras.Variable([1.0, 2.0])
    assert isinstance(internals.raw(variable), tf.Variable)
    with keras.StatelessScope([(variable, tf.constant([3.0, 4.0]))]) as scope:
        assert internals.outer_scope() is scope
        assert internals.read(variable).numpy().tolist() == [1.0, 2.0]
        assert internals.read(variable, scope).numpy().tolist() == [3.0, 4.0]
        assert internals.source(variable, scope) is scope.get_current_value(variable)
    assert internals.outer_scope() is None
    assert internals.source(variable) is internals.raw(variable)


def test_shape_inference_is_recognised():
    seen = []

    class Layer(keras.Layer):
        def call(self, x):
            seen.append(internals.is_symbolic())
            return x

    layer = Layer()
    layer(keras.Input((2,)))
    layer(tf.zeros([1, 2]))
    assert seen == [True, False]


def test_stopped_tapes_are_recognised():
    seen = []

    @tf.recompute_grad
    def recomputed(x):
        seen.append(internals.recording_stopped())
        return 2 * x

    with tf.GradientTape() as tape:
        x = tf.constant(1.0)
        tape.watch(x)
        assert not internals.recording_stopped()
        y = recomputed(x)
    tape.gradient(y, x)
    assert seen == [True, False]


def test_variables_read_by_functions_are_seen():
    first, second = tf.Variable(1.0), tf.Variable(2.0)
    function = tf.function(lambda: first + 1.0)
    function()
    with internals.watch_variables() as watcher, tf.GradientTape():
        function()
    assert [id(v) for v in watcher.watched_variables()] == [id(first)]
    assert second is not first


def test_graphs_say_what_they_are():
    kinds, compiled = [], []

    def note(outer):
        kinds.append(internals.graphs_between(tf.compat.v1.get_default_graph(), outer))
        compiled.append(internals.in_xla())

    @tf.function(jit_compile=True, autograph=False)
    def outer(x):
        graph = tf.compat.v1.get_default_graph()
        note(graph)

        def body(t, x):
            note(graph)
            return t + 1, tf.cond(x > 0, lambda: (note(graph), x)[1], lambda: x)

        x = tf.while_loop(lambda t, _: t < 2, body, (0, x), maximum_iterations=2)[1]
        return tf.function(lambda x: (note(graph), x)[1], autograph=False)(x)

    outer(tf.constant(1.0))
    assert kinds == [[], ["while"], ["cond", "while"], ["function"]]
    assert all(compiled) and not internals.in_xla()
    assert internals.graphs_between(tf.Graph(), tf.Graph()) is None


def test_an_intercepted_call_is_given_back():
    cell = keras.layers.GRUCell(2)
    calls = []

    def wrapper(call):
        def wrapped(*args, **kwargs):
            calls.append(args[0].shape)
            return call(*args, **kwargs)

        return wrapped

    with pytest.raises(ZeroDivisionError), internals.intercepted_call(cell, wrapper):
        cell(tf.zeros([1, 3]), [tf.zeros([1, 2])])
        raise ZeroDivisionError
    cell(tf.zeros([1, 3]), [tf.zeros([1, 2])])
    assert calls == [(1, 3)] and "call" not in vars(cell)


def test_tapes_do_not_record():
    x = tf.constant(2.0)
    for decorate in (lambda function: function, tf.function):

        @decorate
        def gradients():
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                seen = x * x
                with internals.unrecorded():
                    unseen = x * x
            return tape.gradient(seen, x), tape.gradient(unseen, x)

        assert [None if g is None else float(g) for g in gradients()] == [4.0, None]


def test_in_xla():
    found = {}

    def step(name, t):
        found[f"{name} loop"] = internals.in_xla()
        return [t + 1]

    def note(name, x):
        found[name] = internals.in_xla()
        return tf.while_loop(lambda t: t < 2, functools.partial(step, name), [x])

    note("eager", tf.constant(0))
    tf.function(note)("traced", tf.constant(0))
    tf.function(note, jit_compile=True)("compiled", tf.constant(0))
    assert found == {
        "eager": False,
        "eager loop": False,
        "traced": False,
        "traced loop": False,
        "compiled": True,
        "compiled loop": True,
    }
