"""Records of TFRecord files by number, against TensorFlow's own reader."""

import pytest
import tensorflow as tf

from looptape.trainer.data.by_worker.record_files import Records


def write(path, contents):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for content in contents:
            writer.write(content)
    return str(path)


def test_records_of_several_files_are_numbered_through(tmp_path):
    contents = [[b"a" * 100, b"", b"third"], [], [b"\x00\xff", b"last"]]
    files = [write(tmp_path / f"{index}.tfrecord", content) for index, content in enumerate(contents)]
    records = Records(files)
    expected = list(tf.data.TFRecordDataset(files).as_numpy_iterator())
    assert len(records) == len(expected) == 5
    read = tf.function(records.read)
    for order in (range(5), (4, 0, 3)):
        assert [read(tf.constant(i, tf.int64)).numpy() for i in order] == [expected[i] for i in order]


def test_files_that_cannot_be_numbered_are_refused(tmp_path):
    with pytest.raises(ValueError, match="There are no files of records"):
        Records([])
    with pytest.raises(ValueError, match="The 1 files have no record"):
        Records(write(tmp_path / "empty", []))
    path = tmp_path / "cut"
    write(path, [b"whole", b"broken"])
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"record 1, at byte 21, does not end within its 40 bytes"):
        Records(str(path))
