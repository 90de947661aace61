"""Changes numbers inside an Arrow IPC file, and makes its checksums hold again."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable

import pyarrow as pa

from rolltape.store import messages
from rolltape.store.errors import DamagedShardError
from rolltape.store.messages import Block, _Table
from rolltape.store.shards import CHECKSUM, COLUMNS, checksum, column_checksums


def _blocks(data: bytes | bytearray) -> list[Block]:
    return messages.blocks(memoryview(data), len(data))


def _footer(data: bytes | bytearray) -> tuple[int, _Table]:
    (length,) = struct.unpack("<i", data[-10:-6])
    base = len(data) - 10 - length
    return base, _Table.root(memoryview(data)[base : base + length])


def _vector(table: _Table, number: int) -> int | None:
    at = table.field(number)
    if at is None:
        return None
    (offset,) = struct.unpack_from("<I", table.data, at)
    return at + int(offset)


def _message(data: bytes | bytearray, number: int = 0) -> tuple[int, int, _Table]:
    """Where the metadata of a batch begins, where its body does, and the metadata."""
    block = _blocks(data)[number]
    (length,) = struct.unpack_from("<i", data, block.offset + 4)
    base = block.offset + 8
    return base, base + length, _Table.root(memoryview(data)[base : base + length])


def footer_blocks(data: bytes | bytearray) -> list[int]:
    """Where the entries of the batches stand in the footer, 24 bytes each."""
    base, footer = _footer(data)
    at = _vector(footer, 3)
    assert at is not None
    return [base + at + 4 + 24 * i for i in range(len(_blocks(data)))]


def batch_field(data: bytes | bytearray, number: int) -> int:
    """Where a scalar field of the first record batch stands."""
    base, _, message = _message(data)
    at = message.table(2).field(number)
    assert at is not None
    return base + at


def vectors(data: bytes | bytearray) -> list[int]:
    """Where the lengths of the vectors of the footer and of the first batch stand."""
    base, footer = _footer(data)
    start, _, message = _message(data)
    found = [(base, _vector(footer, 3)), (start, _vector(message, 4))]
    found += [(start, _vector(message.table(2), number)) for number in (1, 2)]
    return [at + where for at, where in found if where is not None]


def set_number(data: bytearray, target: str, value: int) -> bool:
    """Overwrite one number of the first batch; False if there is none of that name."""
    base, body, message = _message(data)
    header = message.table(2)
    assert header is not None
    nodes, buffers = _vector(header, 1), _vector(header, 2)
    assert nodes is not None and buffers is not None
    spans = header.structs(2, "<qq")
    first = next((i for i, (_, size) in enumerate(spans) if size > 8), None)
    length = message.field(3)
    if first is None or length is None:
        return False
    where = {
        "node": base + nodes + 4,
        "nulls": base + nodes + 12,
        "offset": base + buffers + 4 + 16 * first,
        "length": base + buffers + 12 + 16 * first,
        "claim": body + spans[first][0],
        "body": base + length,
    }
    struct.pack_into("<q", data, where[target], value)
    return True


def mutate(data: bytes, edits: Iterable[tuple[int, bytes]], *, rehash: bool) -> bytes:
    """Overwrite bytes of a file.

    Args:
        data: a finished shard.
        edits: (position, bytes).
        rehash: make the checksums of its batches hold again, as far as these can be decoded.
    """
    forged = bytearray(data)
    for at, piece in edits:
        forged[at : at + len(piece)] = piece[: len(forged) - at]
    if rehash:
        # what cannot be decoded is refused before a checksum is looked at
        with contextlib.suppress(DamagedShardError, pa.ArrowException, OSError, ValueError):
            _rehash(forged)
    return bytes(forged)


def _rehash(data: bytearray) -> None:
    schema = pa.ipc.read_schema(pa.py_buffer(bytes(data[8:])))
    for number, block in enumerate(_blocks(data)):
        message = bytes(data[block.offset : block.offset + block.size])
        stored = messages.check_claims(memoryview(message))
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(message), schema)
        batch.validate(full=True)
        fresh = {
            CHECKSUM: checksum(batch).encode(),
            COLUMNS: "".join(column_checksums(batch, number)).encode(),
        }
        for name, value in fresh.items():
            old = stored.get(name, b"")
            at = data.find(old, block.offset, block.offset + block.size) if old else -1
            if at >= 0:
                data[at : at + len(old)] = value[: len(old)].ljust(len(old), b"0")
