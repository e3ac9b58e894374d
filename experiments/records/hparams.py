"""Flags for TensorBoard: the HParams tab and a text summary.

The session lies in the run whose scalars are the results, because the tab looks for a session's metrics below the
session's own run. No experiment is declared for the whole log directory: TensorBoard would show the options of the
one it finds first and hide all others; from sessions alone it lists every option of every run.
"""

import glob
import os
import time

import tensorflow as tf
from google.protobuf import struct_pb2
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from looptape.experiments.launch.options import OBSERVING, options, run_values, to_text
from looptape.experiments.tools.sweep import SWEPT
from looptape.trainer.summaries.event_writer import text

_SUFFIX = ".flags.v2"


class Session:
    """The flags of one run as TensorBoard's HParams tab and text tab show them.

    Args:
        directory: of the run with the results.
        config: the experiment's config.
        name: of the experiment.
    """

    def __init__(self, directory, config, name):
        self._directory, self._config, self._name = directory, config, name

    def start(self):
        """Writes the flags in place of those of an earlier session: TensorBoard keeps the first it reads."""
        os.makedirs(self._directory, exist_ok=True)
        for old in glob.glob(os.path.join(glob.escape(self._directory), "*" + _SUFFIX)):
            os.remove(old)
        info = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time(), group_name=group(self._config, self._name))
        for name, value in hparams(self._config, self._name).items():
            info.hparams[name].CopyFrom(_value(value))
        start = plugin_data_pb2.HParamsPluginData(session_start_info=info)
        self._write("start", [_summary(metadata.SESSION_START_INFO_TAG, start), text("flags", markdown(self._config))])

    def end(self, succeeded):
        """Writes how the session ended."""
        status = api_pb2.STATUS_SUCCESS if succeeded else api_pb2.STATUS_FAILURE
        info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        end = plugin_data_pb2.HParamsPluginData(session_end_info=info)
        self._write("end", [_summary(metadata.SESSION_END_INFO_TAG, end)])

    def _write(self, part, values):
        name = f"events.out.tfevents.{int(time.time())}.{part}.{os.getpid()}{_SUFFIX}"
        with tf.io.TFRecordWriter(os.path.join(self._directory, name)) as file:
            version = event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2")
            file.write(version.SerializeToString())
            event = event_pb2.Event(wall_time=time.time(), step=0, summary=summary_pb2.Summary(value=values))
            file.write(event.SerializeToString())


def hparams(config, name):
    """{option: value} of what sets a run apart. {"experiment": name} if nothing does, for a column at least.

    In a sweep those are the flags of its grid, else the options that are not at their default: a column for each of
    the forty options would hide the two that vary. Options that only observe a run, such as `health_every`, do not set
    it apart. The text tab lists all of them, and the trial's name has that of the experiment.
    """
    swept = os.environ.get(SWEPT)
    if swept is None:
        defaults = {key: known.default for key, known in options(type(config)).items()}
        shown = {key for key, value in run_values(config).items() if value != defaults[key]} - OBSERVING
    else:
        shown = set(swept.split(","))
    return {key: value for key, value in run_values(config).items() if key in shown} or {"experiment": name}


def group(config, name):
    """The trial's name: the same for runs that differ in their seed only, so that TensorBoard can show their mean.

    The experiment comes last: TensorBoard cuts names off, and it is what all trials of a sweep share.
    """
    values = {key: value for key, value in hparams(config, name).items() if key not in ("seed", "experiment")}
    return " ".join([*(f"{key}={to_text(value)}" for key, value in values.items()), name])


def markdown(config):
    """A table of all flags; those that are not at their default are bold."""
    rows = ["| flag | value | default |", "|---|---|---|"]
    for name, option in options(type(config)).items():
        value = getattr(config, name)
        shown = to_text(value) if value == option.default else f"**{to_text(value)}**"
        rows.append(f"| --{name} | {shown} | {to_text(option.default)} |")
    return "\n".join(rows)


def _value(value):
    if isinstance(value, bool):
        return struct_pb2.Value(bool_value=value)
    if isinstance(value, int | float):
        return struct_pb2.Value(number_value=value)
    return struct_pb2.Value(string_value=to_text(value))


def _summary(tag, content):
    data = summary_pb2.SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=content.SerializeToString())
    return summary_pb2.Summary.Value(
        tag=tag,
        metadata=summary_pb2.SummaryMetadata(plugin_data=data, data_class=summary_pb2.DATA_CLASS_TENSOR),
        tensor=metadata.NULL_TENSOR,
    )
