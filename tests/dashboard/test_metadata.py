"""What writer and reader agree on."""

import json
import subprocess
import sys

import numpy as np
import pytest
from tensorboard.compat.proto import summary_pb2
from tensorboard.util import tensor_util

from looptape.dashboard import metadata


def test_row_tells_padding_nan_and_inf_apart():
    row = metadata.encode_row([1.5, np.nan, np.inf, 0.0, 7.0], valid=[True, True, True, True, False])
    values, valid = metadata.decode_row(row)
    np.testing.assert_array_equal(values, np.float32([1.5, np.nan, np.inf, 0.0, np.nan]))
    np.testing.assert_array_equal(valid, [True, True, True, True, False])


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, int(metadata.PADDING_BITS)])
def test_every_nan_of_a_valid_example_is_a_nan_not_padding(bits):
    values = np.array([bits], dtype=np.uint32).view(np.float32)
    assert metadata.decode_row(metadata.encode_row(values, [True]))[1].all()
    assert metadata.decode_row(metadata.encode_row(values))[1].all()


def test_encode_row_leaves_its_argument_alone_and_takes_float64():
    values = np.float32([1.0, 2.0])
    metadata.encode_row(values, [True, False])
    np.testing.assert_array_equal(values, [1.0, 2.0])
    values = np.array([1.0, 1e300, 2.0])
    row = metadata.encode_row(values, [True, True, False])
    np.testing.assert_array_equal(values, [1.0, 1e300, 2.0])
    np.testing.assert_array_equal(row, np.float32([1.0, np.inf, np.nan]))


def test_valid_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"`valid` has shape \(2,\), `values` has \(3,\); they must be equal"):
        metadata.encode_row([1, 2, 3], [True, False])


def test_padding_survives_the_event_file_format():
    value = metadata.vector_summary("lstm", "state", [1.0, np.nan, 3.0], [True, True, False])
    sent = summary_pb2.Summary.Value.FromString(value.SerializeToString())
    values, valid = metadata.decode_row(tensor_util.make_ndarray(sent.tensor))
    np.testing.assert_array_equal(values, np.float32([1.0, np.nan, np.nan]))
    np.testing.assert_array_equal(valid, [True, True, False])


@pytest.mark.parametrize(
    ("value", "tag", "plugin", "content"),
    [
        (
            metadata.vector_summary("a/b", "weight/kernel", [1.0], direction="backward", time_shape=(1, 1)),
            "timestep/a/b/weight/kernel",
            "gradient_flow",
            {
                "kind": "vector",
                "layer": "a/b",
                "quantity": "weight/kernel",
                "direction": "backward",
                "time_shape": [1, 1],
            },
        ),
        (
            metadata.loss_share_summary("lstm", "mse", [1.0]),
            "timestep/lstm/loss_share/mse",
            "gradient_flow",
            {"kind": "vector", "layer": "lstm", "quantity": "loss_share", "loss": "mse"},
        ),
        (
            metadata.credit_summary("lstm", np.eye(2)),
            "timestep/lstm/credit",
            "gradient_flow",
            {"kind": "matrix", "layer": "lstm", "quantity": "credit"},
        ),
        (
            metadata.rows_summary("lstm", 12),
            "timestep/lstm/rows",
            "gradient_flow_rows",
            {"kind": "count", "layer": "lstm", "quantity": "rows"},
        ),
    ],
)
def test_summaries_have_their_tag_plugin_and_content(value, tag, plugin, content):
    assert value.tag == tag
    assert value.metadata.plugin_data.plugin_name == plugin
    assert value.metadata.data_class == summary_pb2.DATA_CLASS_TENSOR
    assert metadata.parse_content(value.metadata.plugin_data.content) == {"version": 1, **content}


def test_count_is_an_integer_scalar():
    count = tensor_util.make_ndarray(metadata.rows_summary("lstm", 2**40).tensor)
    assert count.shape == () and count == 2**40


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"version": 2, "kind": "vector", "layer": "a", "quantity": "b"}',
        b'{"version": 1, "kind": "cube", "layer": "a", "quantity": "b"}',
        b'{"version": 1, "kind": "vector", "layer": 3, "quantity": "b"}',
        b'{"version": 1, "kind": "vector", "layer": "a"}',
        b'{"version": 1, "kind": "vector", "layer": "a", "quantity": "b", "time_shape": [0]}',
        b'{"version": 1, "kind": "vector", "layer": "a", "quantity": "b", "time_shape": "3"}',
    ],
)
def test_foreign_content_is_not_taken_for_ours(content):
    assert metadata.parse_content(content) is None


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="`kind` is 'cube'; it must be one of"):
        metadata.summary_metadata("cube", "a", "state")
    with pytest.raises(ValueError, match="quantity='loss_share' with loss=None"):
        metadata.summary_metadata("vector", "a", "loss_share")
    with pytest.raises(ValueError, match=r"credit matrix of 'a' has shape \(2, 3\); it must be \[time, time\]"):
        metadata.credit_summary("a", np.zeros((2, 3)))
    with pytest.raises(ValueError, match="array of float64 cannot be written"):
        metadata.tensor_proto(np.zeros(2))


def test_the_package_imports_neither_tensorflow_nor_keras_nor_ours():
    code = (
        "import sys, json, looptape.dashboard.metadata, looptape.dashboard.plugin;"
        "unwanted = {'tensorflow', 'keras', 'trainer', 'losses', 'models', 'experiments'};"
        "print(json.dumps(sorted(unwanted & set(sys.modules))))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(out.stdout) == []


def test_the_total_loss_of_each_minimizer():
    """Known by their gradient norms; a slash in the name of a loss makes no minimizer."""
    one = ["loss/a/kl", "loss/error", "loss/total", "optimizer/gradient_norm/global", "optimizer/gradient_norm/a/kl"]
    assert metadata.total_loss_tags(one) == {"": "loss/total"}
    assert metadata.total_loss_tags(["loss/error", "optimizer/gradient_norm/global"]) == {"": "loss/error"}
    both = [f"optimizer/gradient_norm/{name}/global" for name in ("g", "d")]
    gan = ["loss/d/fake", "loss/d/real", "loss/d/total", "loss/g/fooling", *both]
    assert metadata.total_loss_tags(gan) == {"d": "loss/d/total", "g": "loss/g/fooling"}
    assert metadata.total_loss_tags([*gan, "loss/penalty"]) == {
        "": "loss/penalty",
        "d": "loss/d/total",
        "g": "loss/g/fooling",
    }
    assert metadata.total_loss_tags(["loss/a", "loss/b", "accuracy"]) == {}
