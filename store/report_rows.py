"""Which rows of a report belong to which sequence, so that a page reads its own rows alone.

The column `a` (and `site`) is read once, batch by batch; what is kept is a few numbers a row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.tape import Folder


@dataclass(frozen=True)
class ReportRows:
    """Rows of one table of a report, by sequence and then in written order.

    Args:
        names: ids of sequences of side A.
        sites: names of sites; empty in a table that has none.
        bounds: int64 [names + 1], where the rows of each sequence begin.
        batches: (file, number) of every record batch.
        batch: int32 [rows], index into `batches`.
        row: int32 [rows], row in the batch.
        site: int32 [rows], index into `sites`; empty in a table that has none.
    """

    names: pa.Array
    sites: list[str]
    bounds: np.ndarray
    batches: list[tuple[str, int]]
    batch: np.ndarray
    row: np.ndarray
    site: np.ndarray

    def of(self, a: str) -> slice:
        """The rows of a sequence; none if there is no such."""
        code = pc.index(self.names, a).as_py()
        return slice(0, 0) if code < 0 else slice(*self.bounds[code : code + 2].tolist())


def index_rows(report: Folder, table: str) -> ReportRows:
    """Read the columns that say whose each row is."""
    by_site = "site" in report.schemas[table].names
    batches: list[tuple[str, int]] = []
    names = _Codes()
    sites = _Codes()
    sizes: list[int] = []
    for file, number, batch in report.batches(table, ["a", "site"] if by_site else ["a"]):
        batches.append((file, number))
        sizes.append(batch.num_rows)
        names.add(batch.column("a"))
        if by_site:
            sites.add(batch.column("site"))
    code, known = names.codes()
    order = np.argsort(code, kind="stable")
    batch_of = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    starts = np.cumsum(sizes) - sizes if sizes else np.zeros(0, np.int64)
    row = (np.arange(len(code)) - np.repeat(starts, sizes)).astype(np.int32)
    site, site_names = sites.codes()
    return ReportRows(
        names=known,
        sites=site_names.to_pylist(),
        bounds=np.searchsorted(code[order], np.arange(len(known) + 1)),
        batches=batches,
        batch=batch_of[order],
        row=row[order],
        site=site[order] if by_site else site,
    )


def read_rows(
    report: Folder,
    rows: ReportRows,
    table: str,
    a: str,
    columns: Sequence[str] | None = None,
    sites: Collection[str] | None = None,
) -> pa.Table:
    """Rows of one sequence in written order, see `Report.of`."""
    names = list(report.schemas[table].names if columns is None else columns)
    schema = pa.schema([report.schemas[table].field(name) for name in names])
    where = rows.of(a)
    batch, row = rows.batch[where], rows.row[where]
    if sites is not None:
        wanted = [i for i, site in enumerate(rows.sites) if site in sites]
        keep = np.isin(rows.site[where], wanted)
        batch, row = batch[keep], row[keep]
    found = []
    for number in np.unique(batch).tolist():
        with report.damage():
            file, at = rows.batches[number]
            whole = report.shard(table, file).read(at, schema)
            found.append(whole.take(pa.array(row[batch == number])))
    return pa.Table.from_batches(found, schema)


def take_rows(
    report: Folder,
    batches: Sequence[tuple[str, int, int]],
    table: str,
    rows: Sequence[int],
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Rows by their number, see `Report.take`; `batches` are (file, number, rows) of each batch."""
    names = list(report.schemas[table].names if columns is None else columns)
    schema = pa.schema([report.schemas[table].field(name) for name in names])
    # a column that an old file has not cannot be read alone
    first = report.schemas[table].names[0]
    read = pa.schema([report.schemas[table].field(first), *(f for f in schema if f.name != first)])
    ends = np.cumsum([size for _, _, size in batches])
    wanted = np.asarray(rows, np.int64)
    holder = np.searchsorted(ends, wanted, side="right")
    found, order = [], []
    for at in np.unique(holder).tolist():
        file, number, size = batches[at]
        mine = np.flatnonzero(holder == at)
        whole = report.shard(table, file).read(number, read)
        found.append(whole.select(names).take(pa.array(wanted[mine] - (ends[at] - size))))
        order.append(mine)
    table_ = pa.Table.from_batches(found, schema)
    back = np.argsort(np.concatenate(order)) if order else np.zeros(0, np.int64)
    return table_.take(pa.array(back))


class _Codes:
    """Numbers texts in the order in which they are first seen, a batch at a time."""

    def __init__(self) -> None:
        self._dictionaries: list[pa.Array] = []
        self._indices: list[np.ndarray] = []

    def add(self, column: pa.Array) -> None:
        encoded = column.dictionary_encode()
        self._dictionaries.append(encoded.dictionary)
        self._indices.append(encoded.indices.to_numpy())

    def codes(self) -> tuple[np.ndarray, pa.Array]:
        """int32 [rows] codes, and the text of each code."""
        if not self._dictionaries:
            return np.zeros(0, np.int32), pa.array([], pa.string())
        known = pa.concat_arrays(self._dictionaries).dictionary_encode()
        code = known.indices.to_numpy()
        ends = np.cumsum([len(d) for d in self._dictionaries])
        parts = [
            code[end - len(d) : end][index]
            for end, d, index in zip(ends, self._dictionaries, self._indices, strict=True)
        ]
        return np.concatenate(parts), known.dictionary
