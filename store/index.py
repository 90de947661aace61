"""Which record batches hold rows of which sequence: read from the seal, or found by scanning.

A seal writes this as the tables `offsets` and `rollups`. What it does not cover, because it was
added later or because the tape is not sealed, is found by reading the key columns, table by table
and only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

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
        first, last = np.searchsorted(self.code, [code, code + 1])
        return slice(int(first), int(last))


class Index:
    """The entries of a tape. `codes` numbers the sequences; it grows as tables are scanned.

    Args:
        folder: the tape.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._entries: dict[str, Entries] = {}
        self.codes: dict[Key, int] = {}
        self._covered: set[tuple[str, str]] = set()
        self._stored: dict[str, pa.Table] = {}
        seal_index = (folder.seal or {}).get("index")
        if seal_index:
            try:
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
        if known > len(shards) or _outside(offsets, known, len(rollups)):
            raise DamagedShardError(
                f"{self._folder.place}/offsets points to shards or sequences that are not there",
                hint="`rolltape fsck --repair` writes it anew",
            )
        columns = (rollups.column(c).to_pylist() for c in KEY_COLUMNS)
        self.codes = {Key(*row): i for i, row in enumerate(zip(*columns, strict=True))}
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
            parts = [p for p in (self._from_seal(table), self._scan(table)) if p is not None]
            self._entries[table] = _merged(parts)
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
        keep = np.ones(where.stop - where.start, bool)
        if start is not None and stop is not None:
            keep = (entries.start[where] < stop) & (entries.end[where] > start)
        return [
            (entries.files[f], int(b))
            for f, b in zip(entries.file[where][keep], entries.batch[where][keep], strict=True)
        ]

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

    def _scan(self, table: str) -> Entries | None:
        files = self._folder.files(table)
        if all((table, file) in self._covered for file in files):
            return None
        number = {name: i for i, name in enumerate(files)}
        columns = [*KEY_COLUMNS]
        spans = "start" in TAPE_TABLES[table].names
        columns += ["start", "n"] if spans else []
        found: list[np.ndarray] = []
        skip = {file for file in files if (table, file) in self._covered}
        for file, batch_number, batch in self._folder.batches(table, columns, skip=skip):
            for key, rows in grouped(batch):
                code = self.codes.setdefault(key, len(self.codes))
                start = end = 0
                if spans:
                    starts = batch.column("start").to_numpy()[rows]
                    start = int(starts.min())
                    end = int((starts + batch.column("n").to_numpy()[rows]).max())
                entry = (code, number[file], batch_number, len(rows), start, end)
                found.append(np.array(entry, np.int32))
        stacked = np.stack(found) if found else np.zeros((0, 6), np.int32)
        return Entries(files, *stacked.T)


def _outside(offsets: pa.Table, shards: int, sequences: int) -> bool:
    if not len(offsets):
        return False
    low = min(pc.min(offsets.column(c)).as_py() for c in ("shard", "sequence", "batch"))
    return bool(
        low < 0
        or pc.max(offsets.column("shard")).as_py() >= shards
        or pc.max(offsets.column("sequence")).as_py() >= sequences
    )


def _merged(parts: list[Entries]) -> Entries:
    if not parts:
        return Entries([], *(np.zeros(0, np.int32) for _ in range(6)))
    names = ("code", "file", "batch", "rows", "start", "end")
    columns = {n: np.concatenate([getattr(p, n) for p in parts]) for n in names}
    order = np.lexsort((columns["batch"], columns["file"], columns["code"]))
    return Entries(parts[0].files, **{n: c[order] for n, c in columns.items()})


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
    text, *numbers = (batch.column(c) for c in ("request", "engine", "sample", "pass"))
    parts = [numbers[0], text, *(n.cast(pa.string()) for n in numbers[1:])]
    # a control character that no key of ours holds: requests may contain anything printable
    coded = pc.binary_join_element_wise(*parts, "\x00").dictionary_encode()
    codes = coded.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(len(coded.dictionary) + 1))
    for i in range(len(coded.dictionary)):
        rows = order[bounds[i] : bounds[i + 1]]
        first = int(rows[0])
        key = Key(*(batch.column(c)[first].as_py() for c in KEY_COLUMNS))
        yield key, rows
