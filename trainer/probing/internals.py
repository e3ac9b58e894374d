"""Every name of Keras and TensorFlow that is not public and that probing needs, in one place.

`tests/probing/test_internals.py` holds each of them against the installed versions. Nothing else in this
package may reach for an underscore.
"""

import contextlib
import threading

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util

_LOCK = threading.Lock()
_REPLACED: dict = {}  # id(layer) -> number of sessions, over all threads, that want its loop replaced

# Layers whose `inner_loop` is known to be the loop over the cell and nothing else.
KNOWN_LOOPS = {cls.inner_loop for cls in (keras.layers.RNN, keras.layers.LSTM, keras.layers.GRU)}


def sublayers(layer):
    """The layers that a layer holds, in the order in which it got them."""
    return list(getattr(layer, "_layers", ()))


def takes_training(cell):
    """Whether `cell.call` has an argument `training`; Keras's own loop asks the same way."""
    return isinstance(cell, keras.Layer) and cell._call_has_training_arg


def read(variable, scope=None):
    """The value of a Keras variable as a tensor, from `scope` if that has one, without casting."""
    value = scope.get_current_value(variable) if scope is not None else None
    return tf.convert_to_tensor(variable._value if value is None else value)


def source(variable, scope=None):
    """What a Keras variable is read from: a tensor that `scope` holds, or the `tf.Variable`."""
    value = scope.get_current_value(variable) if scope is not None else None
    return variable._value if value is None else value


def raw(variable):
    """The `tf.Variable` that a Keras variable is made of."""
    return variable._value


def outer_scope():
    """The `keras.StatelessScope` that is active, or None."""
    return get_stateless_scope()


def is_symbolic():
    """Whether Keras is only inferring shapes."""
    return in_symbolic_scope()


def recording_stopped():
    """Whether tapes are blind here, as they are inside `tf.recompute_grad`."""
    with tf.GradientTape():
        return not record.could_possibly_record()


def watch_variables():
    """A context that notes which trainable variables are read, also by functions traced before:
    `.watched_variables()`.
    """
    return record.VariableWatcher()


def in_xla():
    """Whether this is being traced for `jit_compile=True`."""
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def graph_kind(graph):
    """ "while", "cond" or "function": what a `FuncGraph` is the body of."""
    kind = type(graph).__name__
    if kind.startswith("While"):
        return "while"
    return "cond" if kind.startswith("CondBranch") else "function"


def graphs_between(inner, outer):
    """The kinds of graphs from `inner` outwards up to, not including, `outer`. None if `outer` does not hold
    `inner`.
    """
    kinds = []
    while inner is not outer:
        if inner is None or not hasattr(inner, "outer_graph"):
            return None
        kinds.append(graph_kind(inner))
        inner = inner.outer_graph
    return kinds


def note_probe(name):
    """Remembers that the function being traced has a `probe` in it that does nothing; see `silent_probes`."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        graph.looptape_probes = getattr(graph, "looptape_probes", frozenset()) | {name}
        graph = getattr(graph, "outer_graph", None)


_CALLS = {
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
    "While": ("body",),
    "StatelessWhile": ("body",),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
}


def silent_probes(graph, start=0):
    """Names of `probe` calls in functions that a graph calls and that were traced while no session was active."""
    found = set()
    for op in graph.get_operations()[start:]:
        for attribute in _CALLS.get(op.type, ()):
            called = graph._get_function(op.get_attr(attribute).name)
            if called is not None and called.graph is not None:
                is_function = attribute == "f"
                found |= getattr(called.graph, "looptape_probes", set()) if is_function else silent_probes(called.graph)
    return found


@contextlib.contextmanager
def replaced_loops(layers, make_loop):
    """Replaces `layer.inner_loop` on these very objects while the context lasts; `make_loop(layer, original)`
    gives it.

    Replicas run in threads that share the layers: the replacement stays until the last of them leaves, and
    must itself find out whether its own thread wants it.
    """
    installed = []
    try:
        for layer in layers:
            with _LOCK:
                count = _REPLACED.get(id(layer), 0)
                if count == 0:
                    # Not by assignment: Keras would start to track the function.
                    object.__setattr__(layer, "inner_loop", make_loop(layer, layer.inner_loop))
                _REPLACED[id(layer)] = count + 1
            installed.append(layer)
        yield
    finally:
        for layer in installed:
            with _LOCK:
                _REPLACED[id(layer)] -= 1
                if _REPLACED[id(layer)] == 0:
                    del _REPLACED[id(layer)]
                    object.__delattr__(layer, "inner_loop")


@contextlib.contextmanager
def intercepted_call(cell, wrapper):
    """Lets `wrapper(original_call)` stand in for `cell.call` while the context lasts."""
    object.__setattr__(cell, "call", wrapper(cell.call))
    try:
        yield
    finally:
        object.__delattr__(cell, "call")
