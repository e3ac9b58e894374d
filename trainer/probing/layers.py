"""The recurrent layers inside a model: how to find, name and run them on our own loop."""

import keras

from trainer.probing import active, internals
from trainer.probing.cells import inner_cells, run_cell
from trainer.probing.loop import Layout


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


def make_loop(layer, original):
    """What stands in for `layer.inner_loop`: the same on our own loop, for the threads whose session wants
    it.
    """

    def inner_loop(sequences, initial_state, mask, training=False):
        session = active.session()
        if session is None or not session.wants(layer):
            return original(sequences, initial_state, mask, training=training)
        record = session.open_layer(layer)
        mask = keras.tree.flatten(mask)[0] if keras.tree.is_nested(mask) else mask
        return run_cell(layer.cell, sequences, initial_state, mask, training, record.layout, record)

    return inner_loop


def describe_cells(cell):
    """{name: (number of states, trainable variables)} of the cells of a stack, bottom first; else nothing."""
    found = {}
    for inner in inner_cells(cell):
        name = _free(getattr(inner, "name", type(inner).__name__), found)
        found[name] = (len(keras.tree.flatten(inner.state_size)), list(getattr(inner, "trainable_variables", ())))
    return found
