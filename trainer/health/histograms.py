"""Histograms of gradients and weights, counted on the device and written as TensorBoard's standard summary."""

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.histogram import metadata as histogram_metadata

BUCKETS = 30


def count(tensors):
    """[tensors, 2 + BUCKETS]: smallest and largest finite value, and how many lie in each bucket. Traced.

    NaN and Inf are left out: TensorBoard's page breaks on them.
    """
    return tf.stack([_count(tensor) for tensor in tensors])


def _count(tensor):
    values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
    values = tf.reshape(tf.cast(values, tf.float32), [-1])
    values = tf.boolean_mask(values, tf.math.is_finite(values))
    none = tf.equal(tf.size(values), 0)
    least, most = tf.cond(
        none, lambda: (tf.zeros([]), tf.zeros([])), lambda: (tf.reduce_min(values), tf.reduce_max(values))
    )
    # In float64 the difference of two float32 numbers is exact; a single value lies in the last bucket, as in
    # TensorBoard's own summary.
    low, width = tf.cast(least, tf.float64), tf.cast(most, tf.float64) - tf.cast(least, tf.float64)
    share = tf.where(width > 0, (tf.cast(values, tf.float64) - low) / tf.where(width > 0, width, 1), 1)
    index = tf.minimum(tf.cast(share * BUCKETS, tf.int32), BUCKETS - 1)
    counts = tf.math.unsorted_segment_sum(tf.ones_like(index), index, BUCKETS)
    return tf.concat([tf.stack([least, most]), tf.cast(counts, tf.float32)], axis=0)


def summary(tag, row):
    """The `Summary.Value` of one row of `count`. On the host."""
    least, most, counts = float(row[0]), float(row[1]), np.asarray(row[2:], np.float64)
    edges = np.linspace(least, most, BUCKETS + 1)
    buckets = np.stack([edges[:-1], edges[1:], counts], axis=1)
    dims = [tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in buckets.shape]
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_DOUBLE,
        tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=dims),
        tensor_content=buckets.astype("<f8").tobytes(),
    )
    metadata = histogram_metadata.create_summary_metadata(display_name=None, description=None)
    metadata.data_class = summary_pb2.DATA_CLASS_TENSOR
    return summary_pb2.Summary.Value(tag=tag, tensor=tensor, metadata=metadata)
