"""What the host does with the totals of an update: vectors cut to the time steps there were, scalars, and
capacity.
"""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from trainer.probing import probes, report
from trainer.probing.errors import ProbeError


class Presented(NamedTuple):
    """The report of an update in NumPy."""

    vectors: Any  # {layer: {quantity: [time]}}
    scalars: Any  # {layer: {name: float}}
    shapes: Any  # {layer: shape} where t is a tuple: what the vectors are flattened from


@tf.function(autograph=False, reduce_retracing=True)
def _reduce(totals, examples, scale):
    """One call instead of some hundred small operations, which cost more than the probed update itself."""
    return report.vectors(totals, examples, scale), report.scalars(totals, examples, scale)


def present(totals, shapes=None, examples=1.0, scale=1.0):
    """Totals of a whole update as vectors and scalars. Eager, on the host.

    Args:
        totals: from `ProbeSession.totals`, added up.
        shapes: `session.shapes`, noted when it was traced.
        examples, scale: as in `report.vectors`; 1 if the totals had them.
    """
    shapes = shapes or {}
    totals = tf.nest.map_structure(tf.convert_to_tensor, totals)
    vectors, scalars = _reduce(totals, *(tf.cast(number, tf.float32) for number in (examples, scale)))
    vectors = _to_numpy(vectors)
    scalars = {layer: {name: float(value) for name, value in values.items()} for layer, values in scalars.items()}
    cut = {}
    for layer, shape in shapes.items():
        visits = totals[layer]["visits"].numpy().reshape(shape)
        _check_visits(layer, visits, float(totals[layer]["parts"]))
        extent = _extent(visits)
        vectors[layer] = {name: _cut(value, shape, extent) for name, value in vectors[layer].items()}
        if len(shape) > 1:
            cut[layer] = extent
    return Presented(vectors, scalars, cut)


def present_examples(found, shapes=None):
    """A per-example report (`ProbeSession.report`) as NumPy arrays, [batch, time] or [time], and the shapes
    of tuples.

    Only the quantities; what else a report holds for sums and scalars is left out.
    """
    shapes, cut, result = shapes or {}, {}, {}
    for layer, values in found.items():
        hidden = ("valid", "zeros", "elements", "visits", "beyond", "cut_off")
        result[layer] = {name: np.asarray(value) for name, value in values.items() if name not in hidden}
        if layer in shapes:
            shape = shapes[layer]
            visits = np.asarray(values["visits"]).reshape(shape)
            _check_visits(layer, visits, 1.0)
            extent = _extent(visits)
            result[layer] = {
                name: _cut(value, shape, extent, axis=1 if name.startswith("state") else 0)
                for name, value in result[layer].items()
            }
            if len(shape) > 1:
                cut[layer] = extent
    return result, cut


def missing_capacity(totals, shapes):
    """{name: capacity to ask for} of the `probe` calls that went beyond theirs; empty if all fitted. Eager,
    on the host.

    Pass it, over what was there before, as `capacity` to the session of the next trace. Until then the
    vectors end at the present capacity.
    """
    missing = {}
    for name, shape in shapes.items():
        beyond = totals[name].get("beyond")
        if beyond is None:
            continue
        buckets = np.asarray(beyond).reshape(len(shape), probes.BUCKETS) > 0
        if buckets.any():
            wanted = [2 ** (int(np.max(np.nonzero(row)[0])) + 1) if row.any() else 0 for row in buckets]
            grown = tuple(max(size, want) for size, want in zip(shape, wanted, strict=True))
            missing[name] = grown if len(grown) > 1 else grown[0]
    return missing


def _extent(visits):
    """How far each index went."""
    return tuple(int(np.max(indices)) + 1 if len(indices) else 0 for indices in np.nonzero(visits))


def _cut(value, shape, extent, axis=0):
    if value.ndim <= axis:
        return value
    before, after = value.shape[:axis], value.shape[axis + 1 :]
    window = (slice(None),) * axis + tuple(slice(0, size) for size in extent)
    return value.reshape(*before, *shape, *after)[window].reshape(*before, -1, *after)


def _check_visits(layer, visits, parts):
    often = visits > parts
    if often.any():
        t = tuple(int(index[0]) for index in np.nonzero(often))
        raise ProbeError(
            f"`probe({layer!r}, ...)` was reached {int(visits[t])} times at t={t[0] if len(t) == 1 else t} "
            f"in {int(parts)} pass(es): gradients of different time steps are summed. In nested loops pass a "
            "tuple, outer index first; give different tensors different names."
        )


def _to_numpy(tree):
    return {layer: {name: value.numpy() for name, value in values.items()} for layer, values in tree.items()}
