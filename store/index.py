"""Which record batches hold rows of which sequence: read from the seal, or found by scanning.

A seal writes this as the tables `offsets` and `rollups`. What it does not cover, because it was
added later or because the tape is not sealed, is found by reading the key columns, table by table
and only when it is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """

    files: list[str]
    code: np.ndarray
    file: np.ndarray
    batch: np.ndarray
    rows: np.ndarray
    start: np.ndarray
    end: np.ndarray

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
        self._stored: dict[str, pa.Table] = {}
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
        offsets = derived_table(self._folder, "offsets")
        shards = [str(e["shard"]) for e in (self._folder.seal or {}).get("shards", [])]
        known = int(str(seal_index.get("covers", 0)))
        codes = {Key(*row): i for i, row in enumerate(rows_of(rollups, KEY_COLUMNS))}
        batches = [e.get("batches") for e in (self._folder.seal or {}).get("shards", [])][:known]
        if len(codes) != len(rollups) or _outside(offsets, batches, len(rollups)):
            raise DamagedShardError(
                f"{self._folder.place}/offsets points to shards or sequences that are not there",
                hint="`rolltape fsck --repair` writes it anew",
            )
        self.codes = codes
        self._covered = {(s.partition("/")[0], s.partition("/")[2]) for s in shards[:known]}
        self._shards = shards
        self._stored = {"rollups": rollups, "offsets": offsets}

    @property
    def rollups(self) -> pa.Table | None:
        """Stored roll-ups, if they cover everything that is read."""
        for table in self._folder.schemas:
            if table in DERIVED_TABLES:
                continue
            if any((table, file) not in self._covered for file in self._folder.files(table)):
                return None
        return self._stored.get("rollups") if self._folder.version is None else None

    def entries(self, table: str) -> Entries:
        """The entries of a table, scanned now if the seal does not have them."""
        if table not in self._entries:
            parts = [self._from_seal(table), self._scan(table)]
            self._entries[table] = _merged(self._folder.files(table), parts)
        return self._entries[table]

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
        offsets = self._stored.get("offsets")
        if offsets is None:
            return None
        # a hostile or newer index may hold several chunks and any order
        mine = offsets.filter(pc.equal(offsets.column("table"), table))
        columns = {n: mine.column(n).to_numpy() for n in mine.column_names if n != "table"}
        here = {name: i for i, name in enumerate(self._folder.files(table))}
        numbers = np.full(len(self._shards), -1, np.int32)
        for i, shard in enumerate(self._shards):
            if shard.startswith(f"{table}/"):
                numbers[i] = here.get(shard.partition("/")[2], -1)
        file = numbers[columns["shard"]]
        keep = file >= 0  # of a later version, or damaged and left out
        return Entries(
            self._folder.files(table),
            columns["sequence"][keep],
            file[keep],
            *(columns[n][keep] for n in ("batch", "rows", "start", "end")),
        )

    def walk(self, table: str, columns: Iterable[str]) -> Iterator[tuple[pa.RecordBatch, Grouping]]:
        """Every batch of a table with its rows by sequence; its entries are noted on the way.

        Args:
            table: one of `INDEXED`.
            columns: wanted besides the key and the span.
        """
        files = self._folder.files(table)
        names = [*KEY_COLUMNS]
        names += ["start", "n"] if "start" in TAPE_TABLES[table].names else []
        names += [name for name in columns if name not in names]
        number = {name: i for i, name in enumerate(files)}
        found = []
        for file, batch_number, batch in self._folder.batches(table, names):
            grouping = self.grouping(batch)
            if (table, file) not in self._covered:
                found.append(_entries_of(batch, grouping, number[file], batch_number))
            yield batch, grouping
        self._entries[table] = _merged(files, [self._from_seal(table), _stacked(files, found)])

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
        columns = [*KEY_COLUMNS]
        columns += ["start", "n"] if "start" in TAPE_TABLES[table].names else []
        number = {name: i for i, name in enumerate(files)}
        return _stacked(
            files,
            [
                _entries_of(batch, self.grouping(batch), number[file], batch_number)
                for file, batch_number, batch in self._folder.batches(table, columns, skip=skip)
            ],
        )


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


def _stacked(files: list[str], found: list[np.ndarray]) -> Entries:
    columns = np.concatenate(found) if found else np.zeros((0, 6), np.int32)
    return Entries(files, *columns.T)


def _outside(offsets: pa.Table, batches: list[int | None], sequences: int) -> bool:
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
    known = [part for part in parts if part is not None]
    if not known:
        return Entries(files, *(np.zeros(0, np.int32) for _ in names))
    columns = {n: np.concatenate([getattr(p, n) for p in known]) for n in names}
    order = np.lexsort((columns["batch"], columns["file"], columns["code"]))
    return Entries(files, **{n: c[order] for n, c in columns.items()})


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
    batches = []
    schema = TAPE_TABLES[table]
    for entry in index["shards"]:
        name, _, file = str(entry["shard"]).partition("/")
        if name == table:
            shard = folder.shard(table, file, whole=True)
            batches += [shard.read(i, schema) for i in range(shard.batches)]
    return pa.Table.from_batches(batches, schema)


def grouped(batch: pa.RecordBatch) -> Iterator[tuple[Key, np.ndarray]]:
    """(key, row numbers) of each sequence in a batch, in the order of first appearance."""
    if not batch.num_rows:
        return
    of = _names(batch).indices.to_numpy()
    order = np.argsort(of, kind="stable")
    bounds = np.append(np.flatnonzero(np.diff(of[order], prepend=-1)), len(order))
    for i, key in enumerate(_keys(batch, order[bounds[:-1]])):
        yield key, order[bounds[i] : bounds[i + 1]]


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
