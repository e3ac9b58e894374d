"""Variables or features that several losses share, by which a combiner compares the losses' gradients.

With a trunk and heads, the gradients of K losses with respect to the trunk's output cost one backward pass through
each head, and one backward pass through the trunk is enough for their combination. Micro-batches and replicas do not
know the combination before the last of them is done: there, each loss has its own backward pass, and only the inner
products of the features' gradients are summed, which gives the same numbers.
"""

import contextlib

import keras
import tensorflow as tf

from looptape.losses import Combiner
from looptape.losses.combiners.numerics import gramian
from looptape.trainer.step.gradients import combination, stages
from looptape.trainer.step.plan import Backward
from looptape.trainer.variables import all_layers, path_of, raw

HEAD_GRADIENTS = ("weighted", "own")


class Features:
    """The features that were shared in one forward pass.

    Args:
        tape: persistent; it watches them.
        cut: gradients of the losses end at the features, and `CutTape` carries them on.
    """

    def __init__(self, tape, cut):
        self._tape, self._cut = tape, cut
        self.originals, self.shared = [], []

    def add(self, tensor):
        """The tensor to compute losses from in the place of this one."""
        if not tensor.dtype.is_floating:
            raise TypeError(
                f"The shared features have dtype {tensor.dtype.name}; they must be floating-point, or there is no "
                "gradient. Share the output of a layer."
            )
        shared = tf.stop_gradient(tensor) if self._cut else tf.identity(tensor)
        self._tape.watch(shared)
        self.originals.append(tensor)
        self.shared.append(shared)
        return shared

    def check(self, combiner):
        """Features are compared by their inner products, and outside loops."""
        if not self.shared:
            return
        if type(combiner).measure is not Combiner.measure or combiner.rewrites:
            raise ValueError(
                f"{type(combiner).__name__} needs the gradients of weights, but features are shared. Set "
                "`shared_variables` instead, or use a combiner that compares directions or norms, such as GradNorm."
            )
        here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if here is not None and any(tensor.graph is not here for tensor in self.shared):
            raise ValueError(
                "`share` was called inside a loop or a branch, where a gradient cannot be taken. Share what comes out "
                "of it."
            )


def open_features(tape, backward, combiner):
    """`Features` of an update in which gradients are compared; None in others.

    Combiners in turns compare gradients of weights, and `Features.check` refuses features there.
    """
    comparing = (backward.per_loss and combiner.gradients_every) or combiner.in_turns
    return Features(tape, backward is Backward.CUT) if comparing else None


class CutTape:
    """A tape whose forward pass was cut at the shared features: gradients go to them, and on from them."""

    def __init__(self, tape, features):
        self._tape, self._features = tape, features

    def heads(self, target, sources):
        """(gradients of the features, dense; gradients of the sources that do not pass through them)."""
        shared = self._features.shared
        found = self._tape.gradient(target, shared + sources)
        return stages.fill_missing(found[: len(shared)], shared), found[len(shared) :]

    def trunk(self, gradients, sources):
        """Gradients of the sources that pass through the features, from those of the features."""
        return self._tape.gradient(self._features.originals, sources, output_gradients=gradients)

    def gradient(self, target, sources):
        """As of a tape that was not cut."""
        features, own = self.heads(target, sources)
        return [add(a, b) for a, b in zip(own, self.trunk(features, sources), strict=True)]


def add(first, second):
    """The sum of two gradients, either of which may be None."""
    if first is None or second is None:
        return second if first is None else first
    return stages.to_dense(first) + stages.to_dense(second)


def rows_of(gradients):
    """[K, n] float64 from K lists of features' gradients."""
    flat = [tf.concat([tf.reshape(tf.cast(g, tf.float32), [-1]) for g in row], axis=0) for row in gradients]
    return tf.cast(tf.stack(flat), tf.float64)


def products(rows, factors):
    """[K, K] float64 inner products of the rows, each multiplied by its factor."""
    factors = tf.cast(tf.stack([tf.cast(factor, tf.float32) for factor in factors]), tf.float64)
    return gramian.products(rows) * factors[:, tf.newaxis] * factors[tf.newaxis, :]


def weighted_sum(rows, weights, like):
    """The sum of the rows by [K] float64 weights, in the shapes and types of the features `like`."""
    total = tf.matmul(weights[tf.newaxis], rows)[0]
    parts = tf.split(total, [tf.size(feature) for feature in like]) if len(like) > 1 else [total]
    return [
        tf.cast(tf.reshape(part, tf.shape(feature)), feature.dtype) for part, feature in zip(parts, like, strict=True)
    ]


class Factors:
    """The factors for the gradients of Σ w·l, where a micro-batch is the whole update.

    Args:
        terms: of the losses.
        weights: their K static weights.
        scale: the loss scale that is in the gradients.
    """

    def __init__(self, terms, weights, scale):
        divisors = [term.divisor for term in terms]
        sums = tf.stack([term.sum for term in terms])
        losses = tf.stop_gradient(tf.math.divide_no_nan(sums, tf.stack(divisors)))
        self._given = losses, tf.stack(divisors), weights
        self.means = [tf.math.divide_no_nan(w, d) for w, d in zip(weights, divisors, strict=True)]
        self.unscaled_means = [factor / scale for factor in self.means]

    def inputs(self, combiner):
        """(the losses as the combiner sees them, which take part)."""
        return combination.inputs(combiner, *self._given)


@contextlib.contextmanager
def collecting(owner, features):
    """A context in which `share`, and the layer named by `shared_features`, report to `features`."""
    layer = None if owner.shared_features is None else _layer(owner)
    owner.tracing.share_to(features)
    if layer is not None:
        call = layer.call
        share = owner.trainer.share
        layer.__dict__["call"] = lambda *values, **options: tf.nest.map_structure(share, call(*values, **options))
    try:
        yield
    finally:
        owner.tracing.share_to(None)
        if layer is not None:
            layer.__dict__.pop("call", None)


def _layer(owner):
    layers = {layer.name: layer for layer in all_layers(owner.model) if layer is not owner.model}
    if owner.shared_features not in layers:
        raise ValueError(
            f"`shared_features` is {owner.shared_features!r}, but the model has no such layer. Use one of "
            f"{sorted(layers)}, or call `share` in `compute_losses`."
        )
    return layers[owner.shared_features]


def check_options(owner, combiner):
    """Refuses options that do not go together. Before the first trace."""
    if owner.head_gradients not in HEAD_GRADIENTS:
        raise ValueError(
            f"`head_gradients` is {owner.head_gradients!r}; it must be one of {list(HEAD_GRADIENTS)}. Use 'own' to "
            "leave what is not shared without the combiner's coefficients."
        )
    given = [name for name in ("shared_features", "shared_variables") if getattr(owner, name) is not None]
    if len(given) == 2:
        raise ValueError("Both `shared_features` and `shared_variables` are set; gradients are compared in one place.")
    if owner.shared_variables is not None and combiner.in_turns:
        raise ValueError(
            f"`shared_variables` is set, but {type(combiner).__name__} averages the gradients of all weights. Leave "
            "`shared_variables` out, or use a combiner that compares gradients in every update, such as ConFIG."
        )
    if owner.head_gradients == "own" and not combiner.gradients_every:
        raise ValueError(
            f"`head_gradients` is 'own', but {type(combiner).__name__} uses no gradients of single losses. Use "
            "'weighted', or a combiner that does, such as PCGrad."
        )


def shared_mask(owner, variables):
    """[bool] of the variables: is it one of `owner.shared_variables`? None where nothing is set."""
    if owner.shared_variables is None:
        return None
    chosen = set()
    for entry in tf.nest.flatten(owner.shared_variables):
        found = _variables_of(entry, variables)
        if not found:
            raise ValueError(
                f"`shared_variables` has {_word(entry)!r}, which is not a trainable variable, a layer with "
                f"one, or the name of either. Use some of {[path_of(variable) for variable in variables]}."
            )
        chosen |= {id(variable) for variable in found}
    return [id(variable) in chosen for variable in variables]


def check_reached(variables, mask, live):
    """A shared variable without a gradient from any loss is refused."""
    lost = [path_of(v) for v, shared, reached in zip(variables, mask, live, strict=True) if shared and not reached]
    if lost:
        reached = [path_of(v) for v, alive in zip(variables, live, strict=True) if alive]
        raise ValueError(f"No loss reaches the shared variable(s) {lost}. Use some of {reached}.")


def _variables_of(entry, variables):
    if isinstance(entry, str):
        return [v for v in variables if f"/{path_of(v)}/".find(f"/{entry}/") >= 0]
    if isinstance(entry, keras.layers.Layer):
        own = {id(variable) for variable in entry.trainable_variables}
        return [v for v in variables if id(v) in own]
    return [v for v in variables if v is entry or raw(v) is raw(entry)]


def _word(entry):
    return entry if isinstance(entry, str) else getattr(entry, "path", getattr(entry, "name", entry))
