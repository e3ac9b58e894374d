"""The recurrent layers inside a model: how to find and name them, and how to let somebody else run them."""

import contextlib
import re
from typing import Any, NamedTuple

import keras

from looptape.trainer.recurrent import active, internals
from looptape.trainer.recurrent.loops.cells import inner_cells
from looptape.trainer.recurrent.loops.recurrent_loop import Layout


def find_layers(roots):
    """{name: layer} of every `keras.layers.RNN` inside a model, a layer or a list of them, in the order of
    the model.

    The name is the layer's own if no other has it, else with those of the models around it. A layer that goes
    backwards says so in its name.
    """
    found = {}
    for root in roots if isinstance(roots, (list, tuple)) else [roots]:
        _walk(root, None, found, set())
    own = [path[-1] for path, _ in found.values()]
    names = {}
    for path, layer in found.values():
        name = path[-1] if own.count(path[-1]) == 1 else "/".join(path)
        if layer.go_backwards and "backward" not in layer.name:
            name += "_backward"
        names[_free(name, names)] = layer
    return names


def select_layers(layers, wanted):
    """{name: layer} of those whose whole name matches one of the regular expressions; all for None.

    Args:
        layers: from `find_layers`.
        wanted: a pattern, a list of them (an empty one for no layer), or None.
    """
    if wanted is None:
        return layers
    patterns = [wanted] if isinstance(wanted, str) else wanted
    try:
        for pattern in patterns:
            re.compile(pattern)
    except (TypeError, re.error) as error:
        raise ValueError(
            f"`probe_layers` is {wanted!r}; it must be a name or a regular expression, or a list of them ({error}). "
            f"The layers of the model are {list(layers)}."
        ) from None
    unused = [pattern for pattern in patterns if not any(re.fullmatch(pattern, name) for name in layers)]
    if unused:
        raise ValueError(
            f"`probe_layers` has {unused}, which match no recurrent layer; those of the model are {list(layers)}. Give "
            "names of these or regular expressions, or an empty list to probe nothing but `probe` calls."
        )
    return {name: layer for name, layer in layers.items() if any(re.fullmatch(p, name) for p in patterns)}


def _walk(layer, around, found, seen):
    """`around`: names of the layers around this one without the root's, which all would share; None for the
    root.
    """
    if id(layer) in seen or not isinstance(layer, keras.Layer):
        return
    seen.add(id(layer))
    if isinstance(layer, keras.layers.RNN):
        found.setdefault(id(layer), ((*(around or ()), layer.name), layer))
    for sublayer in internals.sublayers(layer):
        _walk(sublayer, () if around is None else (*around, layer.name), found, seen)


def _free(name, taken):
    candidate, count = name, 2
    while candidate in taken:
        candidate, count = f"{name}_{count}", count + 1
    return candidate


def layout_of(layer):
    """The `Layout` of a Keras recurrent layer."""
    return Layout(layer.go_backwards, layer.unroll, layer.return_sequences, layer.zero_output_for_mask)


class Call(NamedTuple):
    """One call of a layer's `inner_loop`."""

    layer: Any
    sequences: Any  # [batch, time, ...]
    initial_state: Any
    mask: Any  # [batch, time], or None
    training: Any
    anew: Any = None  # `carrying.Anew`: sequences that begin inside it


@contextlib.contextmanager
def run_by(runner, layers):
    """While this lasts, `runner.run_layer(call)` is asked to run each of these layers, in this thread.

    It returns what `RNN.inner_loop` does, (last output, outputs, final states), or None to leave the call to the runner
    around it; in the end Keras runs the layer.
    """
    layers = list(layers)
    loops = internals.replaced_methods(layers, _make_loop)
    calls = internals.replaced_methods([layer for layer in layers if layer.stateful], _make_call, "call")
    with loops, calls, active.runner(runner):
        yield


def _make_call(layer, original):
    def call(sequences, initial_state=None, mask=None, training=False):
        keeper = None if internals.is_symbolic() or active.in_time_step() else active.keeper()
        if keeper is None or not keeper.has_some_rows:
            return original(sequences, initial_state=initial_state, mask=mask, training=training)
        with keeper.on_its_rows(layer, sequences, initial_state) as states:
            return original(sequences, initial_state=states, mask=mask, training=training)

    return call


def _make_loop(layer, original):
    def inner_loop(sequences, initial_state, mask, training=False):
        keeper = None if internals.is_symbolic() or active.in_time_step() else active.keeper()
        if keeper is None:
            return run(sequences, initial_state, mask, training)
        initial_state, anew = keeper.enter(layer, sequences, initial_state)
        last, outputs, states = run(sequences, initial_state, mask, training, anew)
        keeper.leave(layer, states)
        return last, outputs, states

    def run(sequences, initial_state, mask, training, anew=None):
        if not internals.is_symbolic():
            flat = keras.tree.flatten(mask)[0] if keras.tree.is_nested(mask) else mask
            call = Call(layer, sequences, initial_state, flat, training, anew)
            for runner in active.runners():
                found = runner.run_layer(call)
                if found is not None:
                    return found
            if anew is not None:
                raise ValueError(
                    f"`bptt_begins` says that sequences begin inside a window, and the layer {layer.name!r} runs on "
                    "Keras's own loop, which cannot reset its state there. Let sequences begin with a batch (a flag "
                    "[batch]), or see `trainer.summary()` for why Keras runs it."
                )
        return original(sequences, initial_state, mask, training=training)

    return inner_loop


def describe_cells(cell):
    """{name: (number of states, trainable variables)} of the cells of a stack, bottom first; else nothing."""
    found = {}
    for inner in inner_cells(cell):
        name = _free(getattr(inner, "name", type(inner).__name__), found)
        found[name] = (len(keras.tree.flatten(inner.state_size)), list(getattr(inner, "trainable_variables", ())))
    return found
