"""Layers that are frozen by a schedule of the step."""

import re

from looptape.trainer.counters import Phases
from looptape.trainer.variables import all_layers, raw


def check_freeze(value, model):
    """{first step: [pattern of layers frozen from then on]} as `Phases`, or None."""
    if value is None:
        return None
    phases = value if isinstance(value, dict) else {0: value}
    if 0 not in phases or any(isinstance(step, bool) or not isinstance(step, int) or step < 0 for step in phases):
        raise ValueError(
            f"`freeze` is {value!r}; a schedule is {{first step: names of layers}}, its steps are integers and begin "
            "with 0. Use e.g. {0: 'encoder', 1000: ()}, which unfreezes the encoder after 1,000 updates."
        )
    checked = Phases({step: _patterns(phases[step]) for step in sorted(phases)})
    names = [layer.name for layer in all_layers(model) if layer is not model]
    for pattern in (pattern for patterns in checked.values() for pattern in patterns):
        if not any(re.fullmatch(pattern, name) for name in names):
            shown = ", ".join(names[:20]) or "none"
            if not getattr(model, "built", True):
                shown += " so far, because it is not built (call it on a batch first, as in `model(x[:1])`)"
            raise ValueError(
                f"`freeze` has {pattern!r}, which is no layer of the model; its layers are {shown}. Use the name of a "
                "layer, or a regular expression of whole names, such as 'block_[12]'."
            )
    return checked


def _patterns(value):
    if not isinstance(value, str | list | tuple | set | frozenset | None):
        raise TypeError(
            f"`freeze` has {value!r}; it must be the name of a layer, a regular expression of names, or a list of "
            "them. Use e.g. 'encoder', or () for none."
        )
    patterns = [value] if isinstance(value, str) else list(value if value is not None else ())
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"`freeze` has {pattern!r}; it must be the name of a layer or a regular expression of names."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`freeze` has {pattern!r}, which is not a regular expression: {error}.") from None
    return patterns


class Freezing:
    """Freezes and unfreezes layers by a schedule; without one it leaves them alone.

    Args:
        model: the model.
        phases: from `check_freeze`.
    """

    def __init__(self, model, phases):
        self._model, self.phases = model, phases

    def check(self):
        """Refuses a phase in which nothing is trained, before the first step. Leaves every layer as it is."""
        if self.phases is None:
            return
        layers = all_layers(self._model)
        kept = [(layer, layer.trainable) for layer in layers]
        if not any(layer._trainable_variables for layer in layers):  # not built, or nothing to train at all
            return
        try:
            for step in self.phases:
                self.follow(step)
                if not self._model.trainable_variables:
                    raise ValueError(
                        f"`freeze` leaves nothing to train from step {step:,} on: {self.phases[step]} are all layers "
                        "with trainable weights. Leave one out; to end the training there, pass fewer `steps`."
                    )
        finally:
            for layer, trainable in kept:  # a layer comes before those inside it, which it sets, too
                if layer.trainable != trainable:
                    layer.trainable = trainable

    def follow(self, step):
        """Freezes the layers that the update after `step` updates leaves alone, and unfreezes the schedule's others."""
        if self.phases is None:
            return
        frozen = self._layers(self.phases.at(step))
        inside = {id(inner) for layer in frozen for inner in all_layers(layer)}
        for layer in self._named():
            if id(layer) not in inside and not layer.trainable:
                layer.trainable = True  # also everything inside it
        for layer in frozen:
            if layer.trainable:
                layer.trainable = False

    def changes_until(self, step):
        """The first steps of the phases until `step`, and `step` itself."""
        return [*(begin for begin in self.phases or () if 0 < begin < step), step]

    def including(self, variables):
        """The variables, and all others that the schedule trains at some step: state is made for them at once."""
        if self.phases is None:
            return list(variables)
        known = {id(raw(variable)) for variable in variables}
        never = {id(raw(v)) for layer in self._always_frozen() for v in layer.variables}
        others = [v for layer in self._named() for v in _trainable_weights(layer)]
        later = {id(raw(v)): v for v in others if id(raw(v)) not in known | never}
        return [*variables, *later.values()]

    def _layers(self, patterns):
        return [layer for layer in all_layers(self._model) if layer is not self._model and _matches(layer, patterns)]

    def _named(self):
        return self._layers([pattern for patterns in self.phases.values() for pattern in patterns])

    def _always_frozen(self):
        return [layer for layer in self._named() if all(_matches(layer, own) for own in self.phases.values())]


def _matches(layer, patterns):
    return any(re.fullmatch(pattern, layer.name) for pattern in patterns)


def _trainable_weights(layer):
    """The variables of a layer that are trained where it is not frozen."""
    return [variable for inner in all_layers(layer) for variable in inner._trainable_variables]
