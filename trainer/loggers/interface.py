"""The interface of a logger, and the output that passes TensorBoard's values on to several of them."""

import dataclasses
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from looptape.dashboard import health_rows, metadata


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture that was logged.

    Args:
        png: the encoded file.
    """

    png: bytes


@dataclasses.dataclass(frozen=True)
class Audio:
    """A sound that was logged.

    Args:
        wav: the encoded file.
    """

    wav: bytes


@dataclasses.dataclass(frozen=True)
class Histogram:
    """A histogram that was logged.

    Args:
        buckets: [buckets, 3] left edges, right edges and counts.
    """

    buckets: np.ndarray


class Logger:
    """Receives everything that `fit` writes. Subclass it, and pass instances as `fit(loggers=[…])`.

    With several workers, only the chief's loggers are used. An exception in a logger does not stop the training:
    Looptape warns and does not call that logger again.
    """

    config: dict[str, Any] = {}  # {name: value} of the run, written after `open`; launched experiments set their flags

    def check(self, workdir):
        """Raises an error if the logger cannot write. Called once per `fit`, before anything else is done.

        Args:
            workdir: work directory of `fit`, or None.
        """

    def open(self, workdir, step):
        """Begins a `fit`, or goes back to a checkpoint.

        Args:
            workdir: work directory of `fit`, or None.
            step: updates made so far. Drop rows of later steps that an interrupted run logged: they will come again.
        """

    def write(self, run, step, values):
        """Takes the values of one step.

        Args:
            run: "train" or "eval"; "shown" for the callback `media.Show`; "config", at step 0, for the configuration.
            step: updates made so far.
            values: {tag: value}. A value is a float, an array ([time] of a vector per time step), a str, a `Picture`,
                an `Audio` or a `Histogram`; of the configuration anything. One step may come in several calls, each
                with tags of its own.
        """
        raise TypeError(f"The logger {type(self).__name__} has no method `write(run, step, values)`. Write one.")

    def close(self):
        """Ends a `fit`. `open` may be called again."""


def check_loggers(loggers, workdir=None):
    """A list of loggers, from several, one, or None. Each of them can write."""
    several = isinstance(loggers, list | tuple)
    loggers = list(loggers) if several else [] if loggers is None else [loggers]
    for logger in loggers:
        if not isinstance(logger, Logger):
            called = f"the class {logger.__name__}" if isinstance(logger, type) else repr(logger)
            raise TypeError(
                f"`loggers` {'has' if several else 'is'} {called}; each must be a looptape.loggers.Logger. Use e.g. "
                "loggers=[looptape.loggers.CSV()], or subclass Logger."
            )
    if len({id(logger) for logger in loggers}) < len(loggers):
        names = ", ".join(type(logger).__name__ for logger in loggers)
        raise ValueError(f"`loggers` has the same logger twice ({names}); every row would come twice. Leave one out.")
    for logger in loggers:
        logger.check(workdir)
    return loggers


class Output:
    """Where `fit` writes one run's rows: to its event file, if it has one, and to all loggers.

    Args:
        run: its name.
        events: function that gives the present `EventWriter`, or None.
        loggers: a `Guarded`.
    """

    def __init__(self, run, events, loggers):
        self._run, self._events, self._loggers = run, events, loggers
        self._described = {}  # {tag: its `SummaryMetadata`}

    def write(self, step, values):
        """Writes the values of a step; a list of `summary_pb2.Summary.Value`."""
        events = self._events()
        if events is not None:
            events.write(step, values)
        if self._loggers.any:
            plain = {}
            for value in values:
                # Health rows describe a tag in its first event only.
                described = value.metadata if value.HasField("metadata") else self._described.get(value.tag)
                if described is not None:
                    self._described[value.tag] = described
                    plain |= _plain(value, described)
            self._loggers.write(self._run, step, plain)

    def scalars(self, step, values):
        """Writes {tag: number} as scalars of a step."""
        events = self._events()
        if events is not None:
            events.scalars(step, values)
        self._loggers.write(self._run, step, {tag: float(value) for tag, value in values.items()})


class Guarded:
    """Several loggers, none of which can stop the training.

    Args:
        loggers: the loggers.
    """

    def __init__(self, loggers):
        self._loggers = list(loggers)

    @property
    def any(self):
        """Whether there is one left."""
        return bool(self._loggers)

    def open(self, workdir, step):
        self._each("open", workdir, step)
        for logger in [logger for logger in self._loggers if logger.config]:
            self._call(logger, "write", "config", 0, dict(logger.config))

    def write(self, run, step, values):
        if values:
            self._each("write", run, int(step), values)

    def close(self):
        self._each("close")

    def _each(self, method, *arguments):
        for logger in list(self._loggers):
            self._call(logger, method, *arguments)

    def _call(self, logger, method, *arguments):
        try:
            getattr(logger, method)(*arguments)
        except Exception as error:
            self._loggers.remove(logger)
            warnings.warn(
                f"The logger {type(logger).__name__} failed in `{method}`: {type(error).__name__}: "
                f"{str(error).removesuffix('.')}. Training continues without it.",
                stacklevel=2,
            )


def _plain(value, described):
    """{tag: number, array, text, picture, sound or histogram} of a `Summary.Value`; empty if it is something else.

    A health row, which holds one number for each variable, becomes a number for each: `health/ratio/dense/kernel`.
    """
    plugin, tag = described.plugin_data.plugin_name, value.tag
    if plugin == "images":
        return {tag: Picture(value.tensor.string_val[2])}
    if plugin == "audio":
        return {tag: Audio(value.tensor.string_val[0])}
    if plugin == "text":
        return {tag: value.tensor.string_val[0].decode()}
    if plugin == "scalars":
        return {tag: float(tf.make_ndarray(value.tensor))}
    if plugin == "histograms":
        return {tag: Histogram(tf.make_ndarray(value.tensor))}
    if plugin == health_rows.PLUGIN_NAME:
        content = health_rows.parse_content(described.plugin_data.content)
        row = health_rows.decode(content["quantity"], tf.make_ndarray(value.tensor))
        tag = health_rows.tag(content["quantity"], content["minimizer"])
        return {f"{tag}/{name}": float(each) for name, each in zip(content["variables"], row, strict=True)}
    content = metadata.parse_content(described.plugin_data.content) if plugin == metadata.PLUGIN_NAME else None
    is_array = content and content["kind"] in (metadata.VECTOR, metadata.MATRIX)
    return {tag: tf.make_ndarray(value.tensor)} if is_array else {}
