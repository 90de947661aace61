"""Reading a tape or a report: the folder, its seal and its tables, batch by batch."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from rolltape.store.errors import (
    DamagedShardError,
    NewerFormatError,
    NotATapeError,
    StorageError,
    UsageError,
)
from rolltape.store.places import LocalPlace, ObjectPlace, Place, place_of
from rolltape.store.readers import (
    Cache,
    LiveShard,
    Sealed,
    SealedShard,
    Shard,
    finished_name,
    open_shard,
    shards_of,
)
from rolltape.store.schema import DERIVED_TABLES, FORMAT_MAJOR, REPORT_TABLES, TAPE_TABLES
from rolltape.store.shards import JSON_CHECKSUM, SEALED, json_checksum

if TYPE_CHECKING:
    from rolltape.store.report_rows import ReportRows

TAPE_HEADER = "tape.json"
REPORT_HEADER = "report.json"
SEAL = "seal.json"

# A reader keeps at most so many bytes of files mapped.
_OPEN_BYTES = 64 << 20
# What one that is not mapped counts for: so many may be open as files.
_OPEN_FILE = 1 << 20


class Folder:
    """A folder of tables with a JSON header: what a tape and a report have in common.

    Args:
        place: where it lies.
        header: name of its header file.
        schemas: schemas of its tables.
        skip_damaged: leave a damaged shard out and say so in `problems`, instead of raising.
        version: read it as it was at that seal; None is now, unsealed parts included.

    Raises:
        NotATapeError: there is no header.
        NewerFormatError: written by a newer major version.
        DamagedShardError: a shard that the seal lists is missing or has another size.
    """

    def __init__(
        self,
        place: Place,
        *,
        header: str,
        schemas: Mapping[str, pa.Schema],
        skip_damaged: bool = False,
        version: int | None = None,
    ) -> None:
        self.place = place
        self.header = read_header(place, header)
        self.seal = read_seal(place)
        self.version = version
        self.problems: list[str] = []
        self.schemas = schemas
        self.skip_damaged = skip_damaged
        self._tables: dict[str, pa.Table] = {}
        self._files: dict[str, list[str]] = {}
        self._sealed = self._read_list()
        self._checked: dict[tuple[str, str], Sealed] = {}
        # one that is dropped is closed when nobody reads it any more
        self._open: Cache[Shard] = Cache(_OPEN_BYTES)
        self.damaged = False
        self._look_for_listed()

    def _read_list(self) -> dict[tuple[str, str], Sealed]:
        found = {}
        for entry in (self.seal or {}).get("shards", []):
            table, _, file = str(entry["shard"]).partition("/")
            if self.version is None or entry.get("version", 1) <= self.version:
                found[table, file] = Sealed(int(entry["bytes"]), entry.get("batches"))
        if self.version is not None and not isinstance(self.version, int):
            raise UsageError(f"version {self.version!r} is not a number")
        last = int(self.seal.get("version", 1)) if self.seal is not None else 0
        if self.version is not None and not 1 <= self.version <= last:
            known = f"it has 1 to {last}" if last else "it is not sealed"
            raise UsageError(f"{self.place} has no version {self.version}", hint=known)
        return found

    def _look_for_listed(self) -> None:
        """Shards that the seal lists and that are not there."""
        problems = seal_problems(self.place, self.seal)
        if problems and (again := read_seal(self.place)) != self.seal:
            # it was sealed between reading the seal and looking for what it lists
            self.seal = again
            self._sealed = self._read_list()
            problems = seal_problems(self.place, self.seal)
        if problems and not self.skip_damaged:
            raise DamagedShardError(problems[0])
        for problem in problems:
            self.note(problem)
            self.damaged = True

    @property
    def path(self) -> Path:
        """The folder on this machine.

        Raises:
            UsageError: it lies in an object store.
        """
        if isinstance(self.place, LocalPlace):
            return self.place.path
        raise UsageError(f"{self.place}: this needs a local folder", hint="copy the tape here")

    @property
    def uuid(self) -> str:
        """Identity of this folder's content, independent of where it lies."""
        return str(self.header["uuid"])

    @property
    def fingerprint(self) -> str:
        """32 hex digits of the uuid and of the names of all shards, which hold their hashes.

        It changes when something is added; live shards count by their size.
        """
        digest = xxhash.xxh3_128(self.uuid.encode())
        for table in sorted(set(self.schemas) - set(DERIVED_TABLES)):
            for file in self.files(table):
                digest.update(f"{table}/{file}\0".encode())
                if not file.endswith(".arrow"):
                    digest.update(str(self.place.files(table).get(file, 0)).encode())
        return digest.hexdigest()

    def files(self, table: str) -> list[str]:
        """Names of the shards of a table, as they were when it was first asked for."""
        if table not in self._files:
            names = shards_of(self.place, table)
            if self.version is not None:
                names = [n for n in names if (table, n) in self._sealed]
            self._files[table] = names
        return self._files[table]

    def only(self, table: str, files: Collection[str]) -> None:
        """From now on read these shards of a table alone, as far as they are there."""
        self._files[table] = [file for file in self.files(table) if file in files]

    def shard(self, table: str, file: str, *, whole: bool = False) -> Shard:
        """A shard, kept open for a while.

        Args:
            table: name of the table.
            file: one of `files(table)`.
            whole: check the whole file, not only the batches that will be read.

        Raises:
            DamagedShardError: it is not what was written.
        """

        def make() -> tuple[Shard, int]:
            known = self._sealed.get((table, file)) or self._checked.get((table, file))
            sealed = None if whole else known
            try:
                shard = open_shard(self.place, table, file, sealed=sealed)
            except FileNotFoundError as error:
                # sealed between the listing and now: the same batches under the final name
                final = finished_name(list(self.place.files(table)), file)
                if final is None:
                    raise DamagedShardError(f"{self.place}/{table}/{file}: is gone") from error
                shard = open_shard(self.place, table, final)
            if isinstance(shard, LiveShard) and shard.torn:
                self.note(
                    f"{shard.name}: {shard.torn} bytes after the last whole batch were ignored "
                    f"({shard.reason})"
                )
            elif sealed is None and isinstance(shard, SealedShard):
                # checked as a whole: opened again, its batches are checked as they are read
                self._checked[table, file] = Sealed(shard.nbytes, shard.batches)
            mapped = not isinstance(self.place, LocalPlace) or self.place.mapped
            return shard, shard.nbytes if mapped else min(shard.nbytes, _OPEN_FILE)

        return self._open.get((table, file, whole), make)

    def verify(self, most: int) -> bool:
        """Check finished shards against the hashes in their names; damage goes to `problems`.

        Args:
            most: stop after so many bytes.

        Returns:
            Whether all of them were checked.
        """
        for table in self.schemas:
            sizes = self.place.files(table)
            for file in self.files(table):
                if not file.endswith(".arrow"):
                    continue
                most -= sizes.get(file, 0)
                if most < 0:
                    return False
                try:
                    open_shard(self.place, table, file).close()
                except (DamagedShardError, FileNotFoundError) as error:
                    self.note(str(error))
        return True

    def batches(
        self,
        table: str,
        columns: Sequence[str] | None = None,
        *,
        whole: bool = False,
        skip: Collection[str] = (),
    ) -> Iterator[tuple[str, int, pa.RecordBatch]]:
        """(file, number, batch) of every batch of a table, read one at a time.

        Args:
            table: its name.
            columns: only these, in this order; None is all.
            whole: check whole files.
            skip: leave out these files.

        Raises:
            DamagedShardError: a shard is not what was written (unless `skip_damaged`).
        """
        schema = self.schemas[table]
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        for file in self.files(table):
            if file in skip:
                continue
            with self.damage():
                shard = self.shard(table, file, whole=whole)
                for run in shard.runs():
                    together = shard.read_run(run, schema) if len(run) > 1 else None
                    for number in run:
                        if together is not None:
                            yield file, number, together[number - run.start]
                            continue
                        with self.damage():  # one damaged batch costs only itself
                            yield file, number, shard.read(number, schema)

    @contextlib.contextmanager
    def damage(self) -> Iterator[None]:
        """Where a shard may turn out to be damaged: with `skip_damaged` that is only noted."""
        try:
            yield
        except DamagedShardError as error:
            if not self.skip_damaged:
                raise
            self.note(str(error))
            self.damaged = True

    def note(self, problem: str) -> None:
        """Add to `problems`, if it is the first of the file that it begins with."""
        file = problem.partition(": ")[0]
        if not any(known.partition(": ")[0] == file for known in self.problems):
            self.problems.append(problem)

    def count(self, table: str, *, whole: bool = False) -> int:
        """Number of rows of a table, reading one column.

        Args:
            table: its name.
            whole: also check whole files.
        """
        first = self.schemas[table].names[0]
        return sum(batch.num_rows for _, _, batch in self.batches(table, [first], whole=whole))

    def table(self, name: str) -> pa.Table:
        """All rows of a table in memory; empty when nothing was recorded. For small tables.

        Columns that this version does not know are left out; columns that the writer did not
        know are null. Whole files are checked.

        Raises:
            DamagedShardError: a shard is not what was written (unless `skip_damaged`).
            KeyError: no such table in the format.
        """
        if name not in self._tables:
            found = [batch for _, _, batch in self.batches(name, whole=True)]
            self._tables[name] = _one_chunk(pa.Table.from_batches(found, self.schemas[name]))
        return self._tables[name]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """A table as Python dicts; for small tables."""
        rows: list[dict[str, Any]] = self.table(name).to_pylist()
        return rows


class Report(Folder):
    """A diff report. `summary` is the object that `rolltape diff --json` prints."""

    @property
    def summary(self) -> dict[str, Any]:
        """The headline and everything in it."""
        summary: dict[str, Any] = self.header["summary"]
        return summary

    @functools.cached_property
    def _rows(self) -> dict[str, ReportRows]:
        return {}

    def _rows_of(self, table: str) -> ReportRows:
        from rolltape.store.report_rows import index_rows  # it reads through this class

        if table not in self._rows:
            self._rows[table] = index_rows(self, table)
        return self._rows[table]

    def of(
        self,
        table: str,
        a: str,
        columns: Sequence[str] | None = None,
        sites: Collection[str] | None = None,
    ) -> pa.Table:
        """Rows of one sequence, in written order; no batch without such a row is read.

        Args:
            table: `tokens` or `activations`.
            a: id of the sequence on side A.
            columns: only these, in this order; None is all.
            sites: of `activations`: only these sites.
        """
        from rolltape.store.report_rows import read_rows

        return read_rows(self, self._rows_of(table), table, a, columns, sites)

    def columns(self, table: str, names: Sequence[str]) -> pa.Table:
        """Some columns of all rows of a table, the others left unread; not kept."""
        schema = pa.schema([self.schemas[table].field(name) for name in names])
        return pa.Table.from_batches([b for _, _, b in self.batches(table, names)], schema)

    @functools.cached_property
    def _sizes(self) -> dict[str, list[tuple[str, int, int]]]:
        return {}

    def take(
        self, table: str, rows: Sequence[int], columns: Sequence[str] | None = None
    ) -> pa.Table:
        """Some rows of a table by their number; only the batches that hold them are read.

        Args:
            table: its name.
            rows: numbers, in the order in which the rows are wanted.
            columns: only these; None is all.
        """
        from rolltape.store.report_rows import take_rows

        if table not in self._sizes:
            first = self.schemas[table].names[:1]
            self._sizes[table] = [(f, n, b.num_rows) for f, n, b in self.batches(table, first)]
        return take_rows(self, self._sizes[table], table, rows, columns)

    def sites(self, a: str) -> list[str]:
        """Sites that `activations` has of a sequence, in written order."""
        rows = self._rows_of("activations")
        codes = rows.site[rows.of(a)]
        _, first = np.unique(codes, return_index=True)
        return [rows.sites[code] for code in codes[np.sort(first)].tolist()]


def open_report(
    path: str | os.PathLike[str] | LocalPlace | ObjectPlace, *, skip_damaged: bool = False
) -> Report:
    """Open a diff report.

    Raises:
        NotATapeError: `path` is not a report.
        NewerFormatError: written by a newer major version.
    """
    return Report(
        place_of(path), header=REPORT_HEADER, schemas=REPORT_TABLES, skip_damaged=skip_damaged
    )


def open_folder(path: str | os.PathLike[str] | Place, *, skip_damaged: bool = False) -> Folder:
    """The tables of a tape without the joins; `rolltape.store.open` gives those."""
    return Folder(_place(path), header=TAPE_HEADER, schemas=TAPE_TABLES, skip_damaged=skip_damaged)


def kind_of(path: str | os.PathLike[str] | Place) -> str | None:
    """`"tape"`, `"report"` or None."""
    place = _place(path)
    for name, kind in ((TAPE_HEADER, "tape"), (REPORT_HEADER, "report")):
        if place.exists(name):
            return kind
    return None


def _place(path: str | os.PathLike[str] | Place) -> Place:
    return place_of(path) if isinstance(path, str | os.PathLike) else path


def read_seal(place: Place) -> dict[str, Any] | None:
    """Content of `seal.json`, None for a tape that is not sealed."""
    try:
        data = place.read(SEAL)
    except FileNotFoundError:
        return None
    seal = _parse(data, f"{place}/{SEAL}")
    _check_json(seal, f"{place}/{SEAL}")
    index = seal.get("index") or {}
    problems = [
        ("shards", _is_list(seal.get("shards", []), _is_entry)),
        ("index", isinstance(index, dict) and _is_list(index.get("shards", []), _is_entry)),
        ("index", isinstance(index, dict) and _is_count(index.get("covers", 0))),
        ("version", _is_count(seal.get("version", 1))),
        ("status", isinstance(seal.get("status", {}), dict)),
        ("recovered", _is_list(seal.get("recovered", []), _is_object)),
        ("live", _is_list(seal.get("live", []), _is_text)),
    ]
    for name, fine in problems:
        if not fine:
            raise NotATapeError(f"{place}/{SEAL}: {name} is not what a seal holds there")
    return seal


def _is_list(value: Any, item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(item(entry) for entry in value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 31


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and _is_shard(entry.get("shard"))
        and isinstance(entry.get("bytes"), int)
        and (entry.get("batches") is None or _is_count(entry["batches"]))
        and _is_count(entry.get("version", 1))
    )


def _is_shard(name: Any) -> bool:
    table, _, file = name.partition("/") if isinstance(name, str) else ("", "", "")
    return (table in TAPE_TABLES or table in REPORT_TABLES) and bool(SEALED.fullmatch(file))


def seal_problems(place: Place, seal: Mapping[str, Any] | None) -> list[str]:
    """Every shard that a seal lists and that is gone or cut."""
    found = []
    listings: dict[str, dict[str, int]] = {}
    index = (seal or {}).get("index") or {}
    for entry in [*(seal or {}).get("shards", []), *index.get("shards", [])]:
        table, _, file = str(entry["shard"]).partition("/")
        if table not in listings:
            listings[table] = place.files(table)
        size = listings[table].get(file)
        if size is None:
            found.append(f"{place}/{entry['shard']}: listed in {SEAL} but missing")
        elif size != entry["bytes"]:
            found.append(
                f"{place}/{entry['shard']}: {size} bytes, {SEAL} says {entry['bytes']} "
                "(truncated or altered after it was written; restore it from a copy)"
            )
    return found


def read_header(place: Place, name: str) -> dict[str, Any]:
    """Content of `tape.json` or `report.json`, after checking that this version can read it.

    Raises:
        NotATapeError: there is none, or it is not one, or was altered.
        NewerFormatError: written by a newer major version.
        StorageError: the object store does not answer.
    """
    what = "report" if name == REPORT_HEADER else "tape"
    try:
        data = place.read(name)
    except (FileNotFoundError, StorageError) as error:
        if isinstance(error, StorageError) and not isinstance(place, LocalPlace):
            raise
        other = kind_of(place)
        hint = f"it is a {other}" if other else f"a {what} has a {name}"
        if other is None and isinstance(place, LocalPlace) and not place.path.exists():
            hint = "no such file or folder"
        raise NotATapeError(f"{place} is not a {what}", hint=hint) from error
    header = _parse(data, f"{place}/{name}")
    version = str(header.get("format", ""))
    major = version.partition(".")[0]
    if not (major.isdecimal() and len(major) < 9) or not isinstance(header.get("uuid"), str):
        raise NotATapeError(f"{place}/{name}: no format version", hint=f"not written as a {what}")
    if int(major) > FORMAT_MAJOR:
        raise NewerFormatError(
            f"{place} has format {version}, this rolltape reads up to {FORMAT_MAJOR}.x",
            hint="upgrade rolltape",
        )
    _check_json(header, f"{place}/{name}")
    return header


def _check_json(value: dict[str, Any], name: str) -> None:
    """Take the checksum out of the content of a JSON file; tapes of format 1.0 have none."""
    stored = value.pop(JSON_CHECKSUM, None)
    if stored is not None and stored != json_checksum(value):
        raise NotATapeError(f"{name}: altered after it was written", hint="its checksum differs")


def _parse(data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise NotATapeError(f"{name}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise NotATapeError(f"{name}: not a JSON object")
    return value


def _one_chunk(table: pa.Table) -> pa.Table:
    # one chunk a flush would make every later `take` visit thousands of them
    try:
        return table.combine_chunks()
    except pa.ArrowInvalid:  # a list column of more than 2^31 elements stays in pieces
        return table
