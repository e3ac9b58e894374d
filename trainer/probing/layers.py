"""The recurrent layers inside a model, and the names under which they report."""

import keras

from trainer.probing import internals


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
