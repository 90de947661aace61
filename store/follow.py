"""Tailing a tape that is still being written: its record batches as they are committed.

Nothing is read twice: of a live shard the bytes after the last intact batch are looked at, and when
it has got its final name the rest is read from there under the same (writer, number).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa

from rolltape.store import messages
from rolltape.store.errors import DamagedShardError, UsageError
from rolltape.store.places import Place, place_of
from rolltape.store.readers import _conform, finished_name, open_shard
from rolltape.store.schema import DERIVED_TABLES, TAPE_TABLES
from rolltape.store.shards import CHECKSUM, LIVE, MAGIC, SEALED, UNSEALED, checksum, shard_names
from rolltape.store.tape import SEAL, TAPE_HEADER, read_header

_TABLES = tuple(name for name in TAPE_TABLES if name not in DERIVED_TABLES)


class Arrival(NamedTuple):
    """A record batch that was committed.

    Args:
        table: its table.
        writer: uuid of its writer.
        number: of the shard within (table, writer).
        batch_index: of the batch within the shard.
        batch: all columns of the table.
    """

    table: str
    writer: str
    number: int
    batch_index: int
    batch: pa.RecordBatch


@dataclass
class _Cursor:
    """The next batch of one (table, writer), and where its message begins if that is known."""

    number: int = 0
    index: int = 0
    offset: int = 0
    skip: int = 0  # batches of a live shard to step over, of a state that was loaded
    schema: pa.Schema | None = None

    def next_shard(self, number: int) -> None:
        self.number, self.index, self.offset, self.skip, self.schema = number, 0, 0, 0, None


class Follower:
    """Gives every record batch of a tape once, in the order in which each writer committed them.

    Args:
        uri: path or URL of the tape; it may be sealed, live or both. In an object store there are
            no live shards: batches arrive when their shard is complete.
        tables: to follow, in the order in which a poll reads them.
        state: of an earlier follower, to go on from.
        storage_options: see `rolltape.store.places.place_of`.

    Attributes:
        ended: the tape is sealed, no shard is live, and everything was given.

    Raises:
        NotATapeError: no tape there.
        NewerFormatError: written by a newer major version.
        UsageError: the state is of another tape.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        state: Mapping[str, Any] | None = None,
        *,
        tables: Sequence[str] = _TABLES,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.place: Place = place_of(uri, storage_options)
        self.tables = tuple(tables)
        self.ended = False
        self.uuid = str(read_header(self.place, TAPE_HEADER)["uuid"])
        self._cursors: dict[tuple[str, str], _Cursor] = {}
        if state is not None:
            if state.get("tape") != self.uuid:
                raise UsageError(
                    f"the state is of tape {state.get('tape')}, {self.place} is {self.uuid}"
                )
            for name, (number, index) in state["offsets"].items():
                table, _, writer = name.partition("/")
                self._cursors[table, writer] = _Cursor(number, index, skip=index)

    @property
    def positions(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Per (table, writer) the shard and batch that come next."""
        return {where: (c.number, c.index) for where, c in self._cursors.items()}

    @property
    def state(self) -> dict[str, Any]:
        """The positions as JSON; see `positions`."""
        return {"tape": self.uuid, "offsets": offsets_of(self.positions)}

    def poll(self) -> list[Arrival]:
        """Everything that was committed since the last poll.

        Each batch is checked against its checksum. A torn tail of a live shard is not there yet.
        A poll that raises has given nothing: the next one reads again what this one had read.

        Raises:
            DamagedShardError: a finished shard is not what was written.
            StorageError: the place does not answer.
        """
        before = {where: replace(cursor) for where, cursor in self._cursors.items()}
        try:
            return self._poll()
        except BaseException:
            self._cursors = before
            raise

    def _poll(self) -> list[Arrival]:
        sealed = self.place.exists(SEAL)  # before the listing: later writes are not missed
        found: list[Arrival] = []
        live = False
        for table in self.tables:
            sizes = self.place.files(table)
            names = shard_names(sizes)
            live |= any(n.endswith(LIVE) and not finished_name(names, n) for n in names)
            for writer, shards in _by_writer(names).items():
                cursor = self._cursors.setdefault((table, writer), _Cursor())
                for number, file in shards:
                    if number < cursor.number:
                        continue
                    if number > cursor.number:
                        cursor.next_shard(number)
                    try:
                        found += self._read(table, writer, file, cursor, sizes[file])
                    except FileNotFoundError:  # it gets its final name just now
                        live = True
                        break
        self.ended = sealed and not live
        return found

    def _read(
        self, table: str, writer: str, file: str, cursor: _Cursor, size: int
    ) -> Iterator[Arrival]:
        if file.endswith(LIVE):
            read = self._read_live(table, file, cursor, size)
        else:
            read = self._read_finished(table, file, cursor)
        for batch in read:
            yield Arrival(table, writer, cursor.number, cursor.index, batch)
            cursor.index += 1

    def _read_finished(self, table: str, file: str, cursor: _Cursor) -> Iterator[pa.RecordBatch]:
        if cursor.offset < 0:
            return
        shard = open_shard(self.place, table, file)
        try:
            for index in range(cursor.index, shard.batches):
                yield shard.read(index, TAPE_TABLES[table])
        finally:
            shard.close()
        cursor.offset = -1  # complete

    def _read_live(
        self, table: str, file: str, cursor: _Cursor, size: int
    ) -> Iterator[pa.RecordBatch]:
        if size <= cursor.offset:
            return
        name = f"{table}/{file}"
        with self.place.open(name) as source:
            start = cursor.offset
            data = memoryview(source.read_at(source.size() - start, start))
        at = 0
        try:
            if cursor.schema is None:
                at = len(MAGIC)
                length = messages.message_size(data[at:])
                cursor.schema = pa.ipc.read_schema(pa.py_buffer(data[at : at + length]))
                at += length
                cursor.offset = at
            while length := messages.message_size(data[at:]):
                if cursor.skip:
                    cursor.skip -= 1
                else:
                    batch = _decode(data[at : at + length], cursor.schema)
                    yield _conform(batch, TAPE_TABLES[table])
                at += length
                cursor.offset = start + at
        except (DamagedShardError, pa.ArrowException, OSError, ValueError):
            return  # a torn tail; if it is damage, the finished shard says so


def offsets_of(positions: Mapping[tuple[str, str], tuple[int, int]]) -> dict[str, list[int]]:
    """Positions as JSON: [shard, batch] by `<table>/<writer>`."""
    return {f"{table}/{writer}": list(at) for (table, writer), at in positions.items()}


def _decode(message: memoryview, schema: pa.Schema) -> pa.RecordBatch:
    messages.check_claims(message)
    # only a stream reader gives the custom metadata: a stream of one batch
    stream = pa.BufferReader(bytes(schema.serialize()) + bytes(message))
    batch, metadata = pa.ipc.open_stream(stream).read_next_batch_with_custom_metadata()
    if checksum(batch) != dict(metadata or {}).get(CHECKSUM, b"").decode():
        raise DamagedShardError("checksum of a batch differs")
    return batch


def _by_writer(names: Sequence[str]) -> dict[str, list[tuple[int, str]]]:
    """(number, file) by writer, ascending; the finished one where a live one still stands."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        if not (SEALED.fullmatch(name) or UNSEALED.fullmatch(name)):
            continue  # not a name that a writer gives
        writer, _, rest = name.partition("-")
        number = int(rest.partition("-")[0].partition(".")[0])
        shards = found.setdefault(writer, {})
        if number not in shards or shards[number].endswith(LIVE):
            shards[number] = name
    return {writer: sorted(shards.items()) for writer, shards in found.items()}
