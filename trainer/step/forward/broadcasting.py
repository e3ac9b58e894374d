"""Finds [n] broadcast against [n, 1] in the graph of a loss: it trains without an error, on n × n wrong pairs.

So do [n, 1] against [n, 1, 1], and [n, t] against [n, t, 1] where n and t are equal.
"""

import collections

import tensorflow as tf

LIMIT = 2000  # operations looked at, the nearest first; a loss is a few of them behind the model
EXPLICIT = ("Einsum", "BroadcastTo", "Fill", "Outer")  # their code names the shape of the result
DELIBERATE = ("ExpandDims", "Reshape", "StridedSlice", "Sum", "Mean", "Max", "Min", "Pack", "Tile", "BroadcastTo")
FUNCTIONS = ("f", "body", "then_branch", "else_branch")  # attributes of calls, of loops and of conditions
EXPANDED = "expanded_to_same_rank"
_LETTERS = "ntijk"
SIZES = ("Shape", "Size", "Rank", "ShapeN", "ZerosLike", "OnesLike")


@tf.autograph.experimental.do_not_convert  # AutoGraph converts what a hook calls, and reports what it cannot convert
def check_broadcasts(name, values):
    """Raises if a traced loss was computed from [n] and [n, 1] broadcast to [n, n]. Eager values are not looked at.

    All operations that made the values are followed back to the batch, also into a `tf.function`, a loop and the
    branches of a condition. An axis that was added in the code of the loss (`x[:, tf.newaxis]`, `keepdims`) is taken
    for deliberate, and so is a vector that does not depend on the batch, such as a discount for each time step.
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
    """(flat, column), the operands of the nearest such operation, or None."""
    waiting, seen, arguments = collections.deque([values]), set(), {}
    while waiting and len(seen) < LIMIT:
        current = waiting.popleft()
        operation = current.op
        if (key := (operation.graph, operation.name)) in seen:
            continue
        seen.add(key)
        waiting.extend(_inside(current, arguments))
        for flat, column in _pairs(operation):
            flat, column = _given(flat, arguments), _given(column, arguments)
            if not _made_on_purpose(column) and _depends_on_data(flat, arguments):
                return flat, column
        waiting.extend(operation.inputs)
    return None


def _pairs(operation):
    """[(flat, column)] of the operands that an operation broadcasts against each other, whichever operation it is."""
    if len(operation.outputs) != 1 or not 2 <= len(operation.inputs) <= 4 or operation.type in EXPLICIT:
        return []
    inputs, made = list(operation.inputs), operation.outputs[0].shape
    pairs = [(flat, column) for flat in inputs for column in inputs if _is_pair(flat, column)]
    return [pair for pair in pairs if made.rank == pair[1].shape.rank and made[-1] == pair[0].shape[-1]]


def _inside(value, arguments):
    """[tensors that called functions return as this value]; adds {parameter: argument} to `arguments`."""
    call, found = value.op, []
    for attribute in FUNCTIONS:
        function = _function(call, attribute)
        if function is None or value.value_index >= len(function.outputs):
            continue
        given = list(call.inputs)[-len(function.inputs) :] if function.inputs else []
        arguments.update({parameter.ref(): x for parameter, x in zip(function.inputs, given, strict=False)})
        found.append(function.outputs[value.value_index])
    return found


def _function(call, attribute):
    """The graph of a function that an operation calls, or None."""
    name = call.node_def.attr[attribute].func.name if attribute in call.node_def.attr else ""
    if not name or not hasattr(call.graph, "_get_function"):
        return None
    return getattr(call.graph._get_function(name), "graph", None)


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


def _made_on_purpose(column, depth=20):
    """Whether the last axis was added in code: by the operation itself, or to all that it is computed from.

    Of the operands only those of the column's own shape count: others broadcast to it.
    """
    operation = column.op
    if operation.type == "Reshape" and operation.inputs[0].shape[-1:] == [1]:  # as a dense layer of sequences does it
        return depth > 0 and _made_on_purpose(operation.inputs[0], depth - 1)
    if operation.type in DELIBERATE:
        return EXPANDED not in operation.name and not _is_slice_of_columns(operation)
    shape = column.shape.as_list()
    alike = [x for x in operation.inputs if x.shape.rank is not None and x.shape.as_list() == shape]
    return bool(alike) and depth > 0 and all(_made_on_purpose(x, depth - 1) for x in alike)


def _is_slice_of_columns(operation):
    """Whether it is `x[:, 2:3]`, which keeps the axes there are."""
    return operation.type == "StridedSlice" and not operation.get_attr("new_axis_mask")


def _depends_on_data(tensor, arguments):
    """Whether the tensor's values, not only its size, come from something other than constants and variables."""
    waiting, seen = [tensor], set()
    while waiting and len(seen) < LIMIT:
        current = _given(waiting.pop(), arguments)
        operation = current.op
        if (key := (operation.graph, operation.name)) in seen or operation.type in SIZES:
            continue
        seen.add(key)
        inputs = [x for x in operation.inputs if x.dtype not in (tf.resource, tf.variant)]
        if not inputs and operation.type not in ("Const", "ReadVariableOp") and current.dtype != tf.resource:
            return True
        waiting.extend(inputs)
    return False
