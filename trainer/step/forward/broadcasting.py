"""Finds [n] broadcast against [n, 1] in the graph of a loss: it trains without an error, on n × n wrong pairs.

So do [n, 1] against [n, 1, 1], and [n, t] against [n, t, 1] where n and t are equal.
"""

import tensorflow as tf

LIMIT = 2000  # operations looked at; a loss is a few of them behind the model
PAIRWISE = ("Sub", "SquaredDifference", "AddV2", "Add", "Mul", "RealDiv", "DivNoNan", "MulNoNan", "Maximum", "Minimum")
FOLLOWED = (
    *PAIRWISE,
    *("Square", "Abs", "Sqrt", "Exp", "Log", "Log1p", "Softplus", "Relu", "Neg", "Pow", "SelectV2", "Cast", "Identity"),
    *("Cosh", "Expm1", "Elu", "LeakyRelu", "Erf", "Sign", "Rsqrt", "Reciprocal", "ClipByValue", "AddN"),
    *("Mean", "Sum", "Max", "Min", "Prod", "Sigmoid", "Tanh", "Reshape", "Squeeze", "ExpandDims", "Einsum"),
    *("StridedSlice", "ConcatV2", "Pack", "IdentityN", "Real", "Conj", "Transpose"),
)
CALLS = ("PartitionedCall", "StatefulPartitionedCall")  # a loss that is a `tf.function` itself
RENAMED = ("Cast", "Identity", "StopGradient", "Neg")
DELIBERATE = ("ExpandDims", "Reshape", "StridedSlice", "Sum", "Mean", "Max", "Min", "Pack", "Tile")
EXPANDED = "expanded_to_same_rank"
_LETTERS = "ntijk"
SIZES = ("Shape", "Size", "Rank", "ShapeN", "ZerosLike", "OnesLike")


@tf.autograph.experimental.do_not_convert  # AutoGraph converts what a hook calls, and reports what it cannot convert
def check_broadcasts(name, values):
    """Raises if a traced loss was computed from [n] and [n, 1] broadcast to [n, n]. Eager values are not looked at.

    The operations that made the values are followed back, through sums and means too, and into a `tf.function`. An
    axis that was added in the code of the loss (`x[:, tf.newaxis]`, `keepdims`) is taken for deliberate, and so is a
    vector that does not depend on the batch, such as a discount for each time step.
    """
    if not isinstance(values, tf.Tensor) or not hasattr(values, "graph"):
        return
    found = _find(values)
    if found is not None:
        flat, column = found
        own = [letter if size is None else str(size) for letter, size in zip(_LETTERS, flat.shape, strict=False)]
        pairs = ", ".join([own[0], *own])
        shape, last = ", ".join(own), "[:, 0]" if len(own) == 1 else "[..., 0]"
        raise ValueError(
            f"Loss {name!r} combines a tensor of shape [{shape}] with one of shape [{shape}, 1], which broadcasts to "
            f"[{pairs}]: every target against every output. Both must have the same shape. Write e.g. "
            f"`outputs{last}` for the outputs, or `targets{last[:-2]}tf.newaxis]` for the targets. If all pairs are "
            "meant, write `x[tf.newaxis, :]` for the first."
        )


def expanded(tensor):
    """A tensor [n] as [n, 1], not taken for deliberate: the trainer aligned it, not the code of the loss.

    >>> expanded(tf.zeros([3])).shape.as_list()
    [3, 1]
    """
    return tf.expand_dims(tensor, -1, name=EXPANDED)


def _find(values):
    """(flat, column), the operands of the first such operation, or None."""
    waiting, seen, arguments = [values], set(), {}
    while waiting and len(seen) < LIMIT:
        current = waiting.pop()
        operation = current.op
        if (key := (operation.graph, operation.name)) in seen:
            continue
        seen.add(key)
        if operation.type in CALLS:
            waiting.extend(_inside(current, arguments))
        if operation.type not in FOLLOWED:
            continue
        inputs = list(operation.inputs)
        if operation.type in PAIRWISE:
            flat, column = sorted(inputs, key=lambda x: -1 if x.shape.rank is None else x.shape.rank)
            if _is_pair(flat, column):
                flat, column = _given(flat, arguments), _given(column, arguments)
                if not _made_on_purpose(column) and _depends_on_data(flat):
                    return flat, column
        waiting.extend(inputs)
    return None


def _inside(value, arguments):
    """[the tensor that a called function returns as this value]; adds {parameter: argument} to `arguments`."""
    call = value.op
    called = value.graph._get_function(call.get_attr("f").name)
    graph = getattr(called, "graph", None)
    if graph is None:
        return []
    arguments.update({parameter.ref(): given for parameter, given in zip(graph.inputs, call.inputs, strict=True)})
    return [graph.outputs[value.value_index]]


def _given(tensor, arguments):
    """The argument of a called function, if the tensor is one of its parameters; else the tensor."""
    while tensor.ref() in arguments:
        tensor = arguments[tensor.ref()]
    return tensor


def _is_pair(flat, column):
    rank = flat.shape.rank
    if not rank or column.shape.rank != rank + 1 or column.shape[-1] != 1:
        return False
    return flat.shape.as_list() == column.shape[:-1].as_list() and flat.shape[0] not in (0, 1)


def _made_on_purpose(column):
    operation = column.op
    while operation.type in RENAMED:
        operation = operation.inputs[0].op
    return operation.type in DELIBERATE and EXPANDED not in operation.name and not _is_slice_of_columns(operation)


def _is_slice_of_columns(operation):
    """Whether it is `x[:, 2:3]`, which keeps the axes there are."""
    return operation.type == "StridedSlice" and not operation.get_attr("new_axis_mask")


def _depends_on_data(tensor):
    """Whether the tensor's values, not only its size, come from something other than constants and variables."""
    waiting, seen = [tensor], set()
    while waiting and len(seen) < LIMIT:
        current = waiting.pop()
        operation = current.op
        if operation.name in seen or operation.type in SIZES:
            continue
        seen.add(operation.name)
        inputs = [x for x in operation.inputs if x.dtype not in (tf.resource, tf.variant)]
        if not inputs and operation.type not in ("Const", "ReadVariableOp") and current.dtype != tf.resource:
            return True
        waiting.extend(inputs)
    return False
