"""The format of health rows: one number for each variable of a model, per quantity and training step.

Writer (`trainer`) and reader (the TensorBoard plugin) agree on this module:

    health/<quantity>                 uint16 or uint8 [variables]   of the trainer's own minimizer
    health/<minimizer>/<quantity>     the same for a named one, e.g. of a GAN

    gradient   norm of the gradient, before clipping              bfloat16 bits as uint16
    weight     norm of the weight before the update               bfloat16 bits as uint16
    ratio      ‖ΔW‖ / ‖W‖, ΔW as it was really applied            bfloat16 bits as uint16
    zeros      fraction of exact zeros in the gradient            254ths as uint8, 0 and 1 exact
    dead       fraction of units whose output was 0 everywhere    254ths as uint8; of layers, not of variables

The names of the variables are in the metadata of a tag's first event, and only there: 100 variables take less than
1 KB per row, float32 and repeated metadata would take four. When layers are frozen or unfrozen, the list changes, and
the rows continue under `health/<quantity>@2` with a list of its own. bfloat16 keeps the range of float32 and three
digits (0.4 %).

Imports neither tensorflow nor keras.
"""

import json

import numpy as np
from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

PLUGIN_NAME = "gradient_flow_health"
KIND = "health"
CONTENT_VERSION = 1
TAG_PREFIX = "health"
QUANTITIES = ("gradient", "weight", "ratio", "zeros", "dead")
FRACTIONS = ("zeros", "dead")

_NAN = np.uint16(0x7FC0)
_PARTS, _NO_PART = 254, np.uint8(255)


def tag(quantity, minimizer="", part=1):
    """The tag of a quantity.

    >>> tag("ratio"), tag("ratio", "generator", 2)
    ('health/ratio', 'health/generator/ratio@2')
    """
    name = f"{minimizer}/{quantity}" if minimizer else quantity
    return f"{TAG_PREFIX}/{name}" + (f"@{part}" if part > 1 else "")


def encode(quantity, values):
    """A row [variables] as it is written; NaN of a fraction is written as unknown. Values beyond float32 become Inf."""
    values = np.asarray(values)
    if quantity in FRACTIONS:
        finite = np.nan_to_num(values, nan=0.0)
        codes = np.clip(np.round(finite * _PARTS), (finite > 0) * 1, _PARTS - (finite < 1) * 1).astype(np.uint8)
        return np.where(np.isnan(values), _NO_PART, codes)
    with np.errstate(over="ignore", invalid="ignore"):
        values = values.astype(np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
    return np.where(np.isnan(values), _NAN, rounded)


def decode(quantity, codes):
    """Float32 values of what `encode` made, of any shape."""
    codes = np.asarray(codes)
    if quantity in FRACTIONS:
        return np.where(codes == _NO_PART, np.float32(np.nan), codes.astype(np.float32) / np.float32(_PARTS))
    return (codes.astype(np.uint32) << 16).view(np.float32)


def content(quantity, variables, minimizer="", part=1):
    """The metadata of a tag."""
    if quantity not in QUANTITIES:
        raise ValueError(f"`quantity` is {quantity!r}; it must be one of {', '.join(QUANTITIES)}.")
    return {
        "version": CONTENT_VERSION,
        "kind": KIND,
        "quantity": quantity,
        "minimizer": minimizer,
        "part": part,
        "variables": [str(name) for name in variables],
    }


def parse_content(serialized):
    """The dict that `content` made, or None if the bytes are not one of ours."""
    try:
        parsed = json.loads(serialized)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict) or parsed.get("version") != CONTENT_VERSION or parsed.get("kind") != KIND:
        return None
    names = parsed.get("variables")
    if parsed.get("quantity") not in QUANTITIES or not isinstance(parsed.get("minimizer"), str):
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return parsed if isinstance(parsed.get("part"), int) else None


def assembled(tags):
    """Arguments for `health_verdicts.health_findings` from {tag: (content, {step: codes})} as it was read.

    Where the list of variables changed, that of the latest rows counts. Rows that lack a quantity are left out, as are
    minimizers without any.
    """
    parts = {}  # {minimizer: {part: {quantity: (names, {step: codes})}}}
    for content, by_step in tags.values():
        own = parts.setdefault(content["minimizer"], {}).setdefault(content["part"], {})
        own[content["quantity"]] = content["variables"], by_step
    found = {}
    for minimizer, numbered in parts.items():
        measured = {part: own for part, own in numbered.items() if own.keys() >= {"gradient", "weight", "ratio"}}
        if not measured:
            continue
        own = max(measured.values(), key=lambda each: max(each["gradient"][1], default=-1))
        steps = sorted(set.intersection(*(set(own[name][1]) for name in ("gradient", "weight", "ratio"))))
        if not steps:
            continue
        rows = {name: stacked(name, own[name][1], steps) for name in ("gradient", "weight", "ratio")}
        found[minimizer] = {"variables": own["gradient"][0], "steps": np.array(steps), **rows}
        dead = [each["dead"] for each in numbered.values() if each.get("dead", ((), {}))[1]]
        if dead:
            layers, by_step = max(dead, key=lambda each: max(each[1]))
            found[minimizer]["dead"] = {"layers": layers, "values": stacked("dead", by_step, sorted(by_step))}
    return found


def stacked(quantity, by_step, steps):
    """Decoded rows [rows, variables] of {step: codes}."""
    return decode(quantity, np.stack([by_step[step] for step in steps]))


def summary(quantity, values, variables, minimizer="", part=1, *, described=True):
    """The `Summary.Value` of one quantity at one training step. Runs on the host.

    Args:
        quantity: one of `QUANTITIES`.
        values: [variables].
        variables: their paths.
        minimizer: its name; "" for the trainer's own.
        part: counts the lists of variables, from 1.
        described: whether the metadata go with it; they must with the first event of a tag in a file.
    """
    row = encode(quantity, values)
    kind = types_pb2.DT_UINT8 if row.dtype == np.uint8 else types_pb2.DT_UINT16
    tensor = tensor_pb2.TensorProto(
        dtype=kind,
        tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=len(row))]),
        tensor_content=row.astype(row.dtype.newbyteorder("<")).tobytes(),
    )
    value = summary_pb2.Summary.Value(tag=tag(quantity, minimizer, part), tensor=tensor)
    if described:
        serialized = json.dumps(content(quantity, variables, minimizer, part), sort_keys=True).encode()
        data = summary_pb2.SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=serialized)
        value.metadata.CopyFrom(summary_pb2.SummaryMetadata(plugin_data=data, data_class=summary_pb2.DATA_CLASS_TENSOR))
    return value
