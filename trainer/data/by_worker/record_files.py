"""TFRecord files, read by the number of a record."""

import os
import struct

import numpy as np
import tensorflow as tf

# A record: its length (8 bytes), a checksum of that (4), the contents, a checksum of them (4).
_BEFORE, _AFTER = 12, 4


class Records:
    """The records of uncompressed TFRecord files, numbered in the order of the files.

    Args:
        files: a path or a list of paths.
    """

    def __init__(self, files):
        files = [files] if isinstance(files, str | os.PathLike) else list(files)
        if not files:
            raise ValueError("There are no files of records: the list is empty. Check the pattern it comes from.")
        self._files = [os.fspath(file) for file in files]
        missing = [file for file in self._files if not os.path.isfile(file)]
        if missing:
            others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise FileNotFoundError(
                f"There is no file {missing[0]!r}{others} in {os.getcwd()!r}; `files` must be paths of TFRecord files. "
                "Correct the path, or expand a pattern with sorted(glob.glob('data/*.tfrecord'))."
            )
        found = [_scan(file) for file in self._files]
        self._count = sum(map(len, found))
        if not self._count:
            raise ValueError(f"The {len(files)} files have no record. The first one is {self._files[0]!r}.")
        with tf.init_scope():
            self._begins = tf.constant(np.concatenate(found))
            self._ends = tf.constant(np.cumsum([len(begins) for begins in found]))  # numbers of records, by file
            self._paths = tf.constant(self._files)

    def __len__(self):
        return self._count

    def read(self, index):
        """The contents of a record, a string scalar. Traced; an int64 scalar.

        TensorFlow's own reader checks them by their checksum.
        """
        path = self._paths[tf.searchsorted(self._ends, [index], side="right")[0]]
        signature = {"output_types": [tf.string], "output_shapes": [[]]}
        # Without a buffer, so that no more is read than the record.
        records = tf.raw_ops.TFRecordDatasetV2(
            filenames=[path], compression_type="", buffer_size=0, byte_offsets=[self._begins[index]]
        )
        first = tf.raw_ops.TakeDataset(input_dataset=records, count=1, **signature)
        return tf.raw_ops.DatasetToSingleElement(dataset=first, **signature)[0]

    def read_all(self, indices):
        """The contents of several records, a string vector. Traced; an int64 vector."""
        return tf.ensure_shape(tf.map_fn(self.read, indices, fn_output_signature=tf.string), indices.shape)


def _scan(path):
    """Where each record of a file begins, by the lengths that stand before them."""
    begins = []
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        at = 0
        while at < end:
            file.seek(at)
            head = file.read(8)
            size = struct.unpack("<Q", head)[0] if len(head) == 8 else end
            if at + _BEFORE + size + _AFTER > end:
                raise ValueError(
                    f"{path!r} is not a whole, uncompressed TFRecord file: record {len(begins)}, at byte {at:,}, does "
                    f"not end within its {end:,} bytes. Write the file again, without compression."
                )
            begins.append(at)
            at += _BEFORE + size + _AFTER
    return np.array(begins, np.int64)
