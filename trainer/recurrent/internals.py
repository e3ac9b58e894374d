"""Every name of Keras and TensorFlow that is not public and that recurrent loops and probing need, in one
place.

`tests/trainer/recurrent/test_internals.py` holds each of them against the installed versions. Nothing else in
`trainer/recurrent/` and `trainer/probing/` may reach for an underscore.
"""

import contextlib
import copy
import threading

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util

_LOCK = threading.Lock()
_REPLACED: dict = {}  # (id(layer), method) -> number of sessions, over all threads, that want it replaced

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
    """The source of a Keras variable's value: a tensor that `scope` holds, or the `tf.Variable`."""
    value = scope.get_current_value(variable) if scope is not None else None
    return variable._value if value is None else value


def raw(variable):
    """The `tf.Variable` that a Keras variable is made of."""
    return variable._value


def outer_scope():
    """The `keras.StatelessScope` that is active, or None."""
    return get_stateless_scope()


# What Keras keeps for the thread while layers are called: who is called in training mode, and in which precision.
_CONTEXT = ("current_call_ctx", "autocast_scope")


def call_context():
    """Keras's context of the layers that are being called, for `in_call_context`."""
    return {name: copy.copy(global_state.get_global_attribute(name)) for name in _CONTEXT}


@contextlib.contextmanager
def in_call_context(context):
    """Calls a cell as if still inside the layers that were being called when `context` was taken."""
    present = {name: global_state.get_global_attribute(name) for name in _CONTEXT}
    try:
        for name, value in context.items():
            global_state.set_global_attribute(name, copy.copy(value))
        yield
    finally:
        for name, value in present.items():
            global_state.set_global_attribute(name, value)


def dropout_masks(cell):
    """[(cell, {attribute: mask})] of a cell and those inside it: Keras drops them when the layer's call ends."""
    found = []
    for inner in [cell, *getattr(cell, "cells", ()), *sublayers(cell)]:
        masks = {name: getattr(inner, name) for name in _MASKS if getattr(inner, name, None) is not None}
        if masks and all(inner is not other for other, _ in found):
            found.append((inner, masks))
    return found


_MASKS = ("_dropout_mask", "_recurrent_dropout_mask")


@contextlib.contextmanager
def with_dropout_masks(masks):
    """Lets the cells find these masks again, from `dropout_masks`."""
    present = [(cell, name, getattr(cell, name)) for cell, own in masks for name in own]
    try:
        for cell, own in masks:
            for name, mask in own.items():
                setattr(cell, name, mask)
        yield
    finally:
        for cell, name, mask in present:
            setattr(cell, name, mask)


def is_symbolic():
    """Whether Keras is only inferring shapes."""
    return in_symbolic_scope()


def recording_stopped():
    """Whether tapes are blind here, as they are inside `tf.recompute_grad`."""
    with tf.GradientTape():
        return not record.could_possibly_record()


def unrecorded():
    """A context that tapes are blind in."""
    return record.stop_recording()


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


def in_loop():
    """Whether the body of a `tf.while_loop` is being traced."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if graph_kind(graph) == "while":
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


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


# Operations with an effect that may as well happen twice, or that only hold others.
_HARMLESS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "Assert", "PrintV2", "CheckNumericsV2", *_CALLS}


def operations_since(start=None):
    """The operations of the graph being traced, from number `start` on; their number if that is None."""
    found = tf.compat.v1.get_default_graph().get_operations()
    return len(found) if start is None else found[start:]


def unrepeatable(operations):
    """Types of the operations, also in functions that are called, that give something else when they run again."""
    found = set()
    for op in operations:
        if op.op_def is not None and op.op_def.is_stateful and op.type not in _HARMLESS:
            found.add(op.type)
        for attribute in _CALLS.get(op.type, ()):
            called = op.graph._get_function(op.get_attr(attribute).name)
            if called is not None and called.graph is not None:
                found |= unrepeatable(called.graph.get_operations())
    return found


# Operations whose results are kept, because they cost more to compute again than to read.
_COSTLY = {"MatMul", "BatchMatMulV2", "Einsum", "Conv2D", "Conv3D", "DepthwiseConv2dNative"}
_COSTLY |= {
    "Sigmoid",
    "Tanh",
    "Exp",
    "Erf",
    "Log",
    "Log1p",
    "Softplus",
    "Softmax",
    "Pow",
    "Sqrt",
    "Rsqrt",
    "Elu",
    "Selu",
}


def costly_results(operations):
    """The results of matrix products, convolutions and the like, in the order in which they were made."""
    return [op.outputs[0] for op in operations if op.type in _COSTLY]


def needed_results(operations, targets, sources):
    """Positions in `costly_results(operations)` of those that a gradient of `targets` is computed from. Traced.

    Those that only lead to another one are left out: from a sigmoid on, nobody asks for the matrix product inside it.
    """
    costly = {id(result): position for position, result in enumerate(costly_results(operations))}
    start = operations_since()
    with unrecorded():
        tf.gradients(targets, sources)
    known, seen, needed = {id(op) for op in operations}, set(), set()
    remaining = [tensor for op in operations_since(start) for tensor in op.inputs]
    while remaining:
        tensor = remaining.pop()
        if id(tensor.op) not in known or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if id(tensor) in costly:
            needed.add(costly[id(tensor)])
        else:
            remaining += tensor.op.inputs
    return sorted(needed)


def replace_tensor(tensor, value):
    """Lets everything that was made from `tensor` in the graph being traced take `value`, which is the same number.

    What was differentiated before keeps its gradient; the operation behind `tensor` is not run any more.
    """
    for op in tensor.consumers():
        for index, other in enumerate(op.inputs):
            if other is tensor:
                op._update_input(index, value)


def captured_by_loop(result):
    """The tensors that the body of a `tf.while_loop` captured; `result` is one of those that it returned."""
    op = result.op
    while op.type not in ("While", "StatelessWhile"):
        op = op.inputs[0].op
    graph = op.graph._get_function(op.get_attr("body").name).graph
    return list(graph.external_captures)


def captured(tensor):
    """The placeholder of an outer graph's tensor in the graph being traced."""
    graph = tf.compat.v1.get_default_graph()
    return tensor if getattr(tensor, "graph", None) is graph else graph.capture(tensor)


def symbolic_gradients(targets, sources, seeds, stop=()):
    """[gradient of each source], dense, zeros where nothing is connected. `stop`: tensors to hold constant.

    `tf.gradients` is what TensorFlow differentiates the body of a loop by: a tape sums in another order.
    """
    found = tf.gradients(targets, sources, list(seeds), stop_gradients=list(stop) or None)
    return [_dense(gradient, source) for gradient, source in zip(found, sources, strict=True)]


def _dense(gradient, source):
    if gradient is not None:
        return tf.convert_to_tensor(gradient)
    if source.dtype == tf.resource:
        data = tf.raw_ops.VariableShape(input=source)
        return tf.zeros(data)
    return tf.zeros_like(source)


def is_tracked(tensor):
    """Whether a tape that is active here wants the gradient of a tensor."""
    return record.should_record_backprop([tensor])


@contextlib.contextmanager
def replaced_methods(layers, make, method="inner_loop"):
    """Replaces a method of these very objects while the context lasts; `make(layer, original)` gives it.

    Replicas run in threads that share the layers: the replacement stays until the last of them leaves, and
    must itself find out whether its own thread wants it.
    """
    installed = []
    try:
        for layer in layers:
            with _LOCK:
                count = _REPLACED.get((id(layer), method), 0)
                if count == 0:
                    # Not by assignment: Keras would start to track the function.
                    object.__setattr__(layer, method, make(layer, getattr(layer, method)))
                _REPLACED[id(layer), method] = count + 1
            installed.append(layer)
        yield
    finally:
        for layer in installed:
            with _LOCK:
                _REPLACED[id(layer), method] -= 1
                if _REPLACED[id(layer), method] == 0:
                    del _REPLACED[id(layer), method]
                    object.__delattr__(layer, method)


@contextlib.contextmanager
def intercepted_call(cell, wrapper):
    """Lets `wrapper(original_call)` stand in for `cell.call` while the context lasts."""
    object.__setattr__(cell, "call", wrapper(cell.call))
    try:
        yield
    finally:
        object.__delattr__(cell, "call")
