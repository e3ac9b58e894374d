"""Encodes answers for the browser: a small binary container, and CSV.

    "GFLW"   uint32 header length   header (JSON, padded with spaces)   arrays, each at a multiple of 8 bytes

The header holds `arrays: [{name, dtype, shape, offset}]` with offsets from the beginning of the message;
everything is little-endian, so that the browser can lay typed arrays over it without copying.
"""

import gzip
import json

import numpy as np

from looptape.dashboard import metadata

MAGIC = b"GFLW"
_FIXED_BYTES = len(MAGIC) + 4
_DTYPES = {np.dtype(name): name for name in ("float32", "uint16", "uint32")}


def pack(header, arrays):
    """Returns the container's bytes, gzipped. `header` is plain JSON data, `arrays` {name: array}."""
    entries = [
        {"name": name, "dtype": _DTYPES[array.dtype], "shape": list(array.shape), "offset": 0}
        for name, array in arrays.items()
    ]
    # Offsets are written in a fixed width, so that filling them in does not move what they point at.
    size = _round_up(_FIXED_BYTES + len(_header_bytes(header, entries)))
    offset = size
    for entry, array in zip(entries, arrays.values(), strict=True):
        entry["offset"] = offset
        offset = _round_up(offset + array.nbytes)
    text = _header_bytes(header, entries).ljust(size - _FIXED_BYTES)
    parts = [MAGIC, np.uint32(len(text)).astype("<u4").tobytes(), text]
    for array in arrays.values():
        raw = array.astype(array.dtype.newbyteorder("<")).tobytes()
        parts.append(raw.ljust(_round_up(len(raw)), b"\0"))
    return gzip.compress(b"".join(parts), compresslevel=4, mtime=0)


def unpack(message):
    """Returns (header, arrays) of a gunzipped container: the reference for the reader in JavaScript."""
    if message[:4] != MAGIC:
        raise ValueError(f"The message begins with {message[:4]!r}; a container begins with {MAGIC!r}.")
    length = int(np.frombuffer(message, "<u4", 1, 4)[0])
    header = json.loads(message[_FIXED_BYTES : _FIXED_BYTES + length])
    arrays = {}
    for entry in header.pop("arrays"):
        count = int(np.prod(entry["shape"], dtype=np.int64))
        flat = np.frombuffer(message, np.dtype(entry["dtype"]).newbyteorder("<"), count, int(entry["offset"]))
        arrays[entry["name"]] = flat.reshape(entry["shape"])
    return header, arrays


def rows_csv(rows):
    """Returns all kept rows as CSV, a line per training step. Padding is an empty field."""
    lines = ["step," + ",".join(f"t{t}" for t in range(rows.values.shape[1]))]
    for step, values in zip(rows.steps.tolist(), rows.values, strict=True):
        valid = metadata.decode_row(values)[1]
        fields = [f"{value:.9g}" if ok else "" for value, ok in zip(values.tolist(), valid.tolist(), strict=True)]
        lines.append(",".join([str(step), *fields]))
    return "\n".join(lines) + "\n"


def _header_bytes(header, entries):
    widened = [{**entry, "offset": f"{entry['offset']:012d}"} for entry in entries]
    return json.dumps({**header, "arrays": widened}, allow_nan=False).encode()


def _round_up(size):
    return -(-size // 8) * 8
