"""The parts of a batch: examples, outputs by name, shares of replicas and checksums."""

import numpy as np
import pytest
import tensorflow as tf

from looptape.trainer.data import batches


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((np.zeros([3, 2]), np.zeros([3])), 3),
        ({"scale": np.float32(2.0), "x": np.zeros([5, 1])}, 5),
        (tf.ragged.constant([[1], [2, 3]]), 2),
        (tf.sparse.from_dense([[1, 0], [0, 0], [0, 2]]), 3),
        (np.float32(1.0), 1),
    ],
    ids=["pair", "with a scalar", "ragged", "sparse", "scalar"],
)
def test_the_number_of_examples(batch, expected):
    assert float(batches.count_examples(batch)) == expected


@pytest.mark.parametrize("rows", [0, 1, 5, 8])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_shares_of_replicas_are_all_rows_in_order_and_nearly_equal(rows, replicas):
    batch = {"x": tf.reshape(tf.range(rows * 2), [rows, 2]), "scale": tf.constant(3)}
    shares = [batches.slice_for_replica(batch, replica, replicas) for replica in range(replicas)]
    np.testing.assert_array_equal(np.concatenate([share["x"] for share in shares]), batch["x"])
    sizes = [len(share["x"]) for share in shares]
    assert max(sizes) - min(sizes) <= 1 and all(int(share["scale"]) == 3 for share in shares)


def test_a_part_for_the_name_of_a_loss():
    def select(structure, name, names=None, what="target"):
        return batches.select(structure, name, names, "loss", what)

    both = {"a": 1, "b": 2}
    assert select(both, "b", ["a", "b"]) == 2
    assert select([1, 2], "b", ["a", "b"]) == 2
    assert select(5, "anything") == 5
    assert select({"only": 7}, "error") == 7
    assert select(both, "c", ["a", "b"], "sample weight") is None
    with pytest.raises(ValueError, match=r"The loss 'c' has no target of its name among \['a', 'b'\]"):
        select(both, "c", ["a", "b"])


def test_checksums_tell_contents_order_and_shape_apart():
    x = np.arange(6, dtype="float32")
    variants = [x, x[::-1].copy(), x.reshape(2, 3), np.where(x == 3, 3.5, x).astype("float32")]
    sums = [int(batches.checksum((tf.constant(variant),))) for variant in variants]
    assert len(set(sums)) == len(sums)
    assert sums[0] == int(batches.checksum((tf.constant(x.copy()),)))


def test_rows_are_repeated_in_every_form_of_tensor():
    ragged, sparse = tf.ragged.constant([[1, 2], [3]]), tf.sparse.from_dense([[0, 5], [6, 0]])
    batch = tf.constant([1, 2]), tf.constant(7), ragged, sparse
    assert batches.with_all_rows(batch, 2, False)[0] is batch[0]
    dense, scalar, more, other = batches.with_all_rows(batch, 2, True)
    assert dense.numpy().tolist() == [1, 2, 1, 2] and int(scalar) == 7
    assert more.to_list() == [[1, 2], [3], [1, 2], [3]]
    assert tf.sparse.to_dense(other).numpy().tolist() == [[0, 5], [6, 0], [0, 5], [6, 0]]
