"""TensorBoard's custom scalars: a chart for each loss, one for their weights, their shares, their gradient norms.

TensorBoard colours lines by run, never by tag: two losses of a run on one chart would have one colour. On a chart of
its own each loss has two, of training and of evaluation.
"""

import os
import re

from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

# prefix of the tags → title of the chart; one chart each, with a symbol for each loss
_CHARTS = {
    "loss_weight": "weights of the losses",
    "loss_share": "shares of the total",
    "optimizer/gradient_norm": "gradient norms",
}


def write_once(events, directory, trainer):
    """Writes the layout, if any minimizer has several losses and nothing was written to this run before.

    Args:
        events: the run's `EventWriter`, or None.
        directory: of the run.
        trainer: whose losses are known.
    """
    several = {m.name: m.names for m in trainer.minimizers.values() if len(m.names or ()) > 1}
    if events is None or not several or (os.path.isdir(directory) and os.listdir(directory)):
        return
    events.write(0, [summary(several, bool(trainer.probe_every))])


def summary(losses, probed):
    """A `Summary.Value` with one category of charts for each minimizer; {minimizer: [loss, …]}."""
    layout = layout_pb2.Layout()
    for minimizer, names in losses.items():
        category = layout.category.add(title=f"losses of {minimizer}" if minimizer else "losses")
        for name in names:
            category.chart.add(title=f"{name}, unweighted").multiline.tag.append(_pattern("loss", minimizer, [name]))
        for prefix, title in _CHARTS.items():
            if prefix != "optimizer/gradient_norm" or probed:
                chart = category.chart.add(title=title)
                chart.multiline.tag.append(_pattern(prefix, minimizer, names))
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING,
        tensor_shape=tensor_shape_pb2.TensorShapeProto(),
        string_val=[layout.SerializeToString()],
    )
    plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME)
    kind = summary_pb2.SummaryMetadata(plugin_data=plugin, data_class=summary_pb2.DATA_CLASS_TENSOR)
    return summary_pb2.Summary.Value(tag=metadata.CONFIG_SUMMARY_TAG, tensor=tensor, metadata=kind)


def _pattern(prefix, minimizer, names):
    """A regular expression that matches the tags of these losses and no others."""
    path = f"{prefix}/{minimizer}/" if minimizer else f"{prefix}/"
    return f"^{re.escape(path)}({'|'.join(map(re.escape, names))})$"
