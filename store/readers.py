"""Reading shards batch by batch: what is asked for is read and checked, and nothing else.

`SealedShard` opens by the footer, `LiveShard` walks the messages of a file that has none yet. Both
hand out record batches in the schema that this version knows. `Cache` keeps a bounded number of
them open.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pyarrow as pa
import xxhash

from rolltape.store import messages
from rolltape.store.errors import DamagedShardError, StorageError
from rolltape.store.inflate import Decoder, Parts, parts_of
from rolltape.store.places import LocalPlace, Place
from rolltape.store.shards import (
    CHECKSUM,
    COLUMNS,
    LIVE,
    MAGIC,
    SEALED,
    UNSEALED,
    checksum,
    column_checksums,
    field_bytes,
    shard_names,
)

# what Arrow raises on bytes that are not what it wrote
_UNREADABLE = (pa.ArrowException, EOFError, OSError, ValueError, KeyError, UnicodeDecodeError)
_TAIL = 1 << 16
#: Bytes of a file up to which batches are read together.
_RUN = 1 << 18

T = TypeVar("T")


@dataclass(frozen=True)
class Sealed:
    """What a seal says of a shard.

    Args:
        size: bytes of the file.
        batches: record batches in it; None in seals of format 1.0.
    """

    size: int
    batches: int | None


@dataclass(frozen=True)
class _Plan:
    """How batches of a shard are brought to a schema.

    Args:
        schema: what is asked for.
        wanted: indices of the columns that are read.
        order: of those, where each field of the schema stands; None if a field has another type
            than the file says, or is not there once.
        required: of those, which must not have nulls.
    """

    schema: pa.Schema
    wanted: tuple[int, ...]
    order: list[int] | None
    required: list[int]

    def bring(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of the wanted columns, or of all, in the schema."""
        if (
            self.order is None
            or batch.num_columns != len(self.wanted)
            or any(batch.column(i).null_count for i in self.required)
        ):
            return _conform(batch, self.schema)
        return batch.select(self.order).replace_schema_metadata(None)


class Shard:
    """A shard that is open for reading; `SealedShard` or `LiveShard`.

    Args:
        place: the tape.
        table: name of the table.
        file: name of the file.

    Attributes:
        name: what messages call it.
        batches: number of record batches.
        nbytes: size of the file.
    """

    batches: int
    nbytes: int
    schema: pa.Schema
    _source: pa.NativeFile

    def __init__(self, place: Place, table: str, file: str) -> None:
        self.place, self.table, self.file = place, table, file
        self.name = f"{place}/{table}/{file}"
        self._plan: _Plan | None = None
        self._fields: list[bytes] | None = None
        self._decoders: dict[tuple[int, ...] | None, Decoder] = {}

    def read(self, number: int, schema: pa.Schema) -> pa.RecordBatch:
        """One batch in a schema: some or all columns of the table.

        Columns that the file does not have are null.

        Raises:
            DamagedShardError: the bytes are not what was written.
            StorageError: the store does not answer.
        """
        plan = self._planned(schema)
        try:
            return plan.bring(self._read(number, plan.wanted))
        except (DamagedShardError, *_UNREADABLE) as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DamagedShardError(
                f"{self.name}: batch {number}: {text}",
                hint="`rolltape fsck` says what is intact; restore the file from a copy",
            ) from error

    def runs(self) -> Iterator[range]:
        """The numbers of all batches, those together that `read_run` can read together."""
        return (range(number, number + 1) for number in range(self.batches))

    def read_run(self, run: range, schema: pa.Schema) -> list[pa.RecordBatch] | None:
        """As `read`, of batches that follow each other; None where they have to be read singly."""
        return None

    def _open(self) -> None:
        with _answers(self.name):
            self._source = self.place.open(f"{self.table}/{self.file}")
            self.nbytes = self._source.size()

    def _at(self, offset: int, size: int) -> pa.Buffer:
        """Bytes of the file."""
        with _answers(self.name):
            data = self._source.read_at(size, offset)
        if len(data) != size:
            raise DamagedShardError(f"cut off at byte {offset + len(data)}")
        return pa.py_buffer(data)

    def _read(self, number: int, wanted: tuple[int, ...]) -> pa.RecordBatch:
        raise NotImplementedError

    def _decode(self, message: pa.Buffer, parts: Parts) -> pa.RecordBatch:
        """All columns of a batch."""
        batch = self._inflated(parts, None)
        if batch is None:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(message), self.schema)
        # before anything looks at it: lengths and offsets within are claims too
        batch.validate(full=True)
        return batch

    def _planned(self, schema: pa.Schema) -> _Plan:
        plan = self._plan
        if plan is None or plan.schema is not schema:  # of many batches the same is asked
            self._plan = plan = _planned(self.schema, schema)
        return plan

    def _check_columns(
        self, batch: pa.RecordBatch, number: int, wanted: tuple[int, ...], digests: str
    ) -> None:
        if self._fields is None:
            self._fields = field_bytes(self.schema)
        found = column_checksums(batch, number, [self._fields[i] for i in wanted])
        for name, index, digest in zip(batch.schema.names, wanted, found, strict=True):
            if digests[16 * index : 16 * index + 16] != digest:
                raise DamagedShardError(f"the checksum of column {name} differs")

    def _inflated(self, parts: Parts, wanted: tuple[int, ...] | None) -> pa.RecordBatch | None:
        found = self._decoder(wanted).decode([parts])
        return None if found is None else found[0]

    def _decoder(self, wanted: tuple[int, ...] | None) -> Decoder:
        if wanted not in self._decoders:
            self._decoders[wanted] = Decoder(self.schema, wanted)
        return self._decoders[wanted]

    def close(self) -> None:
        """Let go of the file."""


class SealedShard(Shard):
    """A finished shard.

    Args:
        place: the tape.
        table: name of the table.
        file: name of the file.
        sealed: what the seal says of it.
        whole: check the whole file against the hash in its name now; else every batch is checked
            by itself when it is read. None: unless the seal knows the number of batches.

    Raises:
        DamagedShardError: the bytes are not what was written.
    """

    def __init__(
        self,
        place: Place,
        table: str,
        file: str,
        *,
        sealed: Sealed | None = None,
        whole: bool | None = None,
    ) -> None:
        super().__init__(place, table, file)
        if SEALED.fullmatch(file) is None:
            raise DamagedShardError(f"{self.name}: not the name of a shard")
        if whole is None:
            whole = sealed is None or sealed.batches is None
        try:
            self._open()
            if whole:
                check_hash(self.name, file, self._source)
            size = min(self.nbytes, _TAIL)
            tail = self._at(self.nbytes - size, size)
            need = messages.footer_length(bytes(tail[-10:]))
            if need > size:
                need = min(need, self.nbytes)
                tail = self._at(self.nbytes - need, need)
            self._blocks = messages.blocks(memoryview(tail), self.nbytes)
            self._readers: dict[tuple[int, ...] | None, Any] = {}
            self.schema = self._read_schema(tail)
        except DamagedShardError as error:
            raise self._damaged(str(error)) from error
        except (StorageError, FileNotFoundError):
            raise
        except _UNREADABLE as error:
            raise self._damaged(f"not an Arrow IPC file: {error}") from error
        self.batches = len(self._blocks)
        if sealed is not None and sealed.batches not in (None, self.batches):
            raise self._damaged(f"{self.batches} batches, the seal says {sealed.batches}")

    def _damaged(self, text: str) -> DamagedShardError:
        if text.startswith(self.name):
            return DamagedShardError(text)
        return DamagedShardError(f"{self.name}: {text.splitlines()[0]}")

    def _read_schema(self, tail: pa.Buffer) -> pa.Schema:
        # The checksums of columns cannot say that one is missing: a name that is altered would do
        # that. But a file has its schema twice.
        head = self._at(0, min(self.nbytes, _TAIL))
        if bytes(head[: len(MAGIC)]) != MAGIC:
            raise DamagedShardError("no Arrow magic at the start")
        schema = _schema(head[len(MAGIC) :])
        if not schema.equals(_footer_schema(tail), check_metadata=True):
            raise DamagedShardError("its two copies of the schema differ")
        return schema

    def _read(self, number: int, wanted: tuple[int, ...]) -> pa.RecordBatch:
        block = self._blocks[number]
        message = self._at(block.offset, block.size)
        parts = parts_of(memoryview(message))
        digests = parts.stored.get(COLUMNS, b"").decode()
        if len(wanted) == len(self.schema) or not digests:
            batch = self._decode(message, parts)
        else:
            batch = self._some(number, wanted, message, parts)
        if digests:
            self._check_columns(batch, number, wanted, digests)
        elif checksum(batch) != parts.stored.get(CHECKSUM, b"").decode():  # format 1.0
            raise DamagedShardError("its checksum differs")
        return batch

    def runs(self) -> Iterator[range]:
        """See `Shard`: small batches that lie together."""
        first = 0
        for number, block in enumerate(self._blocks):
            if block.offset + block.size - self._blocks[first].offset > _RUN and number > first:
                yield range(first, number)
                first = number
        if self._blocks:
            yield range(first, len(self._blocks))

    def read_run(self, run: range, schema: pa.Schema) -> list[pa.RecordBatch] | None:
        """See `Shard`."""
        plan = self._planned(schema)
        blocks = self._blocks[run.start : run.stop]
        start = blocks[0].offset
        try:
            data = memoryview(self._at(start, blocks[-1].offset + blocks[-1].size - start))
            found = [parts_of(data[b.offset - start : b.offset - start + b.size]) for b in blocks]
            digests = [parts.stored.get(COLUMNS, b"").decode() for parts in found]
            if not all(digests):
                return None
            batches = self._decoder(plan.wanted).decode(found)
            if batches is None:
                return None
            for number, batch, said in zip(run, batches, digests, strict=True):
                batch.validate(full=True)
                self._check_columns(batch, number, plan.wanted, said)
            return [plan.bring(batch) for batch in batches]
        except (DamagedShardError, *_UNREADABLE):
            return None  # read singly, the damaged one is found, and the others are whole

    def _some(
        self, number: int, wanted: tuple[int, ...], message: pa.Buffer, parts: Parts
    ) -> pa.RecordBatch:
        """Some columns of a batch; the others are not decompressed."""
        batch = self._inflated(parts, wanted)
        if batch is None:
            batch = self._some_by_arrow(number, wanted, message)
        batch.validate(full=True)
        return batch

    def _some_by_arrow(
        self, number: int, wanted: tuple[int, ...], message: pa.Buffer
    ) -> pa.RecordBatch:
        options = pa.ipc.IpcReadOptions(included_fields=list(wanted))
        if not isinstance(self.place, LocalPlace):  # the file reader would fetch it again
            stream = pa.BufferReader(bytes(self.schema.serialize()) + bytes(message))
            return pa.ipc.open_stream(stream, options=options).read_next_batch()
        if wanted not in self._readers:
            self._readers[wanted] = pa.ipc.open_file(self._source, options=options)
        return self._readers[wanted].get_batch(number)

    def close(self) -> None:
        """Let go of the file."""
        self._readers.clear()
        self._source.close()


def _schema(message: pa.Buffer) -> pa.Schema:
    schema = pa.ipc.read_schema(message)
    schema.names  # noqa: B018 - raises if they are not text
    return schema


def _footer_schema(tail: pa.Buffer) -> pa.Schema:
    need = messages.footer_length(bytes(tail[-10:]))
    schema = pa.ipc.open_file(pa.BufferReader(MAGIC + bytes(tail[len(tail) - need :]))).schema
    schema.names  # noqa: B018 - raises if they are not text
    return schema


def check_hash(name: str, file: str, source: pa.NativeFile) -> None:
    """Compare a whole finished shard with the hash in its name.

    Raises:
        DamagedShardError: they differ.
        StorageError: the store does not answer.
    """
    match = SEALED.fullmatch(file)
    if match is None:
        raise DamagedShardError(f"{name}: not the name of a shard")
    digest = xxhash.xxh3_128()
    with _answers(name):
        size, at = source.size(), 0
    while at < size:
        with _answers(name):
            piece = source.read_at(min(size - at, 8 << 20), at)
        if not piece:  # cut off meanwhile
            break
        digest.update(piece)
        at += len(piece)
    if digest.hexdigest() != match["hash"]:
        raise DamagedShardError(
            f"{name}: {size} bytes hash to {digest.hexdigest()}, the name says {match['hash']}",
            hint="truncated or altered after it was written; restore it from a copy",
        )


@contextmanager
def _answers(name: str) -> Iterator[None]:
    """That a store does not answer is no damage."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        text = str(error) or type(error).__name__
        raise StorageError(f"{name}: {text.splitlines()[0]}") from error


class LiveShard(Shard):
    """A shard that is still being written, or whose writer died, as far as it is intact now.

    A torn tail is normal after a kill: `torn` is its size, `reason` what is wrong with it.
    """

    names = UNSEALED

    def __init__(self, place: Place, table: str, file: str) -> None:
        super().__init__(place, table, file)
        if self.names.fullmatch(file) is None:
            raise DamagedShardError(f"{self.name}: not the name of a shard")
        self._open()
        self._blocks: list[messages.Block] = []
        self.schema = pa.schema([])
        self.torn, self.reason = 0, ""
        self._walk()
        self.batches = len(self._blocks)

    def _walk(self) -> None:
        # its writer may cut off the end meanwhile
        with _answers(self.name):
            data = pa.py_buffer(self._source.read_at(self.nbytes, 0))
        view = memoryview(data)
        if bytes(view[: len(MAGIC)]) != MAGIC:
            self.torn, self.reason = self.nbytes, "no Arrow magic at the start"
            if MAGIC.startswith(bytes(view[: len(MAGIC)])):
                self.reason = messages.CUT_OFF
            return
        at = len(MAGIC)
        try:
            size = messages.message_size(view[at:])
            self.schema = _schema(data[at : at + size])
            at += size
            while at < len(view):
                size = messages.message_size(view[at:])
                if not size:  # the writer died between the end of the stream and the rename
                    break
                self._check(data[at : at + size])
                self._blocks.append(messages.Block(at, size))
                at += size
        except (DamagedShardError, *_UNREADABLE) as error:
            self.torn, self.reason = len(view) - at, str(error).splitlines()[0]

    def _check(self, message: pa.Buffer) -> None:
        parts = parts_of(memoryview(message))
        batch = self._decode(message, parts)
        if checksum(batch) != parts.stored.get(CHECKSUM, b"").decode():
            raise DamagedShardError("checksum of a batch differs")
        if parts.stored.get(COLUMNS):
            wanted = tuple(range(len(self.schema)))
            self._check_columns(batch, len(self._blocks), wanted, parts.stored[COLUMNS].decode())

    def _read(self, number: int, wanted: tuple[int, ...]) -> pa.RecordBatch:
        block = self._blocks[number]
        # what was checked before may have been altered since
        message = self._at(block.offset, block.size)
        return self._decode(message, parts_of(memoryview(message))).select(list(wanted))

    def close(self) -> None:
        """Let go of the file."""
        self._source.close()


class FooterShard(SealedShard):
    """A finished shard, by the copy of its schema that stands in the footer."""

    def _read_schema(self, tail: pa.Buffer) -> pa.Schema:
        return _footer_schema(tail)


class BrokenShard(LiveShard):
    """A finished shard whose footer cannot be read, taken as far as it is intact."""

    names = SEALED


def open_shard(
    place: Place, table: str, file: str, *, sealed: Sealed | None = None
) -> SealedShard | LiveShard:
    """A shard by the name of its file.

    Raises:
        DamagedShardError: the bytes are not what was written.
        FileNotFoundError: it is gone: sealed, or removed.
    """
    if file.endswith(LIVE):
        return LiveShard(place, table, file)
    return SealedShard(place, table, file, sealed=sealed)


def finished_name(files: Sequence[str], live: str) -> str | None:
    """The finished shard that stands where a live one stood, if there is one."""
    stem = live.removesuffix(LIVE) + "-"
    return next((name for name in files if name.startswith(stem) and name.endswith(".arrow")), None)


def shards_of(place: Place, table: str) -> list[str]:
    """Files of a table in writing order per writer; a live one that is finished is left out."""
    names = shard_names(place.files(table))
    return [n for n in names if not (n.endswith(LIVE) and finished_name(names, n))]


def _planned(stored: pa.Schema, schema: pa.Schema) -> _Plan:
    names = schema.names
    wanted = tuple(i for i, name in enumerate(stored.names) if name in names)
    read = [stored.field(i) for i in wanted]
    places = {field.name: i for i, field in enumerate(read)}
    alike = len(places) == len(read) and all(
        field.name in places and read[places[field.name]].equals(field) for field in schema
    )
    order = [places[name] for name in names] if alike else None
    required = [i for i, field in enumerate(read) if not field.nullable]
    if pa.schema(read).equals(schema):
        required = []
    return _Plan(schema, wanted, order, required)


def _conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if batch.schema.equals(schema):
        return batch.replace_schema_metadata(None)
    columns = []
    for field in schema:
        found = batch.schema.get_all_field_indices(field.name)
        if len(found) > 1:
            raise DamagedShardError(f"column {field.name} is there {len(found)} times")
        if found:
            column = batch.column(found[0])
            # a cast from another type may cost more memory than the bytes in the file show
            if not _alike(column.type, field.type):
                raise DamagedShardError(f"column {field.name} is {column.type}, not {field.type}")
            columns.append(column.cast(field.type))
            if column.null_count and not field.nullable:
                raise DamagedShardError(f"column {field.name} has nulls")
        elif field.nullable:
            columns.append(pa.nulls(batch.num_rows, field.type))
        else:
            raise DamagedShardError(f"column {field.name} is missing")
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _alike(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether types differ at most in the fields of their structs and in what may be null."""
    if pa.types.is_struct(wanted) and pa.types.is_struct(found):
        fields = {field.name: field.type for field in found}
        return len(fields) == found.num_fields and all(
            f.name not in fields or _alike(fields[f.name], f.type) for f in wanted
        )
    if pa.types.is_list(wanted) and pa.types.is_list(found):
        return _alike(found.value_type, wanted.value_type)
    return bool(found.equals(wanted))


class Cache(Generic[T]):
    """Least recently used values up to a number of bytes; the newest always stays.

    What falls out is only forgotten, never closed: somebody may be reading it. A file is closed
    when nobody holds its shard any more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._items: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], tuple[T, int]]) -> T:
        """The value of a key; `make` gives it and its size in bytes if it is not there."""
        if key in self._items:
            self._items.move_to_end(key)
            return self._items[key][0]
        value, size = make()
        self._items[key] = value, size
        self._size += size
        while self._size > self._limit and len(self._items) > 1:
            _, (_, old_size) = self._items.popitem(last=False)
            self._size -= old_size
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._items.clear()
        self._size = 0
