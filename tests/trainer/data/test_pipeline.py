"""Descriptions of data pipelines: what differs from the data of a checkpoint, in words."""

import numpy as np
import tensorflow as tf

from looptape.trainer.data import pipeline


def described(batch=4, seed=1, shift=0.0, prefetch=False):
    data = tf.data.Dataset.from_tensor_slices(np.arange(12, dtype="float32") + shift).shuffle(5, seed=seed).batch(batch)
    return pipeline.describe(data.prefetch(2) if prefetch else data)


def test_operations_are_listed_first_to_last():
    assert pipeline.operations(described()) == "TensorSlice → Shuffle → Batch"
    assert pipeline.same_operations(described(), described(batch=3))
    assert not pipeline.same_operations(described(), described(prefetch=True))


def test_an_option_that_differs_is_named():
    assert pipeline.changes(described(), described()) == []
    assert pipeline.changes(described(), described(batch=3)) == ["batch_size of Batch: 4 → 3"]
    [found] = pipeline.changes(described(), described(shift=1.0))
    assert found.startswith("contents of TensorSlice: [")


def test_a_checksum_changes_with_one_number_of_a_small_array():
    array = np.zeros([100, 3], "float32")
    changed = array.copy()
    changed[57, 1] = 1e-3
    assert pipeline.checksum(array) == pipeline.checksum(tf.constant(array)) != pipeline.checksum(changed)
    assert pipeline.checksum(np.array(["a", "b"], object)) != pipeline.checksum(np.array(["a", "c"], object))
    assert pipeline.checksum(tf.sparse.from_dense(array)) == 0  # is not compared
