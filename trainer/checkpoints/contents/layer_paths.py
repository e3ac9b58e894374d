"""Attribute paths of layers (`encoder/blocks/0`): whether a name in a checkpoint still means the same layer.

Layers without a name are counted in the order in which they are made. A program that makes them in another order
gives each the name of another one, and shapes do not tell them apart.
"""

import re
import warnings
from collections import Counter

import keras

from looptape.trainer.variables import raw

_OF_KERAS = re.compile(r"_layers|_functional|_operations(_by_depth)?|_self_.*|_(non_)?trainable_variables")
_UNNAMED = re.compile(r"variable(_\d+)?")  # a weight that `add_weight` got no name for


class Places:
    """Where in a model the owner of each variable is.

    A path consists of attributes, keys of dicts, and positions in lists, which count what has weights. Layers that
    no attribute holds, as those of a functional model, stand there with their stable name.

    Args:
        root: a Keras layer or model; of anything else no variable has a path.
        names: `state_names.Names` that know it.
        prefix: begins every path.
    """

    def __init__(self, root, names, prefix=""):
        self._names, self._found = names, {}
        if not isinstance(root, keras.layers.Layer):
            return
        paths, level = {id(root): [prefix]}, [root]
        while level:
            known, below = set(paths), {}
            for layer in level:
                start = min(paths[id(layer)])
                self._note(layer, start)
                for part, child in self._children(layer):
                    paths.setdefault(id(child), []).append(_joined(start, part))
                    if id(child) not in known:
                        below[id(child)] = child
            level = list(below.values())
        self._paths = paths

    def of(self, variable):
        """[path] of the layer that owns a variable, sorted; with the attribute of a weight that has no name."""
        owner, attribute = self._found.get(id(raw(variable)), (None, ""))
        return [] if owner is None else sorted({_joined(path, attribute) for path in self._paths[owner]})

    def _note(self, layer, start):
        """Notes the layer as the owner of what is in none of its sub-layers."""
        inside = {id(raw(v)) for part in layer._layers for v in part.variables}
        unnamed = {id(raw(v)): name for name, v in vars(layer).items() if _is_unnamed(v)}
        for variable in layer.variables:
            key = id(raw(variable))
            if key not in inside:
                self._found.setdefault(key, (id(layer), unnamed.get(key, "")))

    def _children(self, layer):
        """[(part of the path, layer)] of the layers with variables that a layer holds."""
        own = {name: value for name, value in vars(layer).items() if not _OF_KERAS.fullmatch(name)}
        held = list(_held(own, set()))
        known = {id(child) for _, child in held}
        listed = [*layer._layers, *(getattr(layer, "layers", ()) or ())]
        rest = {id(child): child for child in listed if id(child) not in known and child.variables}
        return held + [(self._names.layer(child), child) for child in rest.values()]


def _held(value, around):
    """Yields (path, layer) of the layers with variables in an attribute, through lists and dicts."""
    if isinstance(value, keras.layers.Layer):
        if value.variables:
            yield "", value
        return
    if not isinstance(value, dict | list | tuple) or id(value) in around:
        return
    around, position = around | {id(value)}, 0
    for key in value if isinstance(value, dict) else range(len(value)):
        inside = list(_held(value[key], around))
        place = key if isinstance(value, dict) else position
        position += bool(inside)
        yield from ((_joined(str(place), path), layer) for path, layer in inside)


def _joined(*parts):
    return "/".join(part for part in parts if part)


def _is_unnamed(value):
    return isinstance(value, keras.Variable) and _UNNAMED.fullmatch(value.name) is not None


def describe(model, outside, names, state):
    """{name in the checkpoint: [attribute path]} of the variables of a model and of networks beside it.

    Args:
        model: the trainer's model.
        outside: the `OutsideState` of the trainer.
        names: `state_names.Names` of both.
        state: {name: variable} of the checkpoint.
    """
    attributes = {id(raw(v)): attribute for attribute, v in reversed(outside.pieces)}
    roots = [root for root in outside.roots if root is not model and getattr(root, "variables", ())]
    held_by = [attributes.get(id(raw(root.variables[0])), "") for root in roots]
    counts, places = Counter(held_by), [Places(model, names)]
    seen = Counter()
    for root, attribute in zip(roots, held_by, strict=True):
        number = str(seen[attribute]) if counts[attribute] > 1 else ""
        seen[attribute] += 1
        places.append(Places(root, names, _joined(attribute, number)))
    found = {}
    for name, variable in state.items():
        if name.split("/")[0] in ("model", "outside"):
            paths = next((paths for place in places if (paths := place.of(variable))), None)
            found |= {name: paths} if paths else {}
    return found


def differences(before, now):
    """([(path then, path now)] of layers that took another's place, the same of layers whose path is new).

    Args:
        before: {name: [path]} of the checkpoint.
        now: the same of the trainer.
    """
    changed = [(before[name], paths) for name, paths in now.items() if not set(before.get(name, paths)) & set(paths)]
    then = {path for paths in before.values() for path in paths}
    present = {path for paths in now.values() for path in paths}
    moved, renamed = [], []
    for old, new in changed:
        if then & set(new) or present & set(old):
            moved.append((old[0], new[0]))
        elif not any(_ends_with(a, b) or _ends_with(b, a) for a in old for b in new):  # one more model around it
            renamed.append((old[0], new[0]))
    return list(dict.fromkeys(moved)), list(dict.fromkeys(renamed))


def _ends_with(path, end):
    return path.endswith("/" + end)


def compare(before, now, path):
    """Refuses layers that took the places of others, and warns of renamed attributes.

    Args:
        before: from `describe`, when the checkpoint was made; None for one that does not hold it.
        now: from `describe`.
        path: of the checkpoint.
    """
    moved, renamed = differences(before or {}, now)
    if moved:
        each = "; ".join(f"the weights of `{old}` have a name that now belongs to `{new}`" for old, new in moved[:6])
        raise ValueError(
            f"In the checkpoint {path} {each}{'; …' if len(moved) > 6 else ''}. Layers without a name are counted in "
            "the order in which they are made: make them in the order of then, or use another workdir. Layers with a "
            "`name` may be made in any order."
        )
    if renamed:
        each = ", ".join(f"`{old}` is now `{new}`" for old, new in renamed[:6])
        warnings.warn(
            f"Attributes of the model have other names than in the checkpoint {path}: {each}"
            f"{', …' if len(renamed) > 6 else ''}. Its weights are restored by the names of the layers, or by their "
            "order where they have none: make sure that no two layers were exchanged.",
            stacklevel=2,
        )
