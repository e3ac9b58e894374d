"""Descriptions of layers beyond their configuration: custom code, the wiring of a functional model, precision."""

import types

import keras

from looptape.trainer.checkpoints.contents import descriptions

KINDS = ("call", "wiring", "precision")  # not in checkpoints of earlier versions
_PLAIN = (bool, int, float, str)
_LEFT_OUT = ("name", "built", "trainable")


def describe(layer, names):
    """{kind: description} of a layer or model, for those of `KINDS` that apply.

    Args:
        layer: the layer.
        names: `state_names.Names` of the model.
    """
    found = {"precision": layer.dtype_policy.name}
    call = getattr(type(layer), "call", None)
    if not descriptions.from_library(call):
        values = {k: v for k, v in vars(layer).items() if k.lstrip("_") not in _LEFT_OUT and isinstance(v, _PLAIN)}
        found["call"] = descriptions.describe_hook(type(layer), "call", values)
    by_depth = getattr(layer, "_nodes_by_depth", None)  # of a functional model; Keras has no public list of them
    if by_depth is not None:
        found["wiring"] = [_describe_node(node, names) for depth in sorted(by_depth) for node in by_depth[depth]]
    return found


def described_function(value):
    """The description of a function of one's own among a layer's options, or None for anything else.

    Keras's configuration holds its byte code, which differs from call to call.
    """
    own = isinstance(value, types.FunctionType) and not descriptions.from_library(value)
    return descriptions.describe(value) if own else None


def _describe_node(node, names):
    """ "add(dense, input_layer)": an operation, and those whose outputs it takes."""
    sources = [tensor._keras_history for tensor in node.input_tensors]
    taken = [(_name(source.operation, names), source.tensor_index) for source in sources]
    inputs = ", ".join(f"{name}[{index}]" if index else name for name, index in taken)
    return f"{_name(node.operation, names)}({inputs})"


def _name(operation, names):
    return names.layer(operation) if isinstance(operation, keras.layers.Layer) else type(operation).__name__
