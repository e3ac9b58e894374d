"""Names for the pieces of a checkpoint: variable paths that do not depend on what else the process has built.

Keras numbers unnamed layers over the lifetime of a process: `dense_7` in one is `dense` in the next. These numbers are
replaced by their rank among the layers of the same model. Names that people gave are kept.
"""

import re

import keras
import tensorflow as tf

from looptape.trainer.variables import all_layers, is_seed, path_of, raw

_NUMBERED = re.compile(r"(.+?)(?:_(\d+))?")
_UNNAMED = re.compile(r"variable(_\d+)?")  # a `keras.Variable` without a name, outside every layer


class Names:
    """Stable paths for the variables of some models.

    Args:
        models: Keras layers or models, `tf.Module`s, or anything else with `variables`.
        further: variables that are not in their lists, such as recurrent states.
    """

    def __init__(self, models, further=()):
        self._layers = list({id(layer): layer for model in models for layer in all_layers(model)}.values())
        self._owners = {id(v): layer.name for layer in self._layers for v in layer.variables}  # the innermost is last
        self._by_attribute = {key: path for model in models for key, path in _attribute_paths(model).items()}
        listed = [variable for model in models for variable in getattr(model, "variables", ())]
        self._ranks = self._ranked([*listed, *further])

    def of(self, variable):
        """The path of a variable, with stable numbers."""
        attribute = self._by_attribute.get(id(raw(variable)))
        if attribute is not None:
            return attribute
        path = path_of(variable)
        if isinstance(variable, keras.Variable) and is_seed(variable) and id(variable) in self._owners:
            path = f"{self._owners[id(variable)]}/{variable.name}"  # its own path names no layer
        return "/".join(self._ranks.get(part, part) for part in path.split("/"))

    def layer(self, layer):
        """The stable name of a layer."""
        return self._ranks.get(layer.name, layer.name)

    def slot(self, slot, trained):
        """The path of an optimizer's variable: that of the variable it is about, and the name of the slot."""
        begins = {re.sub("[/:]", "_", getattr(v, "path", None) or v.name) + "_": v for v in trained}
        found = max((begin for begin in begins if slot.name.startswith(begin)), key=len, default=None)
        return slot.name if found is None else f"{self.of(begins[found])}/{slot.name.removeprefix(found)}"

    def _ranked(self, variables):
        """{part of a path that Keras numbered: the same with its rank as the number}."""
        made_up = {layer.name: _snake_case(type(layer).__name__) for layer in self._layers}
        paths = [path_of(variable) for variable in variables]
        parts = [part for path in paths for part in path.split("/")[:-1]]
        parts += [path for path in paths if _UNNAMED.fullmatch(path)]
        numbers = {}
        for part in dict.fromkeys([*parts, *made_up]):
            prefix, number = _NUMBERED.fullmatch(part).groups()
            if made_up.get(part, prefix) == prefix:
                numbers.setdefault(prefix, []).append((int(number or 0), part))
        return {
            part: f"{prefix}_{rank}" if rank else prefix
            for prefix, found in numbers.items()
            for rank, (_, part) in enumerate(sorted(found))
        }


def unique(pairs):
    """{name: item} of (name, item) pairs. Each item appears once; further items of a name get a number."""
    found, seen, counts = {}, set(), {}
    for name, item in pairs:
        if id(item) in seen:
            continue
        seen.add(id(item))
        counts[name] = counts.get(name, 0) + 1
        found[name if counts[name] == 1 else f"{name} ({counts[name]})"] = item
    return found


def _attribute_paths(module):
    """{id: path of attributes} of the variables of a plain `tf.Module`, most of which have no name."""
    if not isinstance(module, tf.Module) or isinstance(module, keras.layers.Layer):
        return {}
    # Sonnet and TensorFlow list a module's variables by this method; the public ones leave the paths out.
    found = module._flatten(predicate=lambda x: isinstance(x, tf.Variable), with_path=True)
    return {id(variable): "/".join(map(str, path)) for path, variable in found}


def _snake_case(name):
    """As Keras makes a layer's name of its class."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
