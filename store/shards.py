"""One shard: an Arrow IPC file that grows batch by batch and can be read before it is finished.

While it is being written a shard is `<writer>-<n>.arrow.live`: the 8 magic bytes of an Arrow IPC
file, then a plain IPC stream. Each record batch carries the checksum of its content. Closing adds
the IPC footer and renames the file to `<writer>-<n>-<xxh3-128 of the file>.arrow`, which any
Arrow reader opens with random access. Nothing is copied or rewritten on the way.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import xxhash

from rolltape.store.errors import StorageError
from rolltape.store.places import LocalPlace, Place
from rolltape.store.schema import FORMAT_MAJOR, FORMAT_MINOR

_PIECE = 1 << 16
MAGIC = b"ARROW1\0\0"
CHECKSUM = b"xxh3"
COLUMNS = b"xxh3.columns"
LIVE = ".arrow.live"
SEALED = re.compile(r"(?P<writer>[0-9a-f]{32})-(?P<n>\d+)-(?P<hash>[0-9a-f]{32})\.arrow")
#: How long a put into an object store is tried again.
RETRY_S = 60.0
_OPTIONS = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))


def canonical(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch as an IPC reader will return it: no slices, no needless bitmaps."""
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)


def checksum(batch: pa.RecordBatch) -> str:
    """Hash of a canonical batch: its schema, every null count, every buffer with its length."""
    digest = xxhash.xxh3_64(batch.num_rows.to_bytes(8, "little"))
    digest.update(batch.schema.remove_metadata().serialize())
    for column in batch.columns:
        _update(digest, column)
    return digest.hexdigest()


def _null_counts(array: pa.Array) -> Iterator[int]:
    yield array.null_count
    if pa.types.is_list(array.type):
        yield from _null_counts(array.values)
    elif pa.types.is_struct(array.type):
        for index in range(array.type.num_fields):
            yield from _null_counts(array.field(index))


def column_checksums(batch: pa.RecordBatch, number: int) -> list[str]:
    """Hash of each column of a canonical batch, so that some can be read and checked alone.

    Args:
        batch: some or all columns of a batch.
        number: index of the batch in its shard: a batch that stands elsewhere is found out.
    """
    head = number.to_bytes(8, "little") + batch.num_rows.to_bytes(8, "little")
    found = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        digest = xxhash.xxh3_64(head)
        digest.update(_field_bytes(field))
        _update(digest, column)
        found.append(digest.hexdigest())
    return found


@functools.lru_cache(maxsize=1024)
def _field_bytes(field: pa.Field) -> pa.Buffer:
    return pa.schema([field.remove_metadata()]).serialize()


def _update(digest: Any, column: pa.Array) -> None:
    for count in _null_counts(column):
        digest.update(count.to_bytes(8, "little", signed=True))
    for buffer in column.buffers():
        size = -1 if buffer is None else buffer.size
        digest.update(size.to_bytes(8, "little", signed=True))
        if buffer is not None:
            digest.update(buffer)


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


class _Batches:
    """The Arrow IPC file of a shard, written to a file object batch by batch."""

    def __init__(self, file: BinaryIO, table: str, schema: pa.Schema) -> None:
        self._sink = _HashingSink(file)
        self.schema = schema.with_metadata(
            {b"rolltape.table": table.encode(), b"rolltape.format": format_version().encode()}
        )
        # Arrow writes many small pieces; each crossing into Python costs more than copying it
        self._stream = pa.BufferedOutputStream(pa.PythonFile(self._sink, mode="w"), _PIECE)
        self._writer = pa.ipc.new_file(self._stream, self.schema, options=_OPTIONS)
        self._number = 0

    @property
    def size(self) -> int:
        return self._sink.size

    @property
    def hash(self) -> str:
        return str(self._sink.digest.hexdigest())

    def write(self, batch: pa.RecordBatch) -> None:
        batch = canonical(batch.cast(self.schema) if batch.schema != self.schema else batch)
        metadata = {
            CHECKSUM: checksum(batch).encode(),
            COLUMNS: "".join(column_checksums(batch, self._number)).encode(),
        }
        self._writer.write_batch(batch, custom_metadata=metadata)
        self._number += 1
        self._stream.flush()

    def finish(self) -> None:
        self._writer.close()
        self._stream.close()

    def drop(self) -> None:
        with contextlib.suppress(OSError):  # the disk is what failed
            self._stream.close()


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
        self._batches = _Batches(self._file, folder.name, schema)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._batches.size

    def write(self, batch: pa.RecordBatch) -> None:
        """Append one batch and hand it to the operating system: it is committed then."""
        self._batches.write(batch)
        self._file.flush()
        if self._fsync:
            os.fsync(self._file.fileno())

    def close(self) -> str:
        """Finish the shard; returns its final name."""
        self._batches.finish()
        if self._fsync:
            os.fsync(self._file.fileno())
        final = self.path.with_name(f"{self._stem}-{self._batches.hash}.arrow")
        os.rename(self.path, final)
        if self._fsync:
            sync_folder(final.parent)
        self._file.close()
        return final.name

    def abandon(self) -> None:
        """Let go of the file as it is: still live, readable up to the last whole batch."""
        self._batches.drop()
        with contextlib.suppress(OSError):
            self._file.close()


class ObjectShardWriter:
    """Writes one shard of one table into an object store, by one put when it is closed.

    Args:
        place: the tape.
        table: name of the table.
        writer: uuid hex of the writer.
        number: running number of the shard within (table, writer).
        schema: schema of the table.
        retry_s: seconds for which a put that fails is tried again.

    Nothing is committed before `close`.
    """

    def __init__(
        self,
        place: Place,
        table: str,
        *,
        writer: str,
        number: int,
        schema: pa.Schema,
        retry_s: float = RETRY_S,
    ) -> None:
        self._place = place
        self._stem = f"{table}/{writer}-{number}"
        self._retry_s = retry_s
        self._memory = io.BytesIO()
        self._batches = _Batches(self._memory, table, schema)
        self._finished = False
        self.opened = time.monotonic()

    @property
    def size(self) -> int:
        """Bytes collected so far."""
        return self._batches.size

    def write(self, batch: pa.RecordBatch) -> None:
        """Collect one batch in memory."""
        self._batches.write(batch)

    def close(self) -> str:
        """Put the shard; returns its file name.

        Raises:
            StorageError: the store refused for `retry_s` seconds.
        """
        if not self._finished:  # a close that failed may be tried again
            self._batches.finish()
            self._finished = True
        name = f"{self._stem}-{self._batches.hash}.arrow"
        end, pause = time.monotonic() + self._retry_s, 0.25
        while True:
            try:
                self._place.put(name, self._memory.getvalue())
                return name.rpartition("/")[2]
            except StorageError:
                if time.monotonic() + pause > end:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    def abandon(self) -> None:
        """Forget what was not put."""
        self._batches.drop()


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
    for name in shard_names(LocalPlace(folder).files()):
        yield folder / name


def shard_names(files: Iterable[str]) -> list[str]:
    """Those names of files that are shards, in writing order per writer."""
    return sorted((n for n in files if n.endswith((".arrow", LIVE)) and n[0] != "."), key=_order)


def _order(name: str) -> tuple[str, int, str]:
    writer, _, rest = name.partition("-")
    number = re.match(r"\d+", rest)
    return writer, int(number[0]) if number else 0, name


def row_checksum(batch: pa.RecordBatch, row: int) -> str:
    """Hash of one row, the same wherever it is stored: for commit logs.

    Args:
        batch: any batch with the columns of its table.
        row: index of the row.
    """
    return checksum(canonical(batch.slice(row, 1)))
