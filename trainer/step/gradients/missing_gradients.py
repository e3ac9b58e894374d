"""Why no gradient reaches a variable, in words."""

import warnings

import tensorflow as tf

from looptape.trainer.variables import path_of, raw

# Operations through which no gradient flows, by what a person would call them.
_BLOCKERS = {
    "StopGradient": "`tf.stop_gradient`",
    "PreventGradient": "`tf.raw_ops.PreventGradient`",
    "ArgMax": "`argmax`",
    "ArgMin": "`argmin`",
    "Round": "`round`",
    "Rint": "`rint`",
    "Floor": "`floor`",
    "Ceil": "`ceil`",
    "Sign": "`sign`",
    "Greater": "a comparison",
    "GreaterEqual": "a comparison",
    "Less": "a comparison",
    "LessEqual": "a comparison",
    "Equal": "a comparison",
    "EagerPyFunc": "`tf.py_function`",
    "PyFunc": "`tf.numpy_function`",
    "PyFuncStateless": "`tf.numpy_function`",
}


def check(variables, live, forward, policy):
    """Raises or warns about variables that no loss reaches, as `on_none_gradient` says.

    Args:
        variables: the trainable ones.
        live: [bool], which of them some loss reaches.
        forward: see `explain`.
        policy: "error", "warn" or "ignore".
    """
    if not variables:
        raise ValueError(
            "The model has no trainable variables. Set `trainable = True` on the layers to train, or build the "
            "model before training it."
        )
    dead = [variable for variable, reached in zip(variables, live, strict=True) if not reached]
    if not dead or policy == "ignore":
        return
    message = explain(dead, forward, policy)
    if policy == "error" or not any(live):
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=2)


def explain(dead, forward, policy):
    """A message about variables that no loss reaches.

    Args:
        dead: the variables.
        forward: function that computes {name: Term} once more, in the graph being traced.
        policy: "error" or "warn", for the remedy.
    """
    with tf.GradientTape(persistent=True) as tape:
        terms = forward()
    sums = {name: term.sum for name, term in terms.items()}
    read = {id(variable) for variable in tape.watched_variables()}
    lines = [f"No gradient reaches {[path_of(variable) for variable in dead]} from any loss ({', '.join(sums)})."]
    for variable in dead:
        lines.append(f"  {path_of(variable)}: {_reason(raw(variable), read, list(sums.values()))}")
    lines.append(
        "Freeze them (`trainable = False`) or use their output in a loss."
        + (" To train without them, set `on_none_gradient = 'ignore'` on the trainer." if policy == "error" else "")
    )
    return "\n".join(lines)


def _reason(variable, read, losses):
    if id(variable) not in read:
        return (
            "it is not read in the forward pass (not used, or read outside it: in the constructor, as a NumPy array, "
            "before the loss is computed)"
        )
    if tf.executing_eagerly():
        return "it is read, but its path to every loss is cut (`tf.stop_gradient`, an integer cast, NumPy, `argmax`)"
    blocker = _find_blocker(variable, losses)
    if blocker is None:
        return "it is read, but nothing that is computed from it enters a loss (or it leaves the graph through NumPy)"
    return f"its path to the losses is cut by {blocker}"


def _find_blocker(variable, losses):
    """The first operation between a variable and the losses through which no gradient flows, or None."""
    graph = losses[0].graph
    handle = next((inner for outer, inner in graph.captures if outer is variable.handle), None)
    if handle is None:
        return None
    needed = _ancestors(losses)
    queue, seen = list(handle.consumers()), set()
    while queue:
        operation = queue.pop(0)
        if operation.name in seen or operation.name not in needed:
            continue
        seen.add(operation.name)
        blocker = _blocker(operation)
        if blocker:
            return blocker
        queue += [consumer for output in operation.outputs for consumer in output.consumers()]
    return None


def _ancestors(tensors):
    """Names of all operations that the tensors are computed from."""
    queue, seen = [tensor.op for tensor in tensors], set()
    while queue:
        operation = queue.pop()
        if operation.name not in seen:
            seen.add(operation.name)
            queue += [tensor.op for tensor in operation.inputs]
    return seen


def _blocker(operation):
    if operation.type == "Cast" and not operation.outputs[0].dtype.is_floating:
        return f"a cast to {operation.outputs[0].dtype.name} ({operation.name})"
    if operation.type in _BLOCKERS:
        return f"{_BLOCKERS[operation.type]} ({operation.name})"
    return None
