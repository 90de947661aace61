"""Writing a tape: the folder, one writer per process, and the seal."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltape.store.columns import make_batch
from rolltape.store.errors import NotATapeError, TapeError, TapeExistsError, UsageError
from rolltape.store.schema import REPORT_TABLES, TAPE_TABLES
from rolltape.store.shards import (
    LIVE,
    ShardWriter,
    finished,
    format_version,
    is_locked,
    list_shards,
    read_live,
)

SHARD_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 20

TAPE_HEADER = "tape.json"
REPORT_HEADER = "report.json"
SEAL = "seal.json"


def new_uuid() -> str:
    """32 hex digits."""
    return uuid.uuid4().hex


def create_tape(
    path: str | os.PathLike[str],
    *,
    role: str,
    parent: str | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Make the folder of a new tape and its header.

    Args:
        path: must not exist, or be an empty folder.
        role: rollout, trainer, reference or draft.
        parent: uuid of the tape that this one replays.
        provenance: JSON-able facts about the run (argv, git, environment allow-list).

    Raises:
        TapeExistsError: there is something at `path` already.
    """
    header = {
        "uuid": new_uuid(),
        "role": role,
        "parent": parent,
        "provenance": dict(provenance or {}),
    }
    return _create(Path(path), TAPE_HEADER, header)


def create_report(path: str | os.PathLike[str], *, summary: Mapping[str, Any]) -> Path:
    """Make the folder of a new diff report; `summary` is what `diff --json` prints."""
    return _create(Path(path), REPORT_HEADER, {"uuid": new_uuid(), "summary": dict(summary)})


def _create(root: Path, name: str, header: dict[str, Any]) -> Path:
    if "://" in str(root):
        raise UsageError(f"{root}: only local folders yet", hint="copy it after it is sealed")
    try:
        root.mkdir(parents=True, exist_ok=True)
        empty = not any(root.iterdir())
    except OSError as error:
        raise TapeError(f"{root}: {error.strerror}", hint="choose another -o") from error
    if not empty:
        raise TapeExistsError(f"{root} is not empty", hint="choose another -o, or remove it")
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_json(root / name, {"format": format_version(), "created": created, **header})
    return root


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file that is either there in full or not there (temp name, then rename)."""
    temporary = path.with_name(f".{path.name}.{new_uuid()}")
    temporary.write_text(json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")
    os.replace(temporary, path)


class TapeWriter:
    """Appends rows to the tables of one tape or report. One per process; not thread-safe.

    Args:
        root: folder made by `create_tape` or `create_report`, maybe by another process.
        fsync: survive power loss, not only the death of the process.

    Rows are buffered until 1 MiB or `flush()`; what has been flushed survives SIGKILL.
    """

    def __init__(self, root: str | os.PathLike[str], *, fsync: bool = False) -> None:
        self.root = Path(root)
        if (self.root / TAPE_HEADER).exists():
            self.tables = TAPE_TABLES
        elif (self.root / REPORT_HEADER).exists():
            self.tables = REPORT_TABLES
        else:
            raise NotATapeError(f"{self.root}: neither {TAPE_HEADER} nor {REPORT_HEADER} there")
        self.id = new_uuid()
        self._fsync = fsync
        self._open: dict[str, ShardWriter] = {}
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
        if size >= _BUFFER_BYTES:
            self._flush_table(table)

    def flush(self) -> None:
        """Hand everything buffered to the operating system."""
        for table in list(self._pending):
            self._flush_table(table)

    def close(self) -> None:
        """Flush, finish every shard and give it its final name."""
        self.flush()
        while self._open:
            self._open.popitem()[1].close()

    def abandon(self) -> None:
        """After an error: let go of the files, which stay live. What was flushed is safe."""
        self._pending.clear()
        self._pending_bytes.clear()
        while self._open:
            self._open.popitem()[1].abandon()

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
        if table not in self._open:
            number = self._numbers.get(table, 0)
            self._numbers[table] = number + 1
            self._open[table] = ShardWriter(
                self.root / table,
                writer=self.id,
                number=number,
                schema=self.tables[table],
                fsync=self._fsync,
            )
        shard = self._open[table]
        shard.write(batch)
        if shard.size >= SHARD_BYTES:
            self._open.pop(table).close()


def recover(root: Path) -> list[dict[str, Any]]:
    """Finish the live shards whose writers are dead.

    The intact batches of each go into a sealed shard beside it; the live file is then removed.

    Returns:
        One dict a recovered shard: `shard`, `rows`, `torn` bytes, `reason`.
    """
    found = []
    for table in sorted(p for p in root.iterdir() if p.is_dir()):
        for path in list(list_shards(table)):
            if not path.name.endswith(LIVE) or is_locked(path):
                continue
            content = read_live(path)
            if content.batches:
                _finish_for(path, content.batches)
            path.unlink(missing_ok=True)
            rows = sum(b.num_rows for b in content.batches)
            name = f"{table.name}/{path.name}"
            found.append(
                {"shard": name, "rows": rows, "torn": content.torn, "reason": content.reason}
            )
    return found


def _finish_for(path: Path, batches: list[pa.RecordBatch]) -> None:
    """Write the finished shard of a live one, under its name and number; again is as once."""
    if finished(path):
        return
    writer, number = path.name.removesuffix(LIVE).split("-")
    shard = ShardWriter(
        path.parent, writer=writer, number=int(number), schema=batches[0].schema, hidden=True
    )
    for batch in batches:
        shard.write(batch)
    shard.close()


def seal(
    root: str | os.PathLike[str], *, status: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Close a tape: recover what dead writers left, then list every shard in `seal.json`.

    Args:
        root: the tape.
        status: JSON-able facts about the end of the run (exit status, drops).

    Returns:
        What was written. `live` names shards whose writers are still at work; they are not lost,
        readers see them, but they are not covered by this seal.
    """
    root = Path(root)
    recovered = recover(root)
    shards: list[dict[str, Any]] = []
    live: list[str] = []
    for table in sorted(p for p in root.iterdir() if p.is_dir()):
        for path in list_shards(table):
            name = f"{table.name}/{path.name}"
            if path.name.endswith(LIVE):
                live.append(name)
            else:
                shards.append({"shard": name, "bytes": path.stat().st_size})
    sealed = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    content = {
        "format": format_version(),
        "sealed": sealed,
        "status": dict(status or {}),
        "recovered": recovered,
        "live": live,
        "shards": shards,
    }
    write_json(root / SEAL, content)
    return content
