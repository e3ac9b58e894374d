"""Records of an event file, also of a damaged one: what is intact is read, what is not is named."""

import struct
import tempfile
import warnings

import tensorflow as tf
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

# A record: its length, the checksum of the length, the contents, their checksum.
_HEADER, _FRAME = struct.Struct("<QI"), 16


def read_records(path):
    """([record], whether the file has anything else) of an event file.

    A last record that is cut off is normal: the process died while writing it. Any other damage is left out with a
    warning, and the records after it are read.
    """
    records, complete = _intact(path)
    if complete:
        return records, False
    with open(path, "rb") as file:
        contents = file.read()
    position, skipped, after = size(records), 0, 0
    while position < len(contents):
        found = _next_record(contents, position)
        if found is None:
            break  # cut off, or nothing readable behind the damage
        skipped += found - position
        further, complete = _intact_from(contents, found)
        records, after = records + further, after + len(further)
        position = found + size(further)
    if after or _is_damage(contents, position):
        rows = "1 intact record" if after == 1 else f"{after} intact records"
        warnings.warn(
            f"{path} is damaged: {skipped or len(contents) - position} bytes cannot be read and are left out. "
            f"The {rows} after them are kept.",
            stacklevel=3,
        )
    return records, True


def _intact(path):
    """(records up to the first one that is not intact, whether that is all of them)."""
    records = []
    try:
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            records.append(record)  # one by one: those before an error are kept
    except tf.errors.DataLossError:
        return records, False
    return records, True


def _intact_from(contents, position):
    with tempfile.NamedTemporaryFile(suffix=".tfevents") as file:
        file.write(contents[position:])
        file.flush()
        return _intact(file.name)


def size(records):
    """Bytes of records in a file."""
    return sum(len(record) + _FRAME for record in records)


def _next_record(contents, position):
    """The position of the next whole record after the one at `position`, which is not intact; None if there is none."""
    length = _length(contents, position)
    if length is not None:  # only its contents are damaged
        following = position + _FRAME + length
        return following if _length(contents, following) is not None else None
    return next((at for at in range(position + 1, len(contents)) if _length(contents, at) is not None), None)


def _length(contents, position):
    """The length that the header of a record at a position gives, or None if there is no header or no such record."""
    header = contents[position : position + _HEADER.size]
    if len(header) < _HEADER.size:
        return None
    length, checksum = _HEADER.unpack(header)
    whole = position + _FRAME + length <= len(contents)
    return length if whole and masked_crc32c(header[:8]) == checksum else None


def _is_damage(contents, position):
    """Whether what is left is more than a record that is cut off."""
    rest = contents[position:]
    if len(rest) < _HEADER.size:
        return False
    length, checksum = _HEADER.unpack(rest[: _HEADER.size])
    return masked_crc32c(rest[:8]) != checksum or len(rest) >= length + _FRAME
