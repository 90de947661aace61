"""Rows of a table for Arrow tools: lazy, read-only, with the method names of pyarrow.dataset.

`pyarrow.dataset.Scanner.from_batches` is not used: it reads tens of batches ahead of a `head(5)`
from a thread of its own, and an interpreter that exits while that thread waits for Python hangs.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.errors import UsageError

#: Yields the batches of the columns named, from the start at every call, one at a time.
Batches = Callable[[list[str]], Iterable[pa.RecordBatch]]

#: Yields batches of the columns named, of the rows with these ascending numbers (int64) alone.
Take = Callable[[list[str], np.ndarray], Iterable[pa.RecordBatch]]

_SHOWN_ROWS = 5
_SHOWN_ITEMS = 4
_SHOWN_TEXT = 60


@dataclass(frozen=True)
class Scan:
    """What to read of some `Rows`: columns, and a filter or None. Nothing is read before it is
    asked for, and every method reads from the start.

    Args:
        rows: where to read.
        columns: columns of the result, in that order.
        filter: boolean expression of `pyarrow.compute`; rows where it is null are left out.
        needed: columns that the filter needs.
    """

    rows: Rows
    columns: tuple[str, ...]
    filter: pc.Expression | None = None
    needed: tuple[str, ...] = ()

    @property
    def projected_schema(self) -> pa.Schema:
        """Schema of the result."""
        schema = self.rows.schema
        return pa.schema([schema.field(name) for name in self.columns], metadata=schema.metadata)

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """Non-empty record batches; holds one at a time."""
        for batch in self._matching(self.columns):
            if batch.num_rows:
                yield batch.select(self.columns)

    def to_table(self) -> pa.Table:
        """All of it in memory."""
        return pa.Table.from_batches(self.to_batches(), self.projected_schema)

    def to_reader(self) -> pa.RecordBatchReader:
        """A stream to be read once."""
        return pa.RecordBatchReader.from_batches(self.projected_schema, self.to_batches())

    def head(self, num_rows: int) -> pa.Table:
        """The first rows; reads no batch after the one that completes them."""
        if num_rows < 0:
            raise UsageError(f"head of {num_rows} rows", hint="0 or more")
        found, left = [], num_rows
        if left:
            for batch in self.to_batches():
                found.append(batch.slice(0, left))
                left -= found[-1].num_rows
                if not left:
                    break
        return pa.Table.from_batches(found, self.projected_schema)

    def count_rows(self) -> int:
        """Number of rows; reads what the filter needs, without one as little as it can."""
        if self.filter is None:
            return self.rows.count_rows()
        return sum(batch.num_rows for batch in self._matching(()))

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def _matching(self, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
        """Batches of the rows that match, with `columns` and whatever else had to be read."""
        read = list(dict.fromkeys([*columns, *self.needed]))
        if self.filter is not None and _by_number(self.filter):
            read = self.rows.schema.names
        read = read or _cheapest(self.rows.schema)
        schema = pa.schema([self.rows.schema.field(name) for name in read])
        for batch in self.rows.batches(read):
            # a C stream with other batches than its schema says is a crash in the reader
            assert batch.schema.equals(schema), f"promised {schema}, got {batch.schema}"
            yield batch if self.filter is None else batch.filter(self.filter)


class Rows:
    """A table that is read when it is asked for, and by any tool that takes Arrow streams.

    It is never written to. It can be read any number of times; every read starts anew, holds one
    batch at a time and asks for no column that it does not need.

    Args:
        schema: columns and types.
        batches: called with column names, yields record batches of exactly those columns in that
            order, from the start; never called without a column. `to_ray` pickles it.
        count: the number of rows, if it is known without reading.
        take: reads rows by number, if it can without reading those before them; needs `count`.
        name: what to call it in messages.
    """

    def __init__(
        self,
        schema: pa.Schema,
        batches: Batches,
        *,
        count: Callable[[], int] | None = None,
        take: Take | None = None,
        name: str = "",
    ) -> None:
        assert take is None or count is not None, "take needs count, to refuse other numbers"
        self.schema = schema
        self.batches = batches
        self.name = name or "rows"
        self._count = count
        self._take = take

    def scanner(
        self, columns: Iterable[str] | None = None, filter: pc.Expression | None = None
    ) -> Scan:
        """A scan to run later: `to_table`, `to_batches`, `to_reader`, `head`, `count_rows`.

        Args:
            columns: names in the order wanted; None is all.
            filter: rows to keep, such as `pyarrow.compute.field("n") > 8`.

        Raises:
            UsageError: a column that is not there, or a filter that does not fit the schema.
        """
        wanted = tuple(self.schema.names) if columns is None else self._known(columns)
        needed = () if filter is None else fields_of(filter, self.schema, self.name)
        return Scan(self, wanted, filter, needed)

    def to_table(
        self, columns: Iterable[str] | None = None, filter: pc.Expression | None = None
    ) -> pa.Table:
        """All rows in memory; arguments as in `scanner`."""
        return self.scanner(columns, filter).to_table()

    def to_batches(
        self, columns: Iterable[str] | None = None, filter: pc.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Record batches, one in memory at a time; arguments as in `scanner`."""
        return self.scanner(columns, filter).to_batches()

    def count_rows(self, filter: pc.Expression | None = None) -> int:
        """Number of rows, of those that match if a filter is given."""
        if filter is not None:
            return self.scanner((), filter).count_rows()
        if self._count is not None:
            return self._count()
        return sum(batch.num_rows for batch in self.batches(_cheapest(self.schema)))

    def head(self, num_rows: int, columns: Iterable[str] | None = None) -> pa.Table:
        """The first rows; reads no more batches than they stand in."""
        return self.scanner(columns).head(num_rows)

    def take(self, indices: Any, columns: Iterable[str] | None = None) -> pa.Table:
        """Rows by number, in the order given, repeated where a number is.

        Reads only the rows wanted where the source can find them by number, such as sequences;
        else the batches up to the last row wanted, of which it keeps only those rows.

        Args:
            indices: integers from 0, in a list, NumPy or Arrow array.
            columns: as in `scanner`.

        Raises:
            IndexError: there is no such row.
            UsageError: `indices` are not integers.
        """
        scan = self.scanner(columns)
        wanted = np.asarray(indices)
        if wanted.size == 0:
            return pa.Table.from_batches([], scan.projected_schema)
        if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
            raise UsageError(f"{self.name}: row numbers of type {wanted.dtype}", hint="integers")
        rows, order = np.unique(wanted.astype(np.int64), return_inverse=True)
        if rows[0] < 0:
            raise IndexError(f"{self.name}: row {rows[0]}")
        if self._count is not None and rows[-1] >= self._count():
            raise IndexError(f"{self.name}: row {rows[-1]} of {self._count()}")
        if self._take is None:
            found = self._picked(scan, rows)
        else:
            read = list(scan.columns) or _cheapest(self.schema)
            found = [batch.select(scan.columns) for batch in self._take(read, rows)]
        table = pa.Table.from_batches(found, scan.projected_schema)
        in_order = np.array_equal(order, np.arange(len(rows)))
        return table if in_order else table.take(pa.array(order))

    def _picked(self, scan: Scan, rows: np.ndarray) -> list[pa.RecordBatch]:
        """Rows by ascending number, from the batches up to the last one of them."""
        found, start, done = [], 0, 0
        for batch in scan.to_batches():
            end = int(np.searchsorted(rows, start + batch.num_rows))
            if end > done:
                found.append(batch.take(pa.array(rows[done:end] - start, pa.int64())))
            start, done = start + batch.num_rows, end
            if done == len(rows):
                return found
        raise IndexError(f"{self.name}: row {rows[done]} of {start}")

    def select(self, columns: Iterable[str]) -> Rows:
        """The same rows with these columns only, in this order; reads nothing.

        Raises:
            UsageError: a column that is not there.
        """
        fields = [self.schema.field(name) for name in self._known(columns)]
        schema = pa.schema(fields, metadata=self.schema.metadata)
        return Rows(schema, self.batches, count=self._count, take=self._take, name=self.name)

    def to_pandas(
        self, columns: Iterable[str] | None = None, filter: pc.Expression | None = None
    ) -> Any:
        """A pandas DataFrame of Arrow-typed columns, in which null is not NaN.

        `pandas.DataFrame.from_arrow` makes a float, and NaN, of an integer that is null.
        """
        try:
            import pandas
        except ImportError:
            raise UsageError("to_pandas needs pandas", hint="pip install pandas") from None
        return self.to_table(columns, filter).to_pandas(types_mapper=pandas.ArrowDtype)

    def to_ray(self) -> Any:
        """A `ray.data.Dataset` of these rows, read by one task that streams a block a batch."""
        try:
            import ray.data
        except ImportError:
            raise UsageError("to_ray needs ray", hint="pip install 'rolltape[ray]'") from None

        def blocks(_: pa.Table) -> Iterator[pa.Table]:
            yield self.schema.empty_table()  # so that no rows still have columns
            for batch in self.to_batches():
                yield pa.Table.from_batches([batch])

        # one row that says "read", so that a worker, not this process, does the reading
        start = ray.data.range(1, override_num_blocks=1)
        return start.map_batches(blocks, batch_size=None, batch_format="pyarrow")

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """The Arrow PyCapsule protocol: this is how DuckDB, Polars, pandas and pyarrow read."""
        return self.scanner().__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        count = f"{self._count()} rows, " if self._count is not None else ""
        lines = [f"{self.name}: {count}{len(self.schema)} columns"]
        return "\n".join(lines + [f"  {f.name}: {_type_name(f)}" for f in self.schema])

    def _repr_html_(self) -> str:
        """The schema and first rows for a notebook. What a tape says is text, never markup."""
        text = html.escape
        count = f"{self._count()} rows" if self._count is not None else "first rows"
        names = "".join(
            f"<th>{text(f.name)}<br><small>{text(_type_name(f))}</small></th>" for f in self.schema
        )
        table = self.head(_SHOWN_ROWS)
        body = "".join(
            "<tr>" + "".join(f"<td>{text(_shown(c[i]))}</td>" for c in table.columns) + "</tr>"
            for i in range(table.num_rows)
        )
        return (
            f"<table><caption>{text(self.name)}: {count}</caption>"
            f"<thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"
        )

    def _known(self, columns: Iterable[str]) -> tuple[str, ...]:
        if isinstance(columns, str):
            raise UsageError(f"columns is the text {columns!r}", hint=f"a list: [{columns!r}]")
        names = tuple(columns)
        known = self.schema.names
        for i, name in enumerate(names):
            if name not in known:
                raise UsageError(f"{self.name}: no column {name!r}", hint=" | ".join(known))
            if name in names[:i]:
                raise UsageError(f"{self.name}: column {name!r} twice", hint="name it once")
        return names


def fields_of(filter: pc.Expression, schema: pa.Schema, name: str) -> tuple[str, ...]:
    """Columns that a filter needs, found by leaving each one out of an empty table.

    Arrow has no public way to ask an expression. This takes about 0.3 ms a column of the schema.

    Raises:
        UsageError: not an expression, or one that does not fit the schema.
    """
    if not isinstance(filter, pc.Expression):
        raise UsageError(
            f"{name}: a filter of type {type(filter).__name__}",
            hint="a pyarrow.compute expression: pyarrow.compute.field('n') > 8",
        )
    empty = schema.empty_table()
    problem = _refusal(empty, filter)
    if problem is not None:
        hint = f"columns: {' | '.join(schema.names)}"
        text = " ".join(str(filter).split())
        raise UsageError(f"{name}: filter {text}: {problem}", hint=hint)
    names = schema.names
    return tuple(n for n in names if _refusal(empty.drop_columns([n]), filter) is not None)


def _refusal(empty: pa.Table, filter: pc.Expression) -> str | None:
    try:
        empty.filter(filter)
    except pa.ArrowException as error:
        return str(error).partition(" in ")[0].splitlines()[0]
    return None


def _by_number(filter: pc.Expression) -> bool:
    # `field(3)` means another column once others are left out; a text that contains the word
    # only costs reading more than needed
    return "FieldPath(" in str(filter)


def _cheapest(schema: pa.Schema) -> list[str]:
    """The column to read when only the number of rows matters."""
    fixed = [f.name for f in schema if pa.types.is_primitive(f.type)]
    return fixed[:1] or schema.names[:1]


def _type_name(field: pa.Field) -> str:
    type_ = str(field.type)
    type_ = type_ if len(type_) <= _SHOWN_TEXT else f"{type_[:_SHOWN_TEXT]}..."
    return type_ if field.nullable else f"{type_} not null"


def _shown(cell: Any) -> str:
    """A scalar as short text; reads no further into it than it shows."""
    if not cell.is_valid:
        return "null"
    type_ = cell.type
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        items = [_shown(item) for item in cell.values.slice(0, _SHOWN_ITEMS)]
        more = f", ... {len(cell.values)} values" if len(cell.values) > _SHOWN_ITEMS else ""
        return f"[{', '.join(items)}{more}]"
    if pa.types.is_struct(type_):
        return "{" + ", ".join(f"{f.name}: {_shown(cell[f.name])}" for f in type_) + "}"
    if pa.types.is_binary(type_) or pa.types.is_large_binary(type_):
        return f"{cell.as_buffer().size} bytes"
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        # the bytes come from a file: nothing has checked that they are UTF-8
        head = cell.as_buffer().slice(0, min(4 * _SHOWN_TEXT, cell.as_buffer().size))
        value = head.to_pybytes().decode("utf-8", "replace")
        whole = len(value) <= _SHOWN_TEXT and head.size == cell.as_buffer().size
        return value if whole else f"{value[:_SHOWN_TEXT]}..."
    return str(cell.as_py())
