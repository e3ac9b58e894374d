"""Format shared by the writer (`trainer`) and the reader (the TensorBoard plugin): tags, metadata, encoding of rows.

A probed update writes, per layer, one `vector` summary per quantity and one `count` summary:

    timestep/<layer>/<quantity>          float32 [time]        `vector_summary`
    timestep/<layer>/loss_share/<loss>   float32 [time]        `loss_share_summary`
    timestep/<layer>/credit              float32 [time, time]  `credit_summary`
    timestep/<layer>/rows                int64 scalar          `rows_summary`
    position/<layer>/output              float32 [positions]   `position_summaries`

The count is the number of probed updates written for that layer since the run began, this one included.
TensorBoard keeps a random sample of a tag's events but always the last one, so the last count is the true
total: "1,000 of 10,000 logged steps kept" is made from it. A resumed run continues the count where its
checkpoint stopped. The count has a plugin name of its own, because sampling is set per plugin name and a
kept event costs TensorBoard 1 KB however small it is: of the count only the last is worth keeping.

This module imports neither tensorflow nor keras: TensorBoard loads it at start-up.
"""

import json
import re

import numpy as np
from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

PLUGIN_NAME = "gradient_flow"
COUNT_PLUGIN_NAME = "gradient_flow_rows"
CONTENT_VERSION = 1
TAG_PREFIX = "timestep"

QUANTITIES = ("state", "steered", "hidden", "cell", "recurrent", "external", "input", "gain", "weight")
LOSS_SHARE = "loss_share"
CREDIT = "credit"
ROWS = "rows"
TIME, OUTPUT, POSITION = "time", "output", "position"
BACKWARD = "backward"  # the direction of a layer that reads its sequence from the end

VECTOR, MATRIX, COUNT = "vector", "matrix", "count"
KINDS = (VECTOR, MATRIX, COUNT)

# Padding is a quiet NaN with a payload of its own, so that everybody else who reads the event file sees what
# the tag promises ("NaN if no example is valid at t"), while the dashboard can tell it from a gradient that
# became NaN. Rows travel as bytes (`tensor_content`), which both TensorBoard loaders hand on bit for bit.
# Where a payload is lost all the same, padding shows as NaN: a false alarm, never a hidden one.
PADDING_BITS = np.uint32(0x7FC0_0F1D)
_NAN_BITS = np.uint32(0x7FC0_0000)


def vector_tag(layer, quantity):
    """The tag of a [time] vector; `quantity` is e.g. `state` or `weight/recurrent_kernel`."""
    return f"{TAG_PREFIX}/{layer}/{quantity}"


def loss_share_tag(layer, loss):
    return f"{TAG_PREFIX}/{layer}/{LOSS_SHARE}/{loss}"


def credit_tag(layer):
    return f"{TAG_PREFIX}/{layer}/{CREDIT}"


def rows_tag(layer, axis=TIME):
    """The tag of the number of rows that were written of a layer, over time steps or positions."""
    return f"{POSITION if axis == POSITION else TAG_PREFIX}/{layer}/{ROWS}"


def position_tag(layer):
    """The tag of the gradient at each position of a layer's output."""
    return f"{POSITION}/{layer}/{OUTPUT}"


def position_summaries(layer, values, valid, depth, count):
    """The `Summary.Value`s of the gradient at every position of a layer's output, and of how many rows there are.

    Args:
        layer: the layer's name.
        values: [positions].
        valid: booleans; False where no example is valid.
        depth: place of the layer in the order of calls, from 0.
        count: rows written so far, this one included.
    """
    described = summary_metadata(VECTOR, layer, OUTPUT, axis=POSITION, depth=depth)
    counted = summary_metadata(COUNT, layer, ROWS)
    return [
        _value(position_tag(layer), encode_row(values, valid), described),
        _value(rows_tag(layer, POSITION), np.int64(count), counted),
    ]


_MOVED = ("gradient_norm/", "gradient_cosine/", "gradient_conflict/", "learning_rate/", "bptt/")


def current_tag(tag):
    """Returns today's name of a scalar tag, which for tags of earlier versions is another than the one in the file.

    Metrics and scalars of the user's own had no prefix then. Both are below `metrics/` now.

    >>> current_tag("learning_rate"), current_tag("accuracy"), current_tag("reward/mean"), current_tag("loss")
    ('optimizer/learning_rate', 'metrics/accuracy', 'reward/mean', 'loss')
    """
    if tag.startswith(_MOVED) or tag in ("learning_rate", "skipped_updates"):
        return f"optimizer/{tag}"
    return tag if "/" in tag or tag == "loss" else f"metrics/{tag}"


def total_loss_tag(tags):
    """Returns which of a run's scalar tags is its total loss, or None. A run with one loss may log just that one."""
    named = [tag for tag in tags if tag.startswith("loss/")]
    for tag in ("loss/total", "loss/sum", "loss"):
        if tag in tags:
            return tag
    return named[0] if len(named) == 1 else None


_MINIMIZER = re.compile(r"optimizer/gradient_norm/(.+)/global")


def is_minimizer_tag(tag):
    """Whether a scalar tag, by its present name, is the one by which a run names a minimizer: see `total_loss_tags`."""
    return _MINIMIZER.fullmatch(tag) is not None


def total_loss_tags(tags):
    """Returns {minimizer: tag of its total loss}, by name; "" is the trainer's own. {} if there is none.

    A run with several minimizers, such as a GAN, has no loss of its own, but one for each of them. They are known by
    their gradient norms: a slash alone may also be part of a loss's name.

    >>> total_loss_tags(["loss/d/total", "loss/d/fake", "loss/g/fooling", "optimizer/gradient_norm/d/global",
    ...                  "optimizer/gradient_norm/g/global"])
    {'d': 'loss/d/total', 'g': 'loss/g/fooling'}
    """
    tags = list(tags)
    names = sorted(match[1] for match in map(_MINIMIZER.fullmatch, tags) if match)
    own = [tag for tag in tags if not any(tag.startswith(f"loss/{name}/") for name in names)]
    found = {"": total_loss_tag(own)}
    for name in names:
        mine = ["loss/" + tag.removeprefix(f"loss/{name}/") for tag in tags if tag.startswith(f"loss/{name}/")]
        total = total_loss_tag(mine)
        found[name] = None if total is None else f"loss/{name}/{total.removeprefix('loss/')}"
    return {name: tag for name, tag in found.items() if tag is not None}


def encode_row(values, valid=None):
    """Returns `values` as float32 with padding marked, ready to be written.

    Args:
        values: numbers of any shape, [time] as a rule. NaN and Inf stay what they are.
        valid: booleans of the same shape; False where no example is valid (padding). All valid by default.
    """
    # A value beyond float32 becomes Inf and is shown as such, without a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        row = np.array(values, dtype=np.float32)
    bits = row.view(np.uint32)
    bits[np.isnan(row)] = _NAN_BITS
    if valid is not None:
        valid = np.asarray(valid, dtype=bool)
        if valid.shape != row.shape:
            raise ValueError(
                f"`valid` has shape {valid.shape}, `values` has {row.shape}; they must be equal. "
                "Give one boolean per time step."
            )
        bits[~valid] = PADDING_BITS
    return row


def decode_row(row):
    """Returns (values, valid) of a float32 array made by `encode_row`; values are NaN where not valid."""
    row = np.ascontiguousarray(row, dtype=np.float32)
    return row, row.view(np.uint32) != PADDING_BITS


def summary_metadata(
    kind,
    layer,
    quantity,
    *,
    loss=None,
    direction=None,
    time_shape=None,
    cell=None,
    axis=None,
    depth=None,
    description="",
):
    """Returns the `SummaryMetadata` of a tag. TensorBoard keeps that of the tag's first event only.

    Args:
        kind: `"vector"` ([time]), `"matrix"` ([time, time]) or `"count"` (a scalar).
        layer: the layer's name, which may contain slashes.
        quantity: one of `QUANTITIES` (`weight/<variable>` for a weight), `loss_share`, `credit` or `rows`.
        loss: the loss's name, for `loss_share` only.
        direction: `"forward"` or `"backward"`, where a layer has one.
        time_shape: the lengths of nested loops, outer first, when [time] is flattened from several.
        cell: the class of a recurrent layer's cell, for advice.
        axis: `"position"` where the vector is over positions of a layer's output instead of time steps.
        depth: place of such a layer in the order of calls.
        description: shown to the user beside the quantity.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` is {kind!r}; it must be one of {list(KINDS)}.")
    if (quantity == LOSS_SHARE) != (loss is not None):
        raise ValueError(f"{quantity=} with {loss=}: `loss` is given for {LOSS_SHARE!r} and only for it.")
    content = {"version": CONTENT_VERSION, "kind": kind, "layer": str(layer), "quantity": str(quantity)}
    if loss is not None:
        content["loss"] = str(loss)
    if direction is not None:
        content["direction"] = str(direction)
    if cell is not None:
        content["cell"] = str(cell)
    if axis is not None:
        content |= {"axis": str(axis), "depth": int(depth)}
    if time_shape is not None:
        content["time_shape"] = [int(length) for length in time_shape]
    return summary_pb2.SummaryMetadata(
        plugin_data=summary_pb2.SummaryMetadata.PluginData(
            plugin_name=COUNT_PLUGIN_NAME if kind == COUNT else PLUGIN_NAME,
            content=json.dumps(content, sort_keys=True).encode(),
        ),
        summary_description=description,
        # Without it the Rust loader leaves the tab inactive and the Python loader leaves it empty.
        data_class=summary_pb2.DATA_CLASS_TENSOR,
    )


def parse_content(content):
    """Returns the dict that `summary_metadata` put into a tag's content, or None if it is not one of ours."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):  # no JSON, no UTF-8, or nested deeper than Python follows
        return None
    if not isinstance(parsed, dict) or parsed.get("version") != CONTENT_VERSION:
        return None
    if parsed.get("kind") not in KINDS:
        return None
    texts = [parsed.get("layer"), parsed.get("quantity"), parsed.get("loss", ""), parsed.get("direction", "")]
    texts += [parsed.get("axis", ""), parsed.get("cell", "")]
    shape = parsed.get("time_shape", [])
    if not all(isinstance(text, str) for text in texts) or not isinstance(shape, list):
        return None
    if not all(isinstance(length, int) and length > 0 for length in shape) or not isinstance(
        parsed.get("depth", 0), int
    ):
        return None
    return parsed


def tensor_proto(array):
    """Returns a float32 or int64 array as a `TensorProto` whose values are raw bytes (see `PADDING_BITS`)."""
    array = np.asarray(array)
    kinds = {np.dtype(np.float32): types_pb2.DT_FLOAT, np.dtype(np.int64): types_pb2.DT_INT64}
    if array.dtype not in kinds:
        raise ValueError(f"An array of {array.dtype} cannot be written; it must be float32 or int64.")
    dims = [tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in array.shape]
    return tensor_pb2.TensorProto(
        dtype=kinds[array.dtype],
        tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=dims),
        tensor_content=array.astype(array.dtype.newbyteorder("<")).tobytes(),
    )


def vector_summary(layer, quantity, values, valid=None, **described):
    """Returns the `Summary.Value` of one quantity of one layer at one training step. Runs on the host.

    `described`: `direction`, `time_shape`, `cell` and `description` as in `summary_metadata`.
    """
    metadata = summary_metadata(VECTOR, layer, quantity, **described)
    return _value(vector_tag(layer, quantity), encode_row(values, valid), metadata)


def loss_share_summary(layer, loss, values, valid=None, *, direction=None, time_shape=None):
    """Returns the `Summary.Value` of one loss's share in the state gradient, per time step."""
    metadata = summary_metadata(VECTOR, layer, LOSS_SHARE, loss=loss, direction=direction, time_shape=time_shape)
    return _value(loss_share_tag(layer, loss), encode_row(values, valid), metadata)


def credit_summary(layer, matrix, valid=None, *, direction=None):
    """Returns the `Summary.Value` of M[s, t], the loss at s by the state at t; zero for t > s."""
    matrix = encode_row(matrix, valid)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"The credit matrix of {layer!r} has shape {matrix.shape}; it must be [time, time].")
    return _value(credit_tag(layer), matrix, summary_metadata(MATRIX, layer, CREDIT, direction=direction))


def rows_summary(layer, count):
    """Returns the `Summary.Value` of how many rows of `layer` were written so far, this one included."""
    return _value(rows_tag(layer), np.int64(count), summary_metadata(COUNT, layer, ROWS))


def _value(tag, array, metadata):
    return summary_pb2.Summary.Value(tag=tag, tensor=tensor_proto(array), metadata=metadata)
