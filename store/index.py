"""Which record batches hold rows of which sequence: read from the seal, or found by scanning.

A seal writes this as the tables `offsets` and `rollups`. What it does not cover, because it was
added later or because the tape is not sealed, is found by reading the key columns, table by table
and only when it is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.errors import DamagedShardError, UsageError
from rolltape.store.keys import Key
from rolltape.store.schema import DERIVED_TABLES, TAPE_TABLES
from rolltape.store.tape import Folder

KEY_COLUMNS = ("engine", "request", "sample", "pass")
#: Up to so many rows Python compares keys faster than Arrow does.
_ONE_BY_ONE = 32

#: Tables whose rows belong to one sequence each and that may be large.
INDEXED = tuple(
    name
    for name, schema in TAPE_TABLES.items()
    if set(KEY_COLUMNS) <= set(schema.names) and name not in ("sequences", *DERIVED_TABLES)
)


@dataclass(frozen=True)
class Entries:
    """Entries of one table, sorted by sequence and then in written order.

    Args:
        files: names of shards.
        code: int32 [m] code of the sequence.
        file: int32 [m] index into `files`.
        batch: int32 [m].
        rows: int32 [m] rows of the sequence in that batch.
        start: int32 [m] least position of those rows.
        end: int32 [m] one behind the greatest.
        steps: int64 [m, 2] least and greatest step of those rows of `forwards`; None where they are
            not known (other tables, and indexes that were written before they had them).
    """

    files: list[str]
    code: np.ndarray
    file: np.ndarray
    batch: np.ndarray
    rows: np.ndarray
    start: np.ndarray
    end: np.ndarray
    steps: np.ndarray | None = None

    def of(self, code: int) -> slice:
        """The entries of a sequence."""
        bounds = self._bounds
        return slice(bounds[code], bounds[code + 1]) if code + 1 < len(bounds) else slice(0, 0)

    @cached_property
    def _bounds(self) -> list[int]:
        codes = int(self.code[-1]) + 2 if len(self.code) else 0
        found: list[int] = np.searchsorted(self.code, np.arange(codes)).tolist()
        return found


@dataclass(frozen=True)
class Grouping:
    """The rows of a batch by sequence.

    Args:
        codes: int64 [m], codes of the sequences in it, each once.
        of: int32 [rows], index into `codes`.
    """

    codes: np.ndarray
    of: np.ndarray

    def per_row(self) -> np.ndarray:
        """int64 [rows], the code of each row."""
        codes: np.ndarray = self.codes[self.of]
        return codes


class Index:
    """The entries of a tape. `codes` numbers the sequences; it grows as tables are scanned.

    Args:
        folder: the tape.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._entries: dict[str, Entries] = {}
        self.codes: dict[Key, int] = {}
        self._by_text: dict[str, int] = {}
        self._covered: set[tuple[str, str]] = set()
        self._rollups: pa.Table | None = None
        self._offsets: dict[str, tuple[list[np.ndarray], np.ndarray | None]] = {}
        seal_index = (folder.seal or {}).get("index")
        if seal_index:
            try:
                if _there(folder, seal_index):
                    self._load(seal_index)
            except DamagedShardError as error:
                if not folder.skip_damaged:
                    raise
                folder.note(str(error))

    def _load(self, seal_index: dict[str, object]) -> None:
        rollups = derived_table(self._folder, "rollups")
        shards = [str(e["shard"]) for e in (self._folder.seal or {}).get("shards", [])]
        known = int(str(seal_index.get("covers", 0)))
        codes = {Key(*row): i for i, row in enumerate(rows_of(rollups, KEY_COLUMNS))}
        batches = [e.get("batches") for e in (self._folder.seal or {}).get("shards", [])][:known]
        # apart by table, as plain numbers: in a large tape these are millions of rows
        parts: dict[str, list[list[np.ndarray]]] = {}
        fine = len(codes) == len(rollups)
        for batch in derived_batches(self._folder, "offsets"):
            fine = fine and not _outside(batch, batches, len(rollups))
            numbers = [batch.column(name).to_numpy() for name in batch.schema.names[1:7]]
            steps = _stored_steps(batch)
            for table, rows in _by_table(batch):
                parts.setdefault(table, []).append([c[rows] for c in (*numbers, steps)])
        if not fine:
            raise DamagedShardError(
                f"{self._folder.place}/offsets points to shards or sequences that are not there",
                hint="`rolltape fsck --repair` writes it anew",
            )
        self.codes = codes
        self._covered = {(s.partition("/")[0], s.partition("/")[2]) for s in shards[:known]}
        self._shards = shards
        self._rollups = rollups
        for table, found in parts.items():
            *columns, steps = (np.concatenate(p) for p in zip(*found, strict=True))
            known_steps = table == "forwards" and (steps[:, 0] <= steps[:, 1]).all()
            self._offsets[table] = columns, steps if known_steps else None

    @property
    def rollups(self) -> pa.Table | None:
        """Stored roll-ups, if they cover everything that is read."""
        for table in self._folder.schemas:
            if table in DERIVED_TABLES:
                continue
            if any((table, file) not in self._covered for file in self._folder.files(table)):
                return None
        return self._rollups if self._folder.version is None else None

    def entries(self, table: str) -> Entries:
        """The entries of a table, scanned now if the seal does not have them."""
        if table not in self._entries:
            self._keep(table, self._scan(table))
        return self._entries[table]

    def _keep(self, table: str, added: Entries | None) -> None:
        """Keep the entries of a table: those of the seal, and those that it does not cover."""
        files = self._folder.files(table)
        self._entries[table] = _merged(files, [self._from_seal(table), added])
        # only now: if the scan of what was added had failed, they would still be needed
        self._offsets.pop(table, None)

    def find(
        self, table: str, key: Key, start: int | None = None, stop: int | None = None
    ) -> list[tuple[str, int]]:
        """(file, batch) in written order of the batches with rows of a sequence.

        Args:
            table: one of `INDEXED`.
            key: the sequence.
            start: with `stop`, only batches whose rows reach into these positions.
            stop: one behind the last position.
        """
        entries = self.entries(table)
        code = self.codes.get(key)
        if code is None:
            return []
        where = entries.of(code)
        files, batches = entries.file[where], entries.batch[where]
        if start is not None and stop is not None:
            keep = (entries.start[where] < stop) & (entries.end[where] > start)
            files, batches = files[keep], batches[keep]
        pairs = zip(files.tolist(), batches.tolist(), strict=True)
        return [(entries.files[file], batch) for file, batch in pairs]

    @cached_property
    def lengths(self) -> dict[Key, int]:
        """Tokens known of each sequence that has any."""
        entries = self.entries("tokens")
        longest = np.zeros(len(self.codes), np.int64)
        np.maximum.at(longest, entries.code, entries.end)
        seen = np.zeros(len(self.codes), bool)
        seen[entries.code] = True
        return {key: int(longest[code]) for key, code in self.codes.items() if seen[code]}

    def _from_seal(self, table: str) -> Entries | None:
        if self._rollups is None:
            return None
        files = self._folder.files(table)
        if table not in self._offsets:
            return _stacked(files, [], [])
        here = {name: i for i, name in enumerate(files)}
        numbers = np.full(len(self._shards), -1, np.int32)
        for i, shard in enumerate(self._shards):
            if shard.startswith(f"{table}/"):
                numbers[i] = here.get(shard.partition("/")[2], -1)
        columns, steps = self._offsets[table]
        file = numbers[columns[1]]
        columns = [columns[0], file, *columns[2:]]
        if (file < 0).any():  # of a later version, or damaged and left out
            columns = [c[file >= 0] for c in columns]
            steps = None if steps is None else steps[file >= 0]
        return replace(Entries(files, *columns), steps=steps)

    def walk(self, table: str, columns: Iterable[str]) -> Iterator[tuple[pa.RecordBatch, Grouping]]:
        """Every batch of a table with its rows by sequence; its entries are noted on the way.

        Args:
            table: one of `INDEXED`.
            columns: wanted besides the key and the span.
        """
        files = self._folder.files(table)
        names = _span_columns(table)
        names += [name for name in columns if name not in names]
        number = {name: i for i, name in enumerate(files)}
        found, steps = [], []
        for file, batch_number, batch in self._folder.batches(table, names):
            grouping = self.grouping(batch)
            if (table, file) not in self._covered:
                found.append(_entries_of(batch, grouping, number[file], batch_number))
                steps += _steps_of(table, batch, grouping)
            yield batch, grouping
        if table not in self._entries:  # else they are known, and the seal's are no longer apart
            self._keep(table, _stacked(files, found, steps))

    def grouping(self, batch: pa.RecordBatch) -> Grouping:
        """Rows of a batch by sequence. Sequences that are new get the next code."""
        names = _names(batch)
        texts = names.dictionary.to_pylist()
        of = names.indices.to_numpy()
        codes = np.array([self._by_text.get(text, -1) for text in texts], np.int64)
        unknown = np.flatnonzero(codes < 0)
        if len(unknown):
            rows = np.unique(of, return_index=True)[1][unknown]
            for i, key in zip(unknown.tolist(), _keys(batch, rows), strict=True):
                codes[i] = self.codes.setdefault(key, len(self.codes))
                self._by_text[texts[i]] = int(codes[i])
        return Grouping(codes, of)

    def _scan(self, table: str) -> Entries | None:
        files = self._folder.files(table)
        skip = {file for file in files if (table, file) in self._covered}
        if len(skip) == len(files):
            return None
        number = {name: i for i, name in enumerate(files)}
        found, steps = [], []
        columns = _span_columns(table)
        for file, batch_number, batch in self._folder.batches(table, columns, skip=skip):
            grouping = self.grouping(batch)
            found.append(_entries_of(batch, grouping, number[file], batch_number))
            steps += _steps_of(table, batch, grouping)
        return _stacked(files, found, steps)


def _stored_steps(offsets: pa.RecordBatch) -> np.ndarray:
    """int64 [m, 2], steps of stored offsets; the first is the greater one where they do not say."""
    first, last = (offsets.column(name) for name in ("first_step", "last_step"))
    return np.stack([first.fill_null(1).to_numpy(), last.fill_null(0).to_numpy()], axis=1)


def _by_table(offsets: pa.RecordBatch) -> Iterator[tuple[str, np.ndarray]]:
    """(table, rows) in a batch of offsets; a hostile or newer index may hold them in any order."""
    of = offsets.column("table").dictionary_encode()
    for number, table in enumerate(of.dictionary.to_pylist()):
        yield table, np.flatnonzero(of.indices.to_numpy() == number)


def _span_columns(table: str) -> list[str]:
    """Columns that the entries of a table are made of."""
    return [
        *KEY_COLUMNS,
        *(["start", "n"] if "start" in TAPE_TABLES[table].names else []),
        *(["step"] if table == "forwards" else []),
    ]


def _steps_of(table: str, batch: pa.RecordBatch, grouping: Grouping) -> list[np.ndarray]:
    """int64 [m, 2], least and greatest step of the sequences of a batch of `forwards`."""
    if table != "forwards" or not batch.num_rows:
        return []
    order = np.argsort(grouping.of, kind="stable")
    first = np.searchsorted(grouping.of[order], np.arange(len(grouping.codes)))
    step = batch.column("step").to_numpy()[order]
    return [np.stack([np.minimum.reduceat(step, first), np.maximum.reduceat(step, first)], axis=1)]


def _entries_of(
    batch: pa.RecordBatch, grouping: Grouping, file: int, batch_number: int
) -> np.ndarray:
    """int32 [m, 6]: the entries of one batch, in the order of `Entries`."""
    m = len(grouping.codes)
    out = np.zeros((m, 6), np.int32)
    if not m:
        return out
    out[:, 0], out[:, 1], out[:, 2] = grouping.codes, file, batch_number
    out[:, 3] = np.bincount(grouping.of, minlength=m)
    if "start" in batch.schema.names:
        order = np.argsort(grouping.of, kind="stable")
        first = np.cumsum(out[:, 3]) - out[:, 3]
        start = batch.column("start").to_numpy()[order].astype(np.int64)
        end = start + batch.column("n").to_numpy()[order]
        out[:, 4] = np.minimum.reduceat(start, first)
        out[:, 5] = np.minimum(np.maximum.reduceat(end, first), np.iinfo(np.int32).max)
    return out


def _stacked(files: list[str], found: list[np.ndarray], steps: list[np.ndarray]) -> Entries:
    columns = np.concatenate(found) if found else np.zeros((0, 6), np.int32)
    found_steps = np.concatenate(steps) if steps else None
    return replace(Entries(files, *columns.T), steps=found_steps)


def _outside(offsets: pa.RecordBatch, batches: list[int | None], sequences: int) -> bool:
    """Whether some offset is of a sequence, shard or batch that the seal does not know."""
    sequence, shard, batch = (
        offsets.column(name).to_numpy() for name in ("sequence", "shard", "batch")
    )
    low = min(int(values.min(initial=0)) for values in (sequence, shard, batch))
    if low < 0 or int(sequence.max(initial=-1)) >= sequences:
        return True
    if int(shard.max(initial=-1)) >= len(batches):
        return True
    # of a shard that was damaged when it was sealed the number of batches is not known
    known = np.array([np.iinfo(np.int32).max if n is None else n for n in batches], np.int64)
    return bool((batch >= known[shard]).any())


def _merged(files: list[str], parts: list[Entries | None]) -> Entries:
    names = ("code", "file", "batch", "rows", "start", "end")
    known = [part for part in parts if part is not None and len(part.code)]
    if not known:
        return Entries(files, *(np.zeros(0, np.int32) for _ in names))
    columns = {n: np.concatenate([getattr(p, n) for p in known]) for n in names}
    if len(known) == 1:
        columns = {n: getattr(known[0], n) for n in names}
    steps = None
    if all(part.steps is not None for part in known):
        steps = np.concatenate([part.steps for part in known if part.steps is not None])
    order = np.lexsort((columns["batch"], columns["file"], columns["code"]))
    if (np.diff(order) < 0).any():
        columns = {n: c[order] for n, c in columns.items()}
        steps = None if steps is None else steps[order]
    return Entries(files, **columns, steps=steps)


def rows_of(table: pa.Table, columns: Sequence[str]) -> Iterator[list[Any]]:
    """Rows as lists, the first column shared where it repeats.

    Python objects of all rows at once would be the largest part of what opening a tape takes.
    """
    shared: dict[Any, Any] = {}
    for batch in table.select(columns).to_batches(max_chunksize=4096):
        for first, *rest in zip(*(c.to_pylist() for c in batch.columns), strict=True):
            yield [shared.setdefault(first, first), *rest]


def _there(folder: Folder, seal_index: Mapping[str, Any]) -> bool:
    """Whether the index is still there: a seal that is newer than ours may have replaced it."""
    return all(folder.place.exists(str(entry["shard"])) for entry in seal_index["shards"])


def derived_table(folder: Folder, table: str) -> pa.Table:
    """The roll-ups or offsets that the seal names.

    Raises:
        DamagedShardError: they are gone or not what was written.
        UsageError: the tape has none.
    """
    index = (folder.seal or {}).get("index")
    if not index:
        raise UsageError(f"{folder.place} has no index", hint="`rolltape fsck --repair` writes it")
    return pa.Table.from_batches(derived_batches(folder, table), TAPE_TABLES[table])


def derived_batches(folder: Folder, table: str) -> Iterator[pa.RecordBatch]:
    """The record batches of `derived_table`."""
    for entry in ((folder.seal or {}).get("index") or {}).get("shards", []):
        name, _, file = str(entry["shard"]).partition("/")
        if name == table:
            shard = folder.shard(table, file, whole=True)
            for number in range(shard.batches):
                yield shard.read(number, TAPE_TABLES[table])


def stored_columns(folder: Folder, table: str, schema: pa.Schema) -> pa.Table | None:
    """Some columns of a derived table; None if there is none or it does not cover what is read.

    Raises:
        DamagedShardError: it is not what was written.
    """
    index = (folder.seal or {}).get("index")
    if not index or folder.version is not None or not _there(folder, index):
        return None
    listed = [str(e["shard"]) for e in (folder.seal or {}).get("shards", [])]
    covered = set(listed[: int(index.get("covers", 0))])
    for name in sorted(set(folder.schemas) - set(DERIVED_TABLES)):
        if any(f"{name}/{file}" not in covered for file in folder.files(name)):
            return None
    shards = [str(e["shard"]).partition("/") for e in index["shards"]]
    opened = [folder.shard(table, f, whole=True) for name, _, f in shards if name == table]
    return pa.Table.from_batches(
        [shard.read(i, schema) for shard in opened for i in range(shard.batches)], schema
    )


def grouped(batch: pa.RecordBatch) -> Iterator[tuple[Key, np.ndarray]]:
    """(key, row numbers) of each sequence in a batch, in the order of first appearance."""
    if not batch.num_rows:
        return
    of = _names(batch).indices.to_numpy()
    order = np.argsort(of, kind="stable")
    bounds = np.append(np.flatnonzero(np.diff(of[order], prepend=-1)), len(order))
    for i, key in enumerate(_keys(batch, order[bounds[:-1]])):
        yield key, order[bounds[i] : bounds[i + 1]]


def rows_of_key(batch: pa.RecordBatch, key: Key) -> np.ndarray:
    """Rows of one sequence in a batch."""
    if batch.num_rows > _ONE_BY_ONE:
        found = np.ones(batch.num_rows, bool)
        for name, value in zip(KEY_COLUMNS, key, strict=True):
            found &= np.asarray(pc.equal(batch.column(name), value))
        return np.flatnonzero(found)
    rows = zip(*(batch.column(name).to_pylist() for name in KEY_COLUMNS), strict=True)
    return np.array([i for i, row in enumerate(rows) if row == key], np.int64)


def _names(batch: pa.RecordBatch) -> pa.DictionaryArray:
    """A text for the key of each row; two keys never have the same one."""
    engine, request, sample, scoring = (batch.column(c) for c in KEY_COLUMNS)
    # the length says where the engine ends, whatever characters a hostile tape puts into it
    numbers = (c.cast(pa.string()) for c in (sample, scoring, pc.binary_length(engine)))
    parts = [*numbers, pc.binary_join_element_wise(engine, request, "")]
    return pc.binary_join_element_wise(*parts, " ").dictionary_encode()


def _keys(batch: pa.RecordBatch, rows: np.ndarray) -> Iterator[Key]:
    """Keys of some rows."""
    where = pa.array(rows)
    columns = (batch.column(c).take(where).to_pylist() for c in KEY_COLUMNS)
    return itertools.starmap(Key, zip(*columns, strict=True))
