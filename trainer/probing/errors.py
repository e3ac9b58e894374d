"""Checks that refuse what cannot be probed, before it gives a silent zero. Each check names the layer and what
to do.
"""

import tensorflow as tf

from looptape.trainer.recurrent import active, internals


class ProbeError(RuntimeError):
    """A layer or a `probe` call whose time steps cannot be reported where it stands."""

    # AutoGraph raises an error anew in the caller's name, and keeps its type only if it is made like this.
    __init__ = Exception.__init__


def check_layer(layer, name):
    """Refuses a recurrent layer that has no steps, or a loop of its own."""
    if getattr(layer, "use_cudnn", None) is True:
        raise ProbeError(
            f"The layer {name!r} has use_cudnn=True: cuDNN computes all time steps in one operation, so that "
            "there is nothing to probe. Use use_cudnn='auto' (it is then bypassed in probed updates only) or "
            "False."
        )
    if type(layer).inner_loop not in internals.KNOWN_LOOPS and not getattr(layer, "runs_recurrent_loop", False):
        raise ProbeError(
            f"The layer {name!r} ({type(layer).__name__}) has an `inner_loop` of its own, which a probed "
            "update would replace. Put the computation of one time step into a cell, or write the loop with "
            "`looptape.recurrent_loop`, or use `probe` inside it and leave the layer out of the "
            "session."
        )


def check_place(what, graph):
    """Refuses a place from which no gradient would come back. Returns the kinds of graphs up to the session's
    own.

    Args:
        what: for the message, such as "The layer 'lstm'".
        graph: the graph in which the session was entered, None if eager.
    """
    if internals.recording_stopped() and not active.in_time_step():
        raise ProbeError(
            f"{what} is inside `tf.recompute_grad` (or `keras.remat`): its forward pass is not "
            "recorded, and no gradient of its time steps comes back. Take it out of the recomputed part, or "
            "turn recomputation off in probed updates."
        )
    if graph is None:
        kinds = [] if tf.executing_eagerly() else ["function"]
    else:
        kinds = internals.graphs_between(tf.compat.v1.get_default_graph(), graph)
    if kinds is None or "function" in kinds:
        raise ProbeError(
            f"{what} is inside a nested `tf.function` (or `tf.vectorized_map`, a `tf.data` map): gradients "
            "of its time steps do not leave it. Call the undecorated function; the training step around it "
            "is traced anyway."
        )
    return kinds


def refuse_loop(what, kinds):
    """Refuses a loop inside another loop or a branch, whose runs would be summed."""
    if kinds:
        inside = "a loop" if "while" in kinds else "a branch (`tf.cond`)"
        raise ProbeError(
            f"{what} runs inside {inside}: the gradients of its runs would be summed over. Call it outside, "
            "leave it out (`probe_layers` of the trainer, `only` of a session), or use "
            "`probe(name, tensor, (outer, inner))` inside it."
        )


def check_reached(layers, reached, variables_read):
    """Refuses layers whose weights were used although their loop never ran under our eyes.

    Args:
        layers: {name: layer} of the session.
        reached: the ids of the layers whose loop ran.
        variables_read: ids of the `tf.Variable`s that the forward pass read.
    """
    hidden = []
    for name, layer in layers.items():
        own = [internals.raw(variable) for variable in layer.trainable_variables]
        if id(layer) not in reached and any(id(variable) in variables_read for variable in own):
            hidden.append(name)
    if hidden:
        raise ProbeError(
            f"The weights of {hidden} were used, but their time steps were not seen: the layers are inside a "
            "`tf.function` that was traced before, or call something else than their `inner_loop`. Call the "
            "undecorated function, or leave these layers out (`probe_layers` of the trainer, `only` of a session)."
        )


def check_silent(graph, start):
    """Refuses `probe` calls in functions that were traced before, without a session: they would report nothing.

    Args:
        graph: the graph in which the session was entered, None if eager, where it is unknown.
        start: number of operations that it had by then.
    """
    names = sorted(internals.silent_probes(graph, start)) if graph is not None else []
    if names:
        raise ProbeError(
            f"The probes {names} are in a `tf.function` that was traced before, while nothing was probed: they report "
            "nothing. Call the undecorated function; the training step around it is traced anyway."
        )


def check_differentiable(graph, records):
    """Refuses loops that XLA cannot differentiate, before it says so in its own words."""
    if graph is None or not internals.in_xla():
        return
    for record in records:
        for source in record.sources.values():
            for op in source.consumers():
                if op.type in ("While", "StatelessWhile") and tf.get_static_value(op.inputs[1]) == -1:
                    raise ProbeError(
                        f"`probe({record.name!r}, ...)` is in a loop without a bound on its iterations, "
                        "which XLA cannot differentiate. Pass `maximum_iterations` to `tf.while_loop`, write "
                        "`for t in tf.range(n)`, or set "
                        "`tf.autograph.experimental.set_loop_options(maximum_iterations=n)` in a `while` "
                        "loop; or use jit_compile=False."
                    )


def check_static(name, shape):
    if not shape.is_fully_defined():
        raise ProbeError(
            f"`probe({name!r}, ...)` has to keep whole gradients, but its tensor has the shape [batch, "
            f"*{shape}] in a graph loop. Give the sizes with `tensor.set_shape`, or ask for norms only."
        )


def raise_unknown_batch(name):
    raise ProbeError(
        f"`probe({name!r}, ...)` has to report each example, but the batch size of its tensor is unknown in a "
        "graph loop. Pass `batch=tf.shape(inputs)[0]` to the session, or give the tensor a static batch size."
    )


def raise_no_examples(name):
    raise ProbeError(
        f"`probe({name!r}, ...)` is in a graph loop, where norms per example are kept on request only. Use "
        "`ProbeSession(..., per_example=True)`, or `totals` instead of `report`."
    )


def raise_no_gradient(name):
    raise ProbeError(
        f"No gradient reaches the time steps of {name!r}. Either its output has no influence on the loss "
        "(use it in one, or leave it out of the session), or it is cut off on the way (`tf.stop_gradient`, "
        "`.numpy()`, an integer cast), or the tape was told not to watch: with "
        "`watch_accessed_variables=False` pass `tape=` to the session."
    )
