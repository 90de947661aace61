"""One shard: an Arrow IPC file that grows batch by batch and can be read before it is finished.

While it is being written a shard is `<writer>-<n>.arrow.live`: the 8 magic bytes of an Arrow IPC
file, then a plain IPC stream. Each record batch carries the checksum of its content. Closing adds
the IPC footer and renames the file to `<writer>-<n>-<xxh3-128 of the file>.arrow`, which any
Arrow reader opens with random access. Nothing is copied or rewritten on the way.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import struct
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import xxhash

from rolltape.store.errors import StorageError
from rolltape.store.places import LocalPlace, Place, sync_folder
from rolltape.store.schema import FORMAT_MAJOR, FORMAT_MINOR

_PIECE = 1 << 16
MAGIC = b"ARROW1\0\0"
CHECKSUM = b"xxh3"
COLUMNS = b"xxh3.columns"
JSON_CHECKSUM = "xxh3"
LIVE = ".arrow.live"
#: Stands in a copy for as long as `compact` writes it.
COMPACTING = "compacting.json"
SEALED = re.compile(r"(?P<writer>[0-9a-f]{32})-(?P<n>[0-9]{1,9})-(?P<hash>[0-9a-f]{32})\.arrow")
UNSEALED = re.compile(r"(?P<writer>[0-9a-f]{32})-(?P<n>[0-9]{1,9})\.arrow\.live")
#: Names under which files are written before they get their own.
TEMPORARY = re.compile(
    # in the folder of damaged shards their names begin with the table
    r"\.(?:(?:[a-z_]+-)?[0-9a-f]{32}-[0-9].*|(?:tape|report|seal|compacting)\.json)"
    r"\.[0-9a-f]{32}"
)
#: How long a put into an object store is tried again.
RETRY_S = 60.0
_OPTIONS = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
_UNCOMPRESSED = pa.ipc.IpcWriteOptions()
_SIZE = struct.Struct("<q")
_NONE = _SIZE.pack(-1)  # in place of the size of a buffer that is not there


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


def column_checksums(
    batch: pa.RecordBatch, number: int, fields: Sequence[bytes] | None = None
) -> list[str]:
    """Hash of each column of a canonical batch, so that some can be read and checked alone.

    Args:
        batch: some or all columns of a batch.
        number: index of the batch in its shard: a batch that stands elsewhere is found out.
        fields: `field_bytes` of its columns, for a caller that has them.
    """
    head = number.to_bytes(8, "little") + batch.num_rows.to_bytes(8, "little")
    found = []
    for field, column in zip(fields or field_bytes(batch.schema), batch.columns, strict=True):
        digest = xxhash.xxh3_64(head + field)
        _update(digest, column)
        found.append(digest.hexdigest())
    return found


def field_bytes(schema: pa.Schema) -> list[bytes]:
    """What of each field of a schema goes into the checksum of its column."""
    return [bytes(pa.schema([field.remove_metadata()]).serialize()) for field in schema]


def _update(digest: Any, column: pa.Array) -> None:
    buffers = column.buffers()
    counts = list(_null_counts(column)) if pa.types.is_nested(column.type) else [column.null_count]
    digest.update(struct.pack(f"<{len(counts)}q", *counts))
    for buffer in buffers:
        if buffer is None:
            digest.update(_NONE)
        else:
            digest.update(_SIZE.pack(buffer.size))
            digest.update(buffer)


def json_checksum(value: Mapping[str, Any]) -> str:
    """Hash of the content of a JSON file, whatever its layout; stands in it as `JSON_CHECKSUM`."""
    compact = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64(compact.encode()).hexdigest()


class RawFile(Protocol):
    """What a shard is written to: unbuffered, so that nothing is written twice after a fork."""

    def write(self, data: memoryview, /) -> int | None:
        """Write some of the data; returns how many bytes."""


class _HashingSink:
    """File object that hashes what passes through; pyarrow only needs `write` and `flush`."""

    closed = False

    def __init__(self, file: RawFile) -> None:
        self.file = file
        self.digest = xxhash.xxh3_128()
        self.size = 0
        self._pid = os.getpid()

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        if os.getpid() != self._pid:  # a fork copied what Arrow had buffered; the file is not ours
            return view.nbytes
        done = 0
        while done < view.nbytes:
            done += self.file.write(view[done:]) or 0
        self.digest.update(view)
        self.size += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Nothing is buffered here."""

    def close(self) -> None:
        """The shard closes the file itself, after the rename."""


class _Batches:
    """The Arrow IPC file of a shard, written to a file object batch by batch."""

    def __init__(
        self, file: RawFile, table: str, schema: pa.Schema, *, compress: bool = True
    ) -> None:
        self.failed = False
        self._sink = _HashingSink(file)
        self.schema = schema.with_metadata(
            {b"rolltape.table": table.encode(), b"rolltape.format": format_version().encode()}
        )
        # Arrow writes many small pieces; each crossing into Python costs more than copying it
        self._stream = pa.BufferedOutputStream(pa.PythonFile(self._sink, mode="w"), _PIECE)
        self._writer = pa.ipc.new_file(
            self._stream, self.schema, options=_OPTIONS if compress else _UNCOMPRESSED
        )
        self._number = 0
        self._fields = field_bytes(self.schema)

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
            COLUMNS: "".join(column_checksums(batch, self._number, self._fields)).encode(),
        }
        # what is half written must never get a footer that vouches for it
        self.failed = True
        self._writer.write_batch(batch, custom_metadata=metadata)
        self._stream.flush()
        self._number += 1
        self.failed = False

    def finish(self) -> None:
        self.failed = True
        self._writer.close()
        self._stream.close()
        self.failed = False

    def drop(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the disk is what failed
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
        compress: the buffers with zstd; else a reader can use them where they lie.

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
        compress: bool = True,
    ) -> None:
        self.path = folder / f"{writer}-{number}{LIVE}"
        self._stem = f"{writer}-{number}"
        self._fsync = fsync
        self._committed = 0
        # it gets its name once it is locked: before, a sealer would take it for a dead one
        opening = folder / f".{self._stem}.{uuid.uuid4().hex}"
        with _disk_errors(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(opening, "xb", buffering=0)  # noqa: SIM115 - lives as the shard does
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if hidden:
                self.path = opening
            else:
                os.rename(opening, self.path)
                if fsync:  # else a commit could be lost with the name of its file
                    sync_folder(folder)
                    sync_folder(folder.parent)
        self._batches = _Batches(self._file, folder.name, schema, compress=compress)
        _open_shards.add(self)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._batches.size

    @property
    def failed(self) -> bool:
        """Whether a write failed: nothing more can be written, what was committed before stays."""
        return self._batches.failed

    def write(self, batch: pa.RecordBatch) -> None:
        """Append one batch and hand it to the operating system: it is committed then.

        Raises:
            StorageError: it could not be written. Nothing more can be, then; what was committed
                before stays readable.
        """
        if self._batches.failed:
            raise StorageError(f"{self.path}: an earlier write failed")
        try:
            with _disk_errors(self.path):
                self._batches.write(batch)
                if self._fsync:
                    self._batches.failed = True
                    os.fsync(self._file.fileno())
                    self._batches.failed = False
        except StorageError:
            with contextlib.suppress(OSError):  # gives back what the torn batch took of the disk
                os.ftruncate(self._file.fileno(), self._committed)
            raise
        self._committed = self._batches.size

    def close(self) -> str:
        """Finish the shard; returns its final name.

        Raises:
            StorageError: it could not be written. It stays live, for `seal` to finish.
        """
        if self._batches.failed:
            raise StorageError(f"{self.path}: an earlier write failed")
        with _disk_errors(self.path):
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
        self._batches.failed = True
        self._file.close()
        self._batches.drop()

    def _after_fork(self) -> None:
        # the child must neither write to it nor hold its lock when its writer has died
        self._file.close()


_open_shards: weakref.WeakSet[ShardWriter] = weakref.WeakSet()


def _let_go_after_fork() -> None:
    for shard in list(_open_shards):
        shard._after_fork()


os.register_at_fork(after_in_child=_let_go_after_fork)


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


def give_up_after(seconds: float) -> Callable[[], bool]:
    """A clock for retries: true when so many seconds have passed."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


class ObjectShardWriter:
    """Writes one shard of one table into an object store, by one put when it is closed.

    Args:
        place: the tape.
        table: name of the table.
        writer: uuid hex of the writer.
        number: running number of the shard within (table, writer).
        schema: schema of the table.
        give_up: asked before a put that failed is tried again; by default after 60 s.
        compress: the buffers with zstd.

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
        give_up: Callable[[], bool] | None = None,
        compress: bool = True,
    ) -> None:
        self._place = place
        self._stem = f"{table}/{writer}-{number}"
        self._give_up = give_up
        self._memory = io.BytesIO()
        self._batches = _Batches(self._memory, table, schema, compress=compress)
        self._finished = False
        self.opened = time.monotonic()

    @property
    def size(self) -> int:
        """Bytes collected so far."""
        return self._batches.size

    @property
    def failed(self) -> bool:
        """Whether it cannot be finished any more."""
        return self._batches.failed

    def write(self, batch: pa.RecordBatch) -> None:
        """Collect one batch in memory."""
        self._batches.write(batch)

    def close(self) -> str:
        """Put the shard; returns its file name.

        Raises:
            StorageError: the store refused until it was given up.
        """
        if not self._finished:  # a close that failed may be tried again
            self._batches.finish()
            self._finished = True
        name = f"{self._stem}-{self._batches.hash}.arrow"
        data = pa.py_buffer(self._memory.getbuffer())
        give_up, pause = self._give_up or give_up_after(RETRY_S), 0.25
        while True:
            try:
                self._place.put(name, data)
                return name.rpartition("/")[2]
            except StorageError:
                if give_up():
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def abandon(self) -> None:
        """Forget what was not put."""
        self._batches.drop()


def format_version() -> str:
    """`major.minor` of the format that this code writes."""
    return f"{FORMAT_MAJOR}.{FORMAT_MINOR}"


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
    # taken, not cut out: the bits beside those of a slice are its neighbours'
    return checksum(canonical(batch.take(pa.array([row]))))
