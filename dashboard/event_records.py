"""Records of an event file, also of a damaged one, without tensorflow: intact records are read, damage is named."""

import functools
import struct
import warnings

import numpy as np

# A record: its length, the checksum of the length, the contents, their checksum.
_HEADER, _CHECKSUM, _FRAME = struct.Struct("<QI"), struct.Struct("<I"), 16
_BLOCK = 64  # bytes of a checksum's block
_AT_ONCE = 1 << 22  # bytes whose checksums are computed together
# These bytes take the checksum's register from 0 to its start value, after which leading zeros do not count.
_START = bytes.fromhex("54641f64")


def read_records(path):
    """Returns ([record], whether the file has anything else) of an event file.

    A last record that is cut off is normal: the process died while writing it, or is still writing. Any other damage
    is left out with a warning, and the records after it are read.
    """
    with open(path, "rb") as file:
        contents = file.read()
    places, unread, cut = _places(contents)
    intact = _intact(contents, places)
    records = [contents[at + _HEADER.size : end - 4] for (at, end), whole in zip(places, intact, strict=True) if whole]
    damaged = unread + [place for place, whole in zip(places, intact, strict=True) if not whole]
    if damaged:
        first = min(damaged)[0]
        after = sum(at > first for (at, _), whole in zip(places, intact, strict=True) if whole)
        rows = "1 intact record" if after == 1 else f"{after} intact records"
        warnings.warn(
            f"{path} is damaged: {sum(end - at for at, end in damaged)} bytes cannot be read and are left out. "
            f"The {rows} after them are kept.",
            stacklevel=3,
        )
    return records, bool(damaged or cut)


def size(records):
    """Returns the bytes of records in a file."""
    return sum(len(record) + _FRAME for record in records)


def _places(contents):
    """Returns ([(begin, end)] of whole records, [(begin, end)] of bytes without a header, bytes that are cut off)."""
    places, unread, position = [], [], 0
    while position < len(contents):
        length = _length(contents, position)
        if length is None and len(contents) - position >= _HEADER.size:
            following = _next_header(contents, position + 1)
            unread.append((position, following))
            position = following
            continue
        end = len(contents) + 1 if length is None else position + _FRAME + length
        if end > len(contents):
            return places, unread, len(contents) - position
        places.append((position, end))
        position = end
    return places, unread, 0


def _length(contents, position):
    """Returns the length that the header at a position gives, or None if there is no intact header."""
    if len(contents) - position < _HEADER.size:
        return None
    length, checksum = _HEADER.unpack_from(contents, position)
    return length if _checksum_of_length(length) == checksum else None


@functools.lru_cache(4096)
def _checksum_of_length(length):
    return int(masked_crc32c([struct.pack("<Q", length)])[0])


def _next_header(contents, position):
    """Returns where the next record begins whose header is intact and which is whole; the file's end without one."""
    for begin in range(position, len(contents) - _FRAME + 1, _AT_ONCE):
        piece = np.frombuffer(contents[begin : begin + _AT_ONCE + _HEADER.size - 1], np.uint8)
        headers = np.lib.stride_tricks.sliding_window_view(piece, _HEADER.size)
        # No record has 4 GiB: the upper half of its length is zero. Few other places look like that.
        for at in np.flatnonzero((headers[:, 4:8] == 0).all(1)) + begin:
            length = _length(contents, int(at))
            if length is not None and at + _FRAME + length <= len(contents):
                return int(at)
    return len(contents)


def _intact(contents, places):
    """Returns for each record whether its checksum is that of its contents."""
    found, bodies, held = [], [], 0
    for at, end in places:
        bodies.append(contents[at + _HEADER.size : end - 4])
        held += len(bodies[-1])
        if held >= _AT_ONCE:
            found.append(masked_crc32c(bodies))
            bodies, held = [], 0
    found.append(masked_crc32c(bodies))
    written = [_CHECKSUM.unpack_from(contents, end - 4)[0] for _, end in places]
    return (np.concatenate(found) == np.array(written, np.uint32)).tolist()


def masked_crc32c(parts):
    """Returns the checksums [parts] that event files hold of some bytes: CRC-32C, rotated and shifted.

    All blocks of all parts are summed together, one byte of each at a time, and then put together by part.
    """
    if not parts:
        return np.zeros(0, np.uint32)
    counts = np.array([-(-(len(part) + len(_START)) // _BLOCK) for part in parts])
    padded = b"".join(bytes(-(len(part) + len(_START)) % _BLOCK) + _START + part for part in parts)
    blocks = np.frombuffer(padded, np.uint8).reshape(-1, _BLOCK)
    sums = np.zeros(len(blocks), np.uint32)
    for column, table in enumerate(_tables()):
        sums ^= table[blocks[:, column]]
    ends = np.cumsum(counts)
    after = np.repeat(ends, counts) - 1 - np.arange(len(blocks))  # blocks that follow in the same part
    for power in range(int(counts.max() - 1).bit_length()):
        further = (after >> power) & 1 == 1
        sums[further] = _moved(sums[further], _moves(power))
    checksums = ~np.bitwise_xor.reduceat(sums, ends - counts)
    return ((checksums >> 15) | (checksums << 17)) + np.uint32(0xA282EAD8)


@functools.cache
def _tables():
    """Returns [table] of a block's bytes, from the first to the last: what each of 256 values adds to the sum."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ np.where(table & 1, np.uint32(0x82F63B78), np.uint32(0))
    tables = [table]
    for _ in range(_BLOCK - 1):
        tables.append(table[tables[-1] & 255] ^ (tables[-1] >> 8))
    return tables[::-1]


@functools.cache
def _moves(power):
    """Returns four tables, by the bytes of a sum: the sum after 2^power further blocks of zeros."""
    if power:
        half = _moves(power - 1)
        return [_moved(table, half) for table in half]
    first = _tables()[-1]
    tables = [np.arange(256, dtype=np.uint32) << (8 * byte) for byte in range(4)]
    for _ in range(_BLOCK):
        tables = [first[table & 255] ^ (table >> 8) for table in tables]
    return tables


def _moved(sums, tables):
    return functools.reduce(np.bitwise_xor, [tables[byte][(sums >> (8 * byte)) & 255] for byte in range(4)])
