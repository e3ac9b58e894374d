"""Event files read without tensorflow and without a running TensorBoard: scalars and the vectors per time step."""

import dataclasses
import pathlib
import warnings

import numpy as np
from google.protobuf.message import DecodeError
from tensorboard.compat.proto import event_pb2
from tensorboard.util import tensor_util

from looptape.dashboard import event_records, health_rows, metadata
from looptape.dashboard.server.series import stack

_SCALAR = {"kind": "scalar"}


@dataclasses.dataclass(frozen=True)
class Run:
    """The contents of one directory of event files."""

    scalars: dict  # {tag: (steps, values)}; tags of older versions under their present names
    layers: dict  # {layer: {quantity: Rows}} by time step; matrices are left out
    cells: dict  # {layer: class of its cell}
    backward: frozenset  # layers that read their sequence from its end
    positions: dict  # {layer: Rows} by position of the layer's output
    health: dict  # {tag: (content, {step: codes})}, see `health_rows.assembled`
    shares: dict  # {layer: {loss: Rows}} of the state gradient by time step


def read_run(directory):
    """Returns the `Run` of a directory's event files, in the order they were written.

    A step that is written again, as after a resume, counts once with its later value. A damaged record is left out
    with a warning, one that is cut off at the end of a file without.
    """
    scalars, arrays, descriptions = {}, {}, {}
    for path in sorted(pathlib.Path(directory).glob("events.out.tfevents.*")):
        for event in _events(path):
            for value in event.summary.value:
                _take(event.step, value, scalars, arrays, descriptions)
    layers, cells, backward, positions, health, shares = {}, {}, set(), {}, {}, {}
    for tag, by_step in arrays.items():
        content = descriptions[tag]
        if content["kind"] == health_rows.KIND:
            health[tag] = content, by_step
        elif content.get("axis") == metadata.POSITION:
            positions[content["layer"]] = stack(list(by_step.items()), 1)
        elif content["quantity"] == metadata.LOSS_SHARE:
            shares.setdefault(content["layer"], {})[content.get("loss", "")] = stack(list(by_step.items()), 1)
        else:
            layers.setdefault(content["layer"], {})[content["quantity"]] = stack(list(by_step.items()), 1)
            cells[content["layer"]] = content.get("cell", "")
            backward |= {content["layer"]} if content.get("direction") == metadata.BACKWARD else set()
    ordered = {
        metadata.current_tag(tag): tuple(zip(*sorted(by_step.items()), strict=True)) for tag, by_step in scalars.items()
    }
    return Run(ordered, layers, cells, frozenset(backward), positions, health, shares)


def total_losses(run):
    """Returns {minimizer: (steps, values)} of a run's total losses; "" is the trainer's own minimizer."""
    return {name: run.scalars[tag] for name, tag in metadata.total_loss_tags(run.scalars).items()}


def _events(path):
    records, _ = event_records.read_records(path)
    others = 0
    for record in records:
        try:
            yield event_pb2.Event.FromString(record)
        except DecodeError:
            others += 1
    if others:
        warnings.warn(
            f"{path} holds records that are no events: {others} of {len(records)}, which are left out. Keep only event "
            "files under names of this kind.",
            stacklevel=3,
        )


def _take(step, value, scalars, arrays, descriptions):
    """Only the first event of a tag carries metadata: `descriptions` remembers what a tag is."""
    tag, plugin = value.tag, value.metadata.plugin_data
    if value.WhichOneof("value") == "simple_value":
        scalars.setdefault(tag, {})[step] = float(value.simple_value)
        return
    if tag not in descriptions:
        descriptions[tag] = _described(plugin)
    if descriptions[tag] is None or value.WhichOneof("value") != "tensor":
        return
    array = np.asarray(tensor_util.make_ndarray(value.tensor))
    if descriptions[tag] != _SCALAR:
        arrays.setdefault(tag, {})[step] = array
    elif array.size == 1:
        scalars.setdefault(tag, {})[step] = float(array.reshape(()))


def _described(plugin):
    """The metadata of a tag, or None if the tag is not read."""
    if plugin.plugin_name == "scalars":
        return _SCALAR
    if plugin.plugin_name == health_rows.PLUGIN_NAME:
        return health_rows.parse_content(plugin.content)
    content = metadata.parse_content(plugin.content) if plugin.plugin_name == metadata.PLUGIN_NAME else None
    return content if content and content["kind"] == metadata.VECTOR else None
