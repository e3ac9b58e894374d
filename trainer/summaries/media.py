"""Histograms, pictures, sounds and texts from inside a step, kept on the device until a row is logged."""

import numbers
import reprlib
import warnings

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto import summary_pb2

from looptape.trainer.arguments import check_integer
from looptape.trainer.summaries import event_writer
from looptape.trainer.variables import creating_variables

_BUCKETS = 30
_NEVER = -1


class Media:
    """Notes of `log_histogram`, `log_image`, `log_audio` and `log_text` until the host writes them.

    Each name has a variable, to which the update writes whose row is logged next. In all other updates nothing but a
    comparison of two integers happens, and never a call of the host.

    Args:
        owner: the engine.
    """

    def __init__(self, owner):
        self._owner = owner
        self._kinds = {}  # {name: "histogram", "image", "text", or "audio" with its sample rate}
        self._values = {}  # {name: variable}
        self._wanted = None  # the step before the update whose values are kept
        self._aimed = _NEVER
        self._warned = False

    @property
    def variables(self):
        """All of them: none is part of a checkpoint."""
        return [*self._values.values(), *([] if self._wanted is None else [self._wanted])]

    def record(self, name, kind, make):
        """Keeps a value if the present update is logged. Traced or eager; not on several replicas, nor under XLA.

        Args:
            name: its tag.
            kind: "histogram", "image", "text", or "audio" with its sample rate: "audio at 8000 Hz".
            make: function that gives the value as a tensor.
        """
        if self._owner.replicas > 1 or self._owner.jit_compile:
            self._warn(name, kind)
            return
        known = self._kinds.setdefault(name, kind)
        if known != kind:
            raise ValueError(f"{name!r} is logged as {known} and as {kind}; a name has one kind. Use two names.")
        with creating_variables():
            if self._wanted is None:
                self._wanted = tf.Variable(self._aimed, dtype=tf.int64, trainable=False)
            if name not in self._values:
                empty = tf.constant("") if kind == "text" else tf.zeros([0])
                shape = tf.TensorShape(None)
                self._values[name] = tf.Variable(empty, shape=shape, trainable=False, validate_shape=False)
        variable = self._values[name]

        def note():
            variable.assign(make())
            return tf.constant(True)

        tf.cond(tf.equal(self._owner.step.value(), self._wanted), note, lambda: tf.constant(False))

    def _warn(self, name, kind):
        """Says once that nothing will be logged."""
        if not self._warned:
            self._warned = True
            why = "`jit_compile` is set" if self._owner.jit_compile else f"there are {self._owner.replicas} replicas"
            warnings.warn(
                f"The {kind.split()[0]} {name!r} is not logged: {why}, and histograms, pictures, sounds and texts from "
                "inside a step need one device without XLA. `self.log` works there; a callback can log the others.",
                stacklevel=4,
            )

    def aim(self, step):
        """Makes the update that ends at this step, or none, the one that is noted. On the host."""
        step = _NEVER + 1 if step is None else step
        if self._wanted is not None and self._aimed != step - 1:
            self._wanted.assign(step - 1)
        self._aimed = step - 1

    def take(self, step):
        """[`Summary.Value`] of what the update that ended at this step noted; then it is forgotten. On the host."""
        if self._aimed != step - 1:
            return []
        values = []
        for name, variable in self._values.items():
            value = variable.numpy()
            if self._kinds[name] == "text":
                values += [event_writer.text(name, value.decode(errors="replace"))] if value else []
                variable.assign("")
            elif value.size:
                kind, *rate = self._kinds[name].split(" at ")
                values += {"histogram": _histogram, "image": _images, "audio": _sounds}[kind](name, value, *rate)
                variable.assign(tf.zeros([0]))
        return values


def check_name(method, name):
    """Refuses what is no tag."""
    if not isinstance(name, str) or not name:
        raise TypeError(
            f"`{method}` was called with the name {name!r}; it must be a non-empty string, the tag in TensorBoard. "
            f"Use e.g. self.{method}('outputs', …)."
        )


def as_tensor(method, name, value, needed, dtype=None):
    """A value as a tensor; an error names the tag and what is needed."""
    try:
        return tf.convert_to_tensor(value, dtype)
    except (TypeError, ValueError):
        kind = "a tensor" if tf.is_tensor(value) else f"{reprlib.repr(value)} ({type(value).__name__})"
        given = f"{kind} of type {value.dtype.name}" if tf.is_tensor(value) else kind
        raise TypeError(
            f"`{method}` of {name!r} got {given}; it needs {needed}. Convert it, or leave the call out."
        ) from None


def check_text(name, text):
    """One text as a tensor."""
    text = as_tensor("log_text", name, text, "a str or a scalar tf.string tensor", tf.string)
    if text.shape.rank != 0:
        raise ValueError(f"The text {name!r} has shape {text.shape}; it must be one string. Use tf.strings.join.")
    return text


def check_numbers(name, tensor):
    """The elements of what is to become a histogram: those that a ragged or a sparse tensor holds."""
    if isinstance(tensor, tf.RaggedTensor):
        tensor = tensor.flat_values
    if isinstance(tensor, tf.SparseTensor | tf.IndexedSlices):
        tensor = tensor.values
    tensor = as_tensor("log_histogram", name, tensor, "a tensor of real numbers")
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
        raise TypeError(
            f"The histogram {name!r} got a tensor of type {tensor.dtype.name}; it counts real numbers. Use `log_text` "
            "for texts, and tf.abs or tf.math.real for complex numbers."
        )
    return tensor


def buckets(tensor):
    """[buckets, 3] left edges, right edges and counts of the finite elements of a tensor; no row if there are none."""
    values = tf.reshape(tf.cast(tf.stop_gradient(tensor), tf.float32), [-1])
    values = tf.boolean_mask(values, tf.math.is_finite(values))

    def count():
        low, high = tf.reduce_min(values), tf.reduce_max(values)
        high = tf.where(high > low, high, low + tf.maximum(tf.abs(low) * 1e-3, 1e-6))
        counts = tf.cast(tf.histogram_fixed_width(values, [low, high], _BUCKETS), tf.float32)
        edges = low + (high - low) * tf.range(_BUCKETS + 1, dtype=tf.float32) / _BUCKETS
        return tf.stack([edges[:-1], edges[1:], counts], axis=1)

    return tf.cond(tf.size(values) > 0, count, lambda: tf.zeros([0, 3]))


def check_images(name, images):
    """Images as a tensor [batch, height, width, channels], from several or one."""
    needed = "pixels as a tensor, [height, width, channels] or [batch, height, width, channels]"
    images = tf.stop_gradient(as_tensor("log_image", name, images, needed))
    if images.shape.rank not in (3, 4) or images.shape[-1] not in (1, 3, 4):
        raise ValueError(
            f"The image {name!r} has shape {images.shape}; it must be [height, width, channels] or [batch, "
            "height, width, channels] with 1, 3 or 4 channels. Add an axis for grey pictures: images[..., tf.newaxis]."
        )
    return images if images.shape.rank == 4 else images[tf.newaxis]


def pixels(images, limit):
    """[count, height, width, channels] from 0 to 255 of the first images; real numbers are taken to lie in [0, 1]."""
    images = images[:limit]
    if images.dtype.is_floating:
        images = tf.round(255.0 * tf.clip_by_value(tf.cast(images, tf.float32), 0.0, 1.0))
    return tf.cast(images, tf.float32)


def check_audio(name, audio, sample_rate):
    """Sounds as a tensor [batch, samples, channels], from several or one, and their kind for `Media.record`."""
    if isinstance(sample_rate, bool) or not isinstance(sample_rate, numbers.Integral) or sample_rate < 1:
        raise ValueError(
            f"The audio {name!r} has sample_rate={sample_rate!r}; it must be a Python integer of at least 1, the "
            "number of samples per second. Use e.g. 16000."
        )
    needed = "samples as a tensor, [samples, channels] or [batch, samples, channels]"
    audio = tf.stop_gradient(as_tensor("log_audio", name, audio, needed))
    if audio.shape.rank not in (2, 3) or audio.shape[-1] is None or not audio.dtype.is_floating:
        raise ValueError(
            f"The audio {name!r} is {audio.dtype.name} of shape {audio.shape}; it must be real numbers [samples, "
            "channels] or [batch, samples, channels] with a known number of channels. Add an axis for one channel: "
            "audio[..., tf.newaxis]."
        )
    return audio if audio.shape.rank == 3 else audio[tf.newaxis], f"audio at {sample_rate} Hz"


def clipped(audio, limit):
    """[count, samples, channels] of the first sounds as float32 between -1 and 1; what is not finite becomes 0."""
    audio = tf.cast(audio[:limit], tf.float32)
    return tf.clip_by_value(tf.where(tf.math.is_finite(audio), audio, 0.0), -1.0, 1.0)


def check_limit(limit):
    return check_integer("limit", limit, 1, "It is the largest number of pictures or sounds of a row.")


def _sounds(name, sounds, rate):
    return [event_writer.audio(tag, sound, int(rate.split()[0])) for tag, sound in _tagged(name, sounds)]


def _histogram(name, rows):
    metadata = summary_pb2.SummaryMetadata(
        plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="histograms"),
        data_class=summary_pb2.DATA_CLASS_TENSOR,
    )
    tensor = tf.make_tensor_proto(rows.astype(np.float64))
    value = summary_pb2.Summary.Value(tag=name, metadata=metadata)
    value.tensor.MergeFromString(tensor.SerializeToString())
    return [value]


def _images(name, images):
    return [event_writer.image(tag, image.astype(np.uint8)) for tag, image in _tagged(name, images)]


def _tagged(name, several):
    """[(tag, one of several)]: the name itself if there is one only."""
    tags = [name] if len(several) == 1 else [f"{name}/{index}" for index in range(len(several))]
    return list(zip(tags, several, strict=True))
