"""Writing a tape: the folder, one writer per process, and its commit log."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, overload

import pyarrow as pa

from rolltape.store.columns import make_batch
from rolltape.store.errors import (
    NotATapeError,
    StorageError,
    TapeError,
    TapeExistsError,
    TapeFullError,
    UsageError,
)
from rolltape.store.places import LocalPlace, ObjectPlace, Place, place_of, sync_folder
from rolltape.store.schema import REPORT_TABLES, SPAN, TAPE_TABLES
from rolltape.store.shards import (
    JSON_CHECKSUM,
    ObjectShardWriter,
    ShardWriter,
    format_version,
    json_checksum,
    row_checksum,
)
from rolltape.store.tape import REPORT_HEADER, TAPE_HEADER, kind_of

#: A shard is finished when it has this size, in a folder and in an object store.
SHARD_BYTES = 64 << 20
OBJECT_BYTES = 8 << 20
#: And in an object store when its first row is this old.
OBJECT_SECONDS = 10.0
#: Rows are collected up to this size, and a batch is at most that large unless one row is.
BUFFER_BYTES = 1 << 20
BATCH_BYTES = 32 << 20

_SPAN = [field.name for field in SPAN]
#: Tables of which the commit log has a line a row: those with a key and positions.
_LOGGED = [name for name, schema in TAPE_TABLES.items() if {*_SPAN} <= {*schema.names}]


def new_uuid() -> str:
    """32 hex digits."""
    return uuid.uuid4().hex


@overload
def create_tape(
    path: Path,
    *,
    role: str,
    parent: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    uuid: str | None = None,
) -> Path: ...


@overload
def create_tape(
    path: str | os.PathLike[str],
    *,
    role: str,
    parent: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    uuid: str | None = None,
) -> Path | ObjectPlace: ...


def create_tape(
    path: str | os.PathLike[str],
    *,
    role: str,
    parent: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    uuid: str | None = None,
) -> Path | ObjectPlace:
    """Make the folder of a new tape and its header.

    Args:
        path: must not exist, or be an empty folder; or the URL of an empty prefix.
        role: rollout, trainer, reference or draft.
        parent: uuid of the tape that this one replays.
        provenance: JSON-able facts about the run (argv, git, environment allow-list).
        storage_options: see `rolltape.store.places.place_of`.
        uuid: identity of the content; new unless the content is another tape's.

    Returns:
        The folder, or the place in the object store.

    Raises:
        TapeExistsError: there is something at `path` already.
        StorageError: it cannot be made.
    """
    header = {
        "uuid": uuid or new_uuid(),
        "role": role,
        "parent": parent,
        "provenance": dict(provenance or {}),
    }
    place = _create(place_of(path, storage_options), TAPE_HEADER, header)
    return place.path if isinstance(place, LocalPlace) else place


def create_report(path: str | os.PathLike[str], *, summary: Mapping[str, Any]) -> Path:
    """Make the folder of a new diff report; `summary` is what `diff --json` prints."""
    place = LocalPlace(Path(path))
    _create(place, REPORT_HEADER, {"uuid": new_uuid(), "summary": dict(summary)})
    return place.path


def _create(
    place: LocalPlace | ObjectPlace, name: str, header: dict[str, Any]
) -> LocalPlace | ObjectPlace:
    if isinstance(place, LocalPlace):
        try:
            place.path.mkdir(parents=True, exist_ok=True)
            empty = not any(place.path.iterdir())
        except OSError as error:
            raise TapeError(f"{place}: {error.strerror}", hint="choose another -o") from error
    else:
        empty = not place.files() and not place.folders()
    if not empty:
        raise TapeExistsError(f"{place} is not empty", hint="choose another -o, or remove it")
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    content = {"format": format_version(), "created": created, **header}
    put_json(place, name, content, exclusive=True)
    # Object stores let the last of two writers win: look who it was. If both see themselves, both
    # record into one tape, each under its own engine and writer.
    if not isinstance(place, LocalPlace) and place.read(name) != _json_bytes(content):
        raise TapeExistsError(f"{place}: another recording started there", hint="choose another -o")
    return place


def put_json(
    place: LocalPlace | ObjectPlace, name: str, value: Mapping[str, Any], *, exclusive: bool = False
) -> None:
    """Write a JSON file that is either there in full or not there.

    Args:
        place: the tape.
        name: of the file.
        value: what it holds.
        exclusive: in a folder: refuse if there is one, also one made at the same moment.

    Raises:
        TapeExistsError: `exclusive`, and there is one.
    """
    data = _json_bytes(value)
    # without its header a tape is lost, so these few bytes always survive power loss
    if not (exclusive and isinstance(place, LocalPlace)):
        place.put(name, data, fsync=True)
        return
    temporary = place.path / f".{name}.{new_uuid()}"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, place.path / name)  # unlike a rename it never replaces
        finally:
            temporary.unlink()
        sync_folder(place.path)
        sync_folder(place.path.parent)
    except FileExistsError as error:
        raise TapeExistsError(f"{place} is not empty", hint="choose another -o") from error
    except OSError as error:
        raise StorageError(f"{place}/{name}: {error.strerror}") from error


def _json_bytes(value: Mapping[str, Any]) -> bytes:
    whole = {**value, JSON_CHECKSUM: json_checksum(value)}
    return (json.dumps(whole, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


class TapeWriter:
    """Appends rows to the tables of one tape or report. One per process; not thread-safe.

    Args:
        root: what `create_tape` or `create_report` made, maybe in another process: a path, a URL
            or the place itself.
        fsync: survive power loss, not only the death of the process.
        storage_options: see `rolltape.store.places.place_of`.
        commit_log: file to which a line is appended for each row of a table with positions, after
            the row is committed: JSON with table, key, start, n and `row_checksum`.
        max_bytes: refuse to write when all shards of the tape together have this size; events are
            still written.
        give_up: of an object store: asked before a put that failed is tried again; by default 60 s
            are spent on each.
        uncompressed: tables whose buffers are stored as they are, for readers that map them.

    Rows are buffered until 1 MiB or `flush()`. In a folder, what has been flushed is committed: it
    survives SIGKILL. In an object store rows are committed when their shard is put: at 8 MiB, 10 s
    after its first row (at the next `flush`), or on `close`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Place,
        *,
        fsync: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        commit_log: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
        give_up: Callable[[], bool] | None = None,
        uncompressed: Collection[str] = (),
    ) -> None:
        given = isinstance(root, LocalPlace | ObjectPlace)
        self.place: Place = root if given else place_of(root, storage_options)  # type: ignore[assignment,arg-type]
        kind = kind_of(self.place)
        if kind is None:
            raise NotATapeError(f"{self.place}: neither {TAPE_HEADER} nor {REPORT_HEADER} there")
        self.tables = TAPE_TABLES if kind == "tape" else REPORT_TABLES
        self.id = new_uuid()
        self._uncompressed = frozenset(uncompressed)
        self._fsync = fsync
        self._give_up = give_up
        self._log = _CommitLog(Path(commit_log)) if commit_log is not None else None
        self._limit = _Limit(self.place, max_bytes) if max_bytes is not None else None
        self._open: dict[str, ShardWriter | ObjectShardWriter] = {}
        self._numbers: dict[str, int] = {}
        self._pending: dict[str, list[pa.RecordBatch]] = {}
        self._pending_bytes: dict[str, int] = {}

    def append(self, table: str, columns: Mapping[str, Any]) -> None:
        """Add rows; see `rolltape.store.columns.make_batch` for what `columns` may hold.

        Raises:
            SchemaError: the rows do not fit the table. Nothing is written then.
        """
        self.append_batch(table, make_batch(table, self.tables[table], columns))

    def append_batch(self, table: str, batch: pa.RecordBatch) -> None:
        """Add a batch that already has the schema of `table`."""
        self._pending.setdefault(table, []).append(batch)
        size = self._pending_bytes.get(table, 0) + batch.nbytes
        self._pending_bytes[table] = size
        if size >= BUFFER_BYTES:
            self._flush_table(table)

    def write_batch(self, table: str, batch: pa.RecordBatch) -> None:
        """Write what is buffered, then this batch as one record batch of its own."""
        self._flush_table(table)
        self._write(table, batch)

    def flush(self) -> None:
        """Hand everything buffered to the operating system, or put what is old enough."""
        # events first: if there is no room they are what says so. `sequences` last: who sees a
        # closing row may rely on the fragments that this writer added before it.
        for table in _in_order(self._pending):
            self._flush_table(table)
        self.put_due()

    def put_due(self) -> None:
        """In an object store: put the shards whose first row is 10 s old."""
        waiting = [s for s in self._open.values() if isinstance(s, ObjectShardWriter)]
        now = time.monotonic()
        if any(now - shard.opened >= OBJECT_SECONDS for shard in waiting):
            self._put_all()  # or a closing row might overtake its fragments

    def commit(self) -> None:
        """Flush, and in an object store put what there is, however small."""
        self.flush()
        self._put_all()

    def _put_all(self) -> None:
        waiting = {t: s for t, s in self._open.items() if isinstance(s, ObjectShardWriter)}
        for table in _in_order(waiting):
            self._close(table)

    @property
    def waiting(self) -> bool:
        """Whether there are rows that only `put_due` or `close` will commit."""
        return any(isinstance(shard, ObjectShardWriter) for shard in self._open.values())

    def close(self) -> None:
        """Flush, finish every shard and give it its final name.

        Raises:
            StorageError: some could not be written; all others are finished.
        """
        problem: StorageError | TapeFullError | None = None
        try:
            self.flush()
        except (StorageError, TapeFullError) as error:
            problem = error
        for table in _in_order(self._open):
            try:
                shard = self._open[table]
                gone = problem is not None and self._give_up is not None and self._give_up()
                if shard.failed or (gone and isinstance(shard, ObjectShardWriter)):
                    # a shard in a folder stays live, and `seal` finishes it
                    self._open.pop(table).abandon()
                else:
                    self._close(table)
            except StorageError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        if self._log is not None:
            self._log.close()

    def abandon(self) -> None:
        """After an error: let go of the files, which stay live. What was committed is safe."""
        self._pending.clear()
        self._pending_bytes.clear()
        while self._open:
            self._open.popitem()[1].abandon()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> TapeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flush_table(self, table: str) -> None:
        batches = self._pending.pop(table, [])
        self._pending_bytes.pop(table, None)
        if not batches:
            return
        batch = pa.concat_batches(batches) if len(batches) > 1 else batches[0]
        rows = max(1, batch.num_rows * BATCH_BYTES // max(batch.nbytes, 1))
        for start in range(0, max(batch.num_rows, 1), rows):
            self._write(table, batch.slice(start, rows))

    def _write(self, table: str, batch: pa.RecordBatch) -> None:
        if self._limit is not None and table != "events":  # they say what is missing
            self._limit.check()
        if table not in self._open:
            self._open[table] = self._start(table)
        shard = self._open[table]
        before = shard.size
        shard.write(batch)
        if self._limit is not None:
            self._limit.add(shard.size - before)
        if isinstance(shard, ShardWriter):
            if self._log is not None:
                self._log.committed(table, [batch])
            limit = SHARD_BYTES
        else:
            if self._log is not None:
                self._log.wrote(table, batch)
            limit = OBJECT_BYTES
        if shard.size >= limit:
            # of an object store all that is waiting: a closing row must not overtake its fragments
            waiting = [table] if isinstance(shard, ShardWriter) else _in_order(self._open)
            for each in waiting if table == "sequences" else [table]:
                self._close(each)

    def _start(self, table: str) -> ShardWriter | ObjectShardWriter:
        number = self._numbers.get(table, 0)
        self._numbers[table] = number + 1
        schema = self.tables[table]
        if isinstance(self.place, LocalPlace):
            return ShardWriter(
                self.place.path / table,
                writer=self.id,
                number=number,
                schema=schema,
                fsync=self._fsync,
                compress=table not in self._uncompressed,
            )
        return ObjectShardWriter(
            self.place,
            table,
            writer=self.id,
            number=number,
            schema=schema,
            give_up=self._give_up,
            compress=table not in self._uncompressed,
        )

    def _close(self, table: str) -> None:
        shard = self._open[table]
        shard.close()  # if this fails the shard stays, and closing is tried again
        del self._open[table]
        if self._log is not None and isinstance(shard, ObjectShardWriter):
            self._log.committed(table, self._log.take(table))


def check_commit_log(path: str | os.PathLike[str]) -> None:
    """Find out before a job starts whether its commit log can be written.

    Raises:
        UsageError: it cannot.
    """
    _CommitLog(Path(path)).close()


def _in_order(tables: Iterable[str]) -> list[str]:
    order = {"events": 0, "sequences": 2}
    return sorted(tables, key=lambda name: order.get(name, 1))


class _CommitLog:
    """Appends a line a committed row; several processes may share the file."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the writer
        except OSError as error:
            raise UsageError(f"--commit-log {path}: {error.strerror}") from error
        self._waiting: dict[str, list[pa.RecordBatch]] = {}

    def close(self) -> None:
        self._file.close()

    def wrote(self, table: str, batch: pa.RecordBatch) -> None:
        self._waiting.setdefault(table, []).append(batch)

    def take(self, table: str) -> list[pa.RecordBatch]:
        return self._waiting.pop(table, [])

    def committed(self, table: str, batches: list[pa.RecordBatch]) -> None:
        if table not in _LOGGED:
            return
        lines = []
        for batch in batches:
            for i, row in enumerate(batch.select(_SPAN).to_pylist()):
                lines.append(
                    json.dumps({"table": table, **row, "checksum": row_checksum(batch, i)})
                )
        self._file.write("".join(line + "\n" for line in lines).encode())


class _Limit:
    """Size of all shards of a tape, looked at anew each time this writer has added some."""

    def __init__(self, place: Place, most: int) -> None:
        self._place, self._most = place, most
        self._step = max(most // 64, 1 << 16)
        self._known = self._look()
        self._added = 0

    def _look(self) -> int:
        tables = [name for name in self._place.folders() if name in TAPE_TABLES]
        return sum(sum(self._place.files(table).values()) for table in tables)

    def add(self, size: int) -> None:
        self._added += size
        if self._added >= self._step:
            self._known, self._added = self._look(), 0

    def check(self) -> None:
        """Raises TapeFullError when the tape has reached its size."""
        if self._known + self._added >= self._most:
            raise TapeFullError(
                f"{self._place} has reached {self._most:,} bytes",
                hint="--max-bytes; what is recorded stays",
            )
