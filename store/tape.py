"""Reading a tape or a report: the folder and its tables."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolltape.store.errors import DamagedShardError, NewerFormatError, NotATapeError
from rolltape.store.schema import FORMAT_MAJOR, REPORT_TABLES, TAPE_TABLES
from rolltape.store.shards import LIVE, finished, list_shards, read_live, read_sealed
from rolltape.store.writer import REPORT_HEADER, SEAL, TAPE_HEADER


class Folder:
    """A folder of tables with a JSON header: what a tape and a report have in common.

    Args:
        path: the folder.
        header: name of its header file.
        schemas: schemas of its tables.
        skip_damaged: leave a damaged shard out and say so in `problems`, instead of raising.
    """

    def __init__(
        self, path: Path, *, header: str, schemas: dict[str, pa.Schema], skip_damaged: bool
    ) -> None:
        self.path = path
        self.header = _read_header(path, header)
        self.problems: list[str] = []
        self._schemas = schemas
        self._skip_damaged = skip_damaged
        self._tables: dict[str, pa.Table] = {}

    @property
    def uuid(self) -> str:
        """Identity of this folder's content, independent of where it lies."""
        return str(self.header["uuid"])

    def table(self, name: str) -> pa.Table:
        """All rows of a table; empty when nothing was recorded.

        Columns that this version does not know are left out; columns that the writer did not
        know are null.

        Raises:
            DamagedShardError: a shard is not what was written (unless `skip_damaged`).
            KeyError: no such table in the format.
        """
        if name not in self._tables:
            self._tables[name] = self._load(name)
        return self._tables[name]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """A table as Python dicts; for small tables."""
        rows: list[dict[str, Any]] = self.table(name).to_pylist()
        return rows

    def _load(self, name: str) -> pa.Table:
        schema = self._schemas[name]
        tables = []
        for path in list_shards(self.path / name):
            try:
                batches = self._read(path)
            except DamagedShardError as error:
                if not self._skip_damaged:
                    raise
                self.problems.append(str(error))
                continue
            if batches:
                tables.append(_conform(pa.Table.from_batches(batches), schema, path))
        return _one_chunk(pa.concat_tables(tables)) if tables else schema.empty_table()

    def _read(self, path: Path) -> list[pa.RecordBatch]:
        if not path.name.endswith(LIVE):
            return read_sealed(path)
        if finished(path):
            return []  # recovered already, by a sealing that was cut short before it removed this
        try:
            content = read_live(path)
        except FileNotFoundError:  # sealed between the listing and now
            return [batch for p in finished(path) for batch in read_sealed(p)]
        if content.torn:
            self.problems.append(
                f"{path}: {content.torn} bytes after the last whole batch were ignored "
                f"({content.reason})"
            )
        return content.batches


class Report(Folder):
    """A diff report. `summary` is the object that `rolltape diff --json` prints."""

    @property
    def summary(self) -> dict[str, Any]:
        """The headline and everything in it."""
        summary: dict[str, Any] = self.header["summary"]
        return summary


def open_report(path: str | os.PathLike[str], *, skip_damaged: bool = False) -> Report:
    """Open a diff report.

    Raises:
        NotATapeError: `path` is not a report.
        NewerFormatError: written by a newer major version.
    """
    return Report(
        Path(path), header=REPORT_HEADER, schemas=REPORT_TABLES, skip_damaged=skip_damaged
    )


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """`"tape"`, `"report"` or None."""
    root = Path(path)
    for name, kind in ((TAPE_HEADER, "tape"), (REPORT_HEADER, "report")):
        if (root / name).is_file():
            return kind
    return None


def read_seal(path: Path) -> dict[str, Any] | None:
    """Content of `seal.json`, None for a tape that is not sealed."""
    file = path / SEAL
    return dict(_read_json(file)) if file.exists() else None


def check_seal(path: Path, seal: dict[str, Any]) -> None:
    """Every shard that the seal lists must be there with its size.

    Raises:
        DamagedShardError: naming the first one that is not.
    """
    for entry in seal.get("shards", []):
        shard = path / str(entry["shard"])
        if not shard.is_file():
            raise DamagedShardError(f"{shard}: listed in {SEAL} but missing")
        size = shard.stat().st_size
        if size != entry["bytes"]:
            raise DamagedShardError(
                f"{shard}: {size} bytes, {SEAL} says {entry['bytes']}",
                hint="truncated or altered after it was written; restore it from a copy",
            )


def seal_problems(path: Path, seal: dict[str, Any] | None) -> list[str]:
    """Every shard that a seal lists and that is gone or cut."""
    found = []
    for entry in (seal or {}).get("shards", []):
        try:
            check_seal(path, {"shards": [entry]})
        except DamagedShardError as error:
            found.append(str(error))
    return found


def _read_header(root: Path, name: str) -> dict[str, Any]:
    file = root / name
    what = "report" if name == REPORT_HEADER else "tape"
    if not file.is_file():
        if "://" in str(root) or ":/" in str(root)[:8]:
            raise NotATapeError(f"{root}: only local folders yet", hint="copy the tape here")
        other = kind_of(root)
        hint = f"it is a {other}" if other else None
        if hint is None and not root.exists():
            hint = "no such file or folder"
        raise NotATapeError(f"{root} is not a {what}", hint=hint or f"a {what} has a {name}")
    header = _read_json(file)
    version = str(header.get("format", ""))
    major = version.partition(".")[0]
    if not major.isdecimal() or "uuid" not in header:
        raise NotATapeError(f"{file}: no format version", hint=f"not written as a {what}")
    if int(major) > FORMAT_MAJOR:
        raise NewerFormatError(
            f"{root} has format {version}, this rolltape reads up to {FORMAT_MAJOR}.x",
            hint="upgrade rolltape",
        )
    return header


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NotATapeError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise NotATapeError(f"{file}: not a JSON object")
    return value


def _conform(table: pa.Table, schema: pa.Schema, path: Path) -> pa.Table:
    columns = []
    for field in schema:
        if field.name in table.column_names:
            try:
                columns.append(table.column(field.name).cast(field.type))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise DamagedShardError(f"{path}: column {field.name}: {error}") from error
        elif field.nullable:
            columns.append(pa.chunked_array([pa.nulls(table.num_rows, field.type)]))
        else:
            raise DamagedShardError(f"{path}: column {field.name} is missing")
    return pa.table(columns, schema=schema)


def _one_chunk(table: pa.Table) -> pa.Table:
    # one chunk a flush would make every later `take` visit thousands of them
    try:
        return table.combine_chunks()
    except pa.ArrowInvalid:  # a list column of more than 2^31 elements stays in pieces
        return table


def open_folder(path: str | os.PathLike[str], *, skip_damaged: bool = False) -> Folder:
    """The tables of a tape without the joins; `rolltape.store.open` gives those."""
    return Folder(Path(path), header=TAPE_HEADER, schemas=TAPE_TABLES, skip_damaged=skip_damaged)
