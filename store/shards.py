"""One shard: an Arrow IPC file that grows batch by batch and can be read before it is finished.

While it is being written a shard is `<writer>-<n>.arrow.live`: the 8 magic bytes of an Arrow IPC
file, then a plain IPC stream. Each record batch carries the checksum of its content. Closing adds
the IPC footer and renames the file to `<writer>-<n>-<xxh3-128 of the file>.arrow`, which any
Arrow reader opens with random access. Nothing is copied or rewritten on the way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import xxhash

from rolltape.store.errors import DamagedShardError
from rolltape.store.schema import FORMAT_MAJOR, FORMAT_MINOR

_PIECE = 1 << 16
MAGIC = b"ARROW1\0\0"
CHECKSUM = b"xxh3"
LIVE = ".arrow.live"
_SEALED = re.compile(r"(?P<writer>[0-9a-f]{32})-(?P<n>\d+)-(?P<hash>[0-9a-f]{32})\.arrow")
# what Arrow raises on bytes that are not what it wrote
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError)
_OPTIONS = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))


def canonical(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch as an IPC reader will return it: no slices, no needless bitmaps."""
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


def checksum(batch: pa.RecordBatch) -> str:
    """Hash of a canonical batch: its schema, every null count, every buffer with its length."""
    digest = xxhash.xxh3_64(batch.num_rows.to_bytes(8, "little"))
    digest.update(batch.schema.remove_metadata().serialize())
    for column in batch.columns:
        for count in _null_counts(column):
            digest.update(count.to_bytes(8, "little", signed=True))
        for buffer in column.buffers():
            size = -1 if buffer is None else buffer.size
            digest.update(size.to_bytes(8, "little", signed=True))
            if buffer is not None:
                digest.update(buffer)
    return digest.hexdigest()


def _null_counts(array: pa.Array) -> Iterator[int]:
    yield array.null_count
    if pa.types.is_list(array.type):
        yield from _null_counts(array.values)
    elif pa.types.is_struct(array.type):
        for index in range(array.type.num_fields):
            yield from _null_counts(array.field(index))


class _HashingSink:
    """File object that hashes what passes through; pyarrow only needs `write` and `flush`."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = xxhash.xxh3_128()
        self.size = 0

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        self.file.write(view)
        self.digest.update(view)
        self.size += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:  # the shard closes the file itself, after the rename
        self.flush()


class ShardWriter:
    """Writes one shard of one table.

    Args:
        folder: the table's folder; created if absent.
        writer: uuid hex of the writer.
        number: running number of the shard within (table, writer).
        schema: schema of the table.
        fsync: also survive power loss, at a cost.
        hidden: nobody reads the file before it is finished; for a recovery.

    The live file is locked (flock) for as long as its writer lives, so that whoever seals the
    tape can tell a dead writer from one that is still at work.
    """

    def __init__(
        self,
        folder: Path,
        *,
        writer: str,
        number: int,
        schema: pa.Schema,
        fsync: bool = False,
        hidden: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{writer}-{number}{LIVE}"
        self._stem = f"{writer}-{number}"
        self._fsync = fsync
        # it gets its name once it is locked: before, a sealer would take it for a dead one
        opening = folder / f".{self._stem}.{uuid.uuid4().hex}"
        self._file = open(opening, "xb")  # noqa: SIM115 - lives as long as the shard
        fcntl.flock(self._file, fcntl.LOCK_EX)
        if hidden:
            self.path = opening
        else:
            os.rename(opening, self.path)
        self._sink = _HashingSink(self._file)
        self.schema = schema.with_metadata(
            {b"rolltape.table": folder.name.encode(), b"rolltape.format": format_version().encode()}
        )
        # Arrow writes many small pieces; each crossing into Python costs more than copying it
        self._stream = pa.BufferedOutputStream(pa.PythonFile(self._sink, mode="w"), _PIECE)
        self._writer = pa.ipc.new_file(self._stream, self.schema, options=_OPTIONS)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._sink.size

    def write(self, batch: pa.RecordBatch) -> None:
        """Append one batch and hand it to the operating system."""
        batch = canonical(batch.cast(self.schema) if batch.schema != self.schema else batch)
        self._writer.write_batch(batch, custom_metadata={CHECKSUM: checksum(batch).encode()})
        self._stream.flush()
        self._file.flush()
        if self._fsync:
            os.fsync(self._file.fileno())

    def close(self) -> Path:
        """Finish the shard; returns its final path."""
        self._writer.close()
        self._stream.close()
        if self._fsync:
            os.fsync(self._file.fileno())
        final = self.path.with_name(f"{self._stem}-{self._sink.digest.hexdigest()}.arrow")
        os.rename(self.path, final)
        if self._fsync:
            sync_folder(final.parent)
        self._file.close()
        return final

    def abandon(self) -> None:
        """Let go of the file as it is: still live, readable up to the last whole batch."""
        with contextlib.suppress(OSError):  # the disk is what failed
            self._stream.close()
        with contextlib.suppress(OSError):
            self._file.close()


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive power loss."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def format_version() -> str:
    """`major.minor` of the format that this code writes."""
    return f"{FORMAT_MAJOR}.{FORMAT_MINOR}"


@dataclass(frozen=True)
class ShardContent:
    """What could be read from one shard.

    Args:
        batches: the intact record batches, in order.
        torn: for a live shard, bytes after the last intact batch; 0 is a clean end.
        reason: why reading stopped, empty when it ended cleanly.
    """

    batches: list[pa.RecordBatch]
    torn: int
    reason: str


def read_sealed(path: Path) -> list[pa.RecordBatch]:
    """All batches of a finished shard, after checking the file against the hash in its name.

    Raises:
        DamagedShardError: the bytes are not what was written.
    """
    match = _SEALED.fullmatch(path.name)
    if match is None:
        raise DamagedShardError(f"{path}: not the name of a shard")
    try:
        with pa.memory_map(str(path)) as source:
            data = source.read_buffer()
    except OSError as error:
        raise DamagedShardError(f"{path}: cannot be read: {error}") from error
    found = xxhash.xxh3_128_hexdigest(data)
    if found != match["hash"]:
        raise DamagedShardError(
            f"{path}: {len(data)} bytes hash to {found}, the name says {match['hash']}",
            hint="truncated or altered after it was written; restore it from a copy",
        )
    try:
        with pa.ipc.open_file(pa.BufferReader(data)) as reader:
            return [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except _UNREADABLE as error:
        raise DamagedShardError(f"{path}: not an Arrow IPC file: {error}") from error


def read_live(path: Path) -> ShardContent:
    """The intact batches of a shard that is still being written or whose writer died.

    A torn tail is normal after a kill: it is reported in the result, never raised.
    """
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        return ShardContent([], len(data), "no Arrow magic at the start")
    source = pa.BufferReader(data)
    source.seek(len(MAGIC))
    batches: list[pa.RecordBatch] = []
    intact = 0
    try:
        reader = pa.ipc.open_stream(source)
        intact = source.tell()
        while True:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            stored = dict(metadata or {}).get(CHECKSUM, b"").decode()
            if checksum(batch) != stored:
                return ShardContent(batches, len(data) - intact, "checksum of a batch differs")
            batches.append(batch)
            intact = source.tell()
    except StopIteration:
        return ShardContent(batches, 0, "")
    except _UNREADABLE as error:
        return ShardContent(batches, len(data) - intact, str(error).splitlines()[0])


def finished(path: Path) -> list[Path]:
    """The finished shard that stands where a live one stood, if there is one."""
    return list(path.parent.glob(f"{path.name.removesuffix(LIVE)}-*.arrow"))


def is_locked(path: Path) -> bool:
    """Whether the writer of a live shard is still alive on this machine."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):  # at work, or just finishing
        return True
    return False


def list_shards(folder: Path) -> Iterator[Path]:
    """Shards of a table, finished ones and live ones, in writing order per writer."""
    if folder.is_dir():
        found = [p for p in folder.iterdir() if p.name.endswith((".arrow", LIVE))]
        yield from sorted(found, key=_order)


def _order(path: Path) -> tuple[str, int, str]:
    writer, _, rest = path.name.partition("-")
    number = re.match(r"\d+", rest)
    return writer, int(number[0]) if number else 0, path.name
