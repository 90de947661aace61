"""Record batches from their messages, the small compressed buffers of a batch inflated together.

Arrow inflates each buffer in a zstd context of its own. Making one asks the processor what it can
do, for which a virtual machine has to be left: some 10 us, where the few hundred bytes of a buffer
take one. Of a batch of few rows and many columns, as recorders commit them, that is most of the
time. Here such buffers go through one context, and Arrow reads a message in which they stand as
they are: the format allows that for each buffer.

What a message claims is read in one go as well, with the limits of `rolltape.store.messages`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from rolltape.store.errors import DamagedShardError
from rolltape.store.messages import MOST_BYTES, MOST_PER_BYTE, MOST_ROWS

_RECORD_BATCH, _ZSTD = 3, 1  # MessageHeader, CompressionType
_MARKER = 0xFFFFFFFF  # how a message begins
_INT64 = struct.Struct("<q")
_int32, _uint32, _uint16, _uint8 = (struct.Struct("<" + form).unpack_from for form in "iIHB")
_int64 = _INT64.unpack_from
_STORED = _INT64.pack(-1)  # before a buffer that is not compressed
_PADDING = [bytes(n) for n in range(8)]
#: Compressed bytes up to which a buffer goes through the shared context.
_SMALL = 32 << 10
#: Batches that are larger inflated are left to Arrow: here they would stand twice in memory.
_MOST = 8 << 20

_Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Parts:
    """What the message of a record batch says of itself, within the limits of a reader.

    Args:
        metadata: its bytes, with the 8 before them.
        body: the bytes behind it.
        buffers: offset and size in the body of each buffer, one after the other.
        claims: of each buffer, bytes it inflates to; -1 if it stands there as it is.
        nbytes: of all of them together.
        codec: of the compression; None without one.
        places: in the metadata, of the first number of `buffers` and of the size of the body.
        stored: the custom metadata.
    """

    metadata: memoryview
    body: memoryview
    buffers: tuple[int, ...]
    claims: list[int]
    nbytes: int
    codec: int | None
    places: tuple[int, int]
    stored: dict[bytes, bytes]


def parts_of(message: memoryview) -> Parts:
    """Take the message of a record batch apart.

    Raises:
        DamagedShardError: it claims more than a reader may allocate, or is not a record batch.
    """
    try:
        return _parts(message)
    except struct.error as error:
        raise DamagedShardError("an offset points outside") from error


def _parts(message: memoryview) -> Parts:
    marker, length = struct.unpack_from("<Ii", message)
    if marker != _MARKER:  # else a stream would end here
        raise DamagedShardError("a message begins otherwise")
    if not 0 < length <= len(message) - 8:
        raise DamagedShardError("its metadata does not fit")
    metadata, body = message[: 8 + length], message[8 + length :]
    _, kind, header, size, pairs = _fields(metadata, _at(metadata, 8), 5)
    if not kind or _uint8(metadata, kind)[0] != _RECORD_BATCH or not header:
        raise DamagedShardError("not a record batch")
    rows, _, vector, compression = _fields(metadata, _at(metadata, header), 4)
    count = _int64(metadata, rows)[0] if rows else 0
    if not 0 <= count <= MOST_ROWS:
        raise DamagedShardError(f"a batch of {count} rows")
    codec = None
    if compression:
        (where,) = _fields(metadata, _at(metadata, compression), 1)
        codec = _uint8(metadata, where)[0] if where else 0
    first, number = _vector(metadata, vector, 16)
    if not 0 <= first <= len(metadata) or not 0 <= size <= len(metadata) - 8:
        raise DamagedShardError("an offset points outside")
    buffers = struct.unpack_from(f"<{2 * number}q", metadata, first)
    claims, total = [], 0
    most = MOST_BYTES + MOST_PER_BYTE * len(message)
    for offset, nbytes in zip(buffers[::2], buffers[1::2], strict=True):
        if offset < 0 or nbytes < 0 or offset + nbytes > len(body):
            raise DamagedShardError("a buffer lies outside its message")
        claimed = _int64(body, offset)[0] if compression and nbytes >= 8 else -1
        total += nbytes if claimed == -1 else claimed
        if claimed < -1 or total > most:
            raise DamagedShardError(f"a buffer of {nbytes} bytes claims {claimed}")
        claims.append(claimed)
    stored = dict(_texts(metadata, pairs))
    return Parts(metadata, body, buffers, claims, total, codec, (first, size), stored)


def _at(data: memoryview, where: int) -> int:
    """What an offset points to."""
    return int(where + _uint32(data, where)[0])


def _fields(data: memoryview, table: int, count: int) -> list[int]:
    """Where the first fields of a FlatBuffers table stand; 0 for those with their default."""
    vtable = table - _int32(data, table)[0]
    if vtable < 0:
        raise DamagedShardError("an offset points outside")
    known = max(0, min(count, (_uint16(data, vtable)[0] - 4) // 2))
    offsets = struct.unpack_from(f"<{known}H", data, vtable + 4)
    return [table + offset if offset else 0 for offset in offsets] + [0] * (count - known)


def _vector(data: memoryview, field: int, size: int) -> tuple[int, int]:
    """Where the first element of a vector stands, and how many there are."""
    if not field:
        return 0, 0
    at = _at(data, field)
    (count,) = _uint32(data, at)
    if at + 4 + count * size > len(data):
        raise DamagedShardError("a vector is longer than what holds it")
    return at + 4, count


def _texts(data: memoryview, field: int) -> list[tuple[bytes, bytes]]:
    """Pairs of strings."""
    first, count = _vector(data, field, 4)
    found = []
    for place in range(first, first + 4 * count, 4):
        key, value = (
            bytes(data[at : at + size])
            for at, size in (_vector(data, f, 1) for f in _fields(data, _at(data, place), 2))
        )
        found.append((key, value))
    return found


class Decoder:
    """Reads record batches of a schema.

    Args:
        schema: of the file.
        wanted: indices of the columns that are read, ascending; None is all.
    """

    def __init__(self, schema: pa.Schema, wanted: Sequence[int] | None = None) -> None:
        self._head = bytes(schema.serialize())
        self._options = pa.ipc.IpcReadOptions(
            included_fields=None if wanted is None else list(wanted),
            use_threads=False,  # nothing is left for them to do
        )
        self._buffers = _buffers_of(schema, wanted)
        self._codec = pa.Codec("zstd")

    def decode(self, run: Sequence[Parts]) -> list[pa.RecordBatch] | None:
        """Some batches; their content is not validated.

        Args:
            run: what their messages say.

        Returns:
            None where Arrow reads them as well by itself: one is not compressed, or has several
            large buffers, which Arrow inflates at the same time, or a column of a type that this
            module does not know; or they are large together.

        Raises:
            DamagedShardError: buffers are not what they claim.
        """
        if self._buffers is None:
            return None
        last = max(self._buffers, default=-1)
        for parts in run:
            # Arrow says what is wrong with one that has too few buffers
            if parts.codec != _ZSTD or not all(parts.places) or len(parts.claims) <= last:
                return None
            if sum(parts.buffers[2 * i + 1] > _SMALL for i in self._buffers) > 1:
                return None
        if sum(parts.nbytes for parts in run) > _MOST:
            return None
        pieces: list[_Bytes] = [self._head]
        for parts, found in zip(run, self._contents(self._buffers, run), strict=True):
            try:
                _add_message(pieces, parts, found)
            except struct.error as error:
                raise DamagedShardError("an offset points outside") from error
        stream = pa.ipc.open_stream(pa.py_buffer(b"".join(pieces)), options=self._options)
        try:
            return [stream.read_next_batch() for _ in run]
        except (EOFError, StopIteration) as error:
            raise DamagedShardError("a message ends early") from error

    def _contents(self, wanted: Sequence[int], run: Sequence[Parts]) -> list[dict[int, _Bytes]]:
        """Of each batch what its buffers hold, by their numbers; empty ones may be left out."""
        found: list[dict[int, _Bytes]] = []
        small: list[tuple[dict[int, _Bytes], int, int]] = []
        frames: list[_Bytes] = []
        for parts in run:
            buffers, claims, body = parts.buffers, parts.claims, parts.body
            mine: dict[int, _Bytes] = {}
            for i in wanted:
                size = buffers[2 * i + 1]
                if size < 8:
                    continue
                offset = buffers[2 * i]
                mine[i] = data = body[offset + 8 : offset + size]
                if claims[i] < 0:
                    continue
                if size <= _SMALL:
                    small.append((mine, i, claims[i]))
                    frames.append(data)
                else:
                    mine[i] = memoryview(self._codec.decompress(data, claims[i]))
            found.append(mine)
        total, at = sum(size for _, _, size in small), 0
        with pa.CompressedInputStream(pa.py_buffer(b"".join(frames)), "zstd") as stream:
            inflated = memoryview(stream.read(total))
            # frames that end elsewhere than claimed only move bytes, which the checksums find
            if len(inflated) != total or (total and stream.read(1)):
                raise DamagedShardError("a buffer holds more or less than it claims")
        for mine, i, size in small:
            mine[i] = inflated[at : at + size]
            at += size
        return found


def _add_message(pieces: list[_Bytes], parts: Parts, found: Mapping[int, _Bytes]) -> None:
    """Add the message of a batch, with the buffers found as they are and all others empty."""
    metadata = bytearray(parts.metadata)
    pieces.append(metadata)
    places, at = [0] * len(parts.buffers), 0
    for i, data in found.items():
        size = len(data)
        if size:
            padding = -size % 8
            places[2 * i], places[2 * i + 1] = at, 8 + size
            pieces += (_STORED, data, _PADDING[padding])
            at += 8 + size + padding
    first, size_at = parts.places
    struct.pack_into(f"<{len(places)}q", metadata, first, *places)
    _INT64.pack_into(metadata, size_at, at)


def _buffers_of(schema: pa.Schema, wanted: Sequence[int] | None) -> list[int] | None:
    """Which buffers of a message belong to the columns; None if some type is not known."""
    found: list[int] = []
    at = 0
    for i, field in enumerate(schema):
        count = _count(field.type)
        if count is None:
            return None
        if wanted is None or i in wanted:
            found += range(at, at + count)
        at += count
    return found


def _count(type_: pa.DataType) -> int | None:
    """Buffers of an array of a type, those of its children included."""
    if pa.types.is_list(type_):
        inner = _count(type_.value_type)
        return None if inner is None else 2 + inner
    if pa.types.is_struct(type_):
        counts = [_count(field.type) for field in type_]
        known = [count for count in counts if count is not None]
        return 1 + sum(known) if len(known) == len(counts) else None
    if pa.types.is_string(type_) or pa.types.is_binary(type_):
        return 3
    return 2 if pa.types.is_primitive(type_) else None
