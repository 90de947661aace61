"""What the messages of an Arrow IPC file claim, read before Arrow is asked to believe it.

Arrow checks the structure of a message, but it allocates whatever size a compressed buffer says it
will have. Here those sizes are added up first. The layout is that of the Arrow columnar format:
File.fbs and Message.fbs, FlatBuffers tables read field by field with every offset checked.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from rolltape.store.errors import DamagedShardError

#: Most that one batch may decompress to: this much, and so much per stored byte.
MOST_BYTES = 256 << 20
MOST_PER_BYTE = 1_000
#: Most rows of one batch: also columns that a file does not have take memory, as nulls.
MOST_ROWS = 1 << 22

#: What is wrong with the end of a file whose writer died: it is a part of what was to be there.
CUT_OFF = "cut off"

_CONTINUATION = b"\xff\xff\xff\xff"
_RECORD_BATCH = 3  # MessageHeader


@dataclass(frozen=True)
class Block:
    """Where a record batch stands in a file.

    Args:
        offset: first byte of its message.
        size: bytes of metadata and body.
    """

    offset: int
    size: int


class _Table:
    """A FlatBuffers table in a buffer; fields by their number in the schema."""

    def __init__(self, data: memoryview, at: int) -> None:
        self.data, self.at = data, at
        self._vtable = at - _unpack("<i", data, at)
        self._length = _unpack("<H", data, self._vtable)

    @classmethod
    def root(cls, data: memoryview) -> _Table:
        return cls(data, _unpack("<I", data, 0))

    def field(self, number: int) -> int | None:
        """Position of a field, None where it has its default."""
        slot = 4 + 2 * number
        if slot + 2 > self._length:
            return None
        offset = _unpack("<H", self.data, self._vtable + slot)
        return self.at + offset if offset else None

    def scalar(self, number: int, form: str) -> int:
        at = self.field(number)
        return 0 if at is None else _unpack(form, self.data, at)

    def table(self, number: int) -> _Table | None:
        at = self.field(number)
        return None if at is None else _Table(self.data, at + _unpack("<I", self.data, at))

    def tables(self, number: int) -> list[_Table]:
        """A vector of tables."""
        at = self.field(number)
        if at is None:
            return []
        at += _unpack("<I", self.data, at)
        places = [at + 4 + 4 * i for i in range(self._count(at, 4))]
        return [_Table(self.data, p + _unpack("<I", self.data, p)) for p in places]

    def text(self, number: int) -> bytes:
        """A string."""
        at = self.field(number)
        if at is None:
            return b""
        at += _unpack("<I", self.data, at)
        return bytes(self.data[at + 4 : at + 4 + self._count(at, 1)])

    def _count(self, at: int, size: int) -> int:
        count = _unpack("<I", self.data, at)
        if at + 4 + count * size > len(self.data):
            raise DamagedShardError("a vector is longer than what holds it")
        return count

    def structs(self, number: int, form: str) -> list[tuple[int, ...]]:
        """A vector of structs."""
        at = self.field(number)
        if at is None:
            return []
        at += _unpack("<I", self.data, at)
        size = struct.calcsize(form)
        end = at + 4 + self._count(at, size) * size
        return list(struct.iter_unpack(form, self.data[at + 4 : end]))


def _unpack(form: str, data: memoryview, at: int) -> int:
    if at < 0 or at + struct.calcsize(form) > len(data):
        raise DamagedShardError("an offset points outside")
    value: int = struct.unpack_from(form, data, at)[0]
    return value


def blocks(data: memoryview, end: int) -> list[Block]:
    """Record batches that the footer of a file lists.

    Args:
        data: the last bytes of the file, at least the footer, its length and the magic.
        end: size of the file.

    Raises:
        DamagedShardError: no footer, or one that points outside, twice to the same bytes, or to
            dictionaries, which the format does not have.
    """
    if len(data) < 10 or bytes(data[-6:]) != b"ARROW1":
        raise DamagedShardError("no Arrow magic at the end")
    length = _unpack("<i", data, len(data) - 10)
    if not 0 < length <= len(data) - 10:
        raise DamagedShardError("the footer does not fit the file")
    footer = _Table.root(data[len(data) - 10 - length : len(data) - 10])
    if footer.structs(2, "<qiiq"):
        raise DamagedShardError("it has dictionaries")
    found = []
    at = 8
    for offset, metadata, _, body in footer.structs(3, "<qiiq"):
        if offset < at or metadata < 8 or body < 0 or offset + metadata + body > end:
            raise DamagedShardError("the footer points outside the file")
        at = offset + metadata + body
        found.append(Block(offset, metadata + body))
    return found


def footer_length(tail: bytes) -> int:
    """Bytes from the end of a file that hold its footer, given at least its last 10 bytes."""
    if len(tail) < 10:
        raise DamagedShardError("too short for an Arrow IPC file")
    return 10 + max(0, int(struct.unpack("<i", tail[-10:-6])[0]))


def message_size(data: memoryview) -> int:
    """Bytes of the message at the start of `data`, metadata and body; 0 at the end of a stream.

    Raises:
        DamagedShardError: it is cut off, or not a message.
    """
    if len(data) < 8:
        raise DamagedShardError(CUT_OFF)
    if bytes(data[:4]) != _CONTINUATION:
        raise DamagedShardError("not an Arrow message")
    length = _unpack("<i", data, 4)
    if length == 0:
        return 0
    if length < 0 or 8 + length > len(data):
        raise DamagedShardError(CUT_OFF)
    body = _Table.root(data[8 : 8 + length]).scalar(3, "<q")
    if body < 0 or 8 + length + body > len(data):
        raise DamagedShardError(CUT_OFF)
    return 8 + length + body


def check_claims(data: memoryview) -> dict[bytes, bytes]:
    """Refuse a record batch whose buffers claim more than a reader may allocate.

    Args:
        data: one message, metadata and body.

    Returns:
        Its custom metadata.

    Raises:
        DamagedShardError: it claims more than `MOST_BYTES` and `MOST_PER_BYTE` allow, or is not
            a record batch.
    """
    length = _unpack("<i", data, 4)
    if not 0 < length <= len(data) - 8:
        raise DamagedShardError("its metadata does not fit")
    message = _Table.root(data[8 : 8 + length])
    header = message.table(2)
    if header is None or message.scalar(1, "<B") != _RECORD_BATCH:
        raise DamagedShardError("not a record batch")
    rows = header.scalar(0, "<q")
    if not 0 <= rows <= MOST_ROWS:
        raise DamagedShardError(f"a batch of {rows} rows")
    body = data[8 + length :]
    compressed = header.field(3) is not None
    total = 0
    for offset, size in header.structs(2, "<qq"):
        if offset < 0 or size < 0 or offset + size > len(body):
            raise DamagedShardError("a buffer lies outside its message")
        claimed = _unpack("<q", body, offset) if compressed and size >= 8 else -1
        total += size if claimed == -1 else claimed
        if claimed < -1 or total > MOST_BYTES + MOST_PER_BYTE * len(data):
            raise DamagedShardError(f"a buffer of {size} bytes claims {claimed}")
    return {pair.text(0): pair.text(1) for pair in message.tables(4)}
