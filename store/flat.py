"""A tape as one table with a row a sequence: what `duckdb.sql("from tape")` sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.store.columns import Masked, list_column
from rolltape.store.errors import UsageError
from rolltape.store.keys import Key
from rolltape.store.scan import Rows, Scan
from rolltape.store.schema import TAPE_TABLES

if TYPE_CHECKING:
    from rolltape.store.sequences import Sequence, Tape

_F32S = pa.list_(pa.field("item", pa.float32()))
_DERIVED = TAPE_TABLES["rollups"]
_LISTS = pa.schema(
    [
        pa.field("ids", pa.list_(pa.uint32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("processed", _F32S, nullable=False),
        pa.field("scaled", _F32S, nullable=False),
        pa.field("raw", _F32S, nullable=False),
    ]
)

#: The id, the facts of the roll-ups, then the joined columns, each over all positions.
SCHEMA = pa.schema([pa.field("id", pa.string(), nullable=False), *_DERIVED, *_LISTS])

# rows a batch, so that a batch of long sequences stays some megabytes
_BATCH_TOKENS = 1 << 18


class _Batches:
    """Batches of the flat table of one tape; picklable as the tape is."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def __call__(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        return self._read(columns, self._tape.rollups(), self._tape.keys())

    def take(self, columns: list[str], rows: np.ndarray) -> Iterator[pa.RecordBatch]:
        """The sequences with these numbers; no other one is joined."""
        keys = self._tape.keys()
        facts = self._tape.rollups().take(pa.array(rows))
        return self._read(columns, facts, [keys[row] for row in rows.tolist()])

    def _read(
        self, columns: list[str], facts: pa.Table, keys: Items[Key]
    ) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([SCHEMA.field(name) for name in columns])
        start = tokens = 0
        for i, length in enumerate(facts.column("length").to_pylist()):
            tokens += length + 1  # a million empty sequences are not one batch
            if tokens >= _BATCH_TOKENS or i == len(keys) - 1:
                yield self._batch(schema, facts.slice(start, i + 1 - start), keys[start : i + 1])
                start, tokens = i + 1, 0

    def _batch(self, schema: pa.Schema, facts: pa.Table, keys: Items[Key]) -> pa.RecordBatch:
        lists = [name for name in schema.names if name in _LISTS.names]
        cells: dict[str, list[Masked]] = {name: [] for name in lists}
        for key in keys if lists else ():
            sequence = self._tape.sequence(key)
            for name in lists:
                cells[name].append(_cell(sequence, name))
        arrays: list[pa.Array] = []
        for field in schema:
            if field.name in cells:
                arrays.append(list_column(cells[field.name], field.type, field=field.name))
            elif field.name == "id":
                arrays.append(pa.array([key.id for key in keys], pa.string()))
            else:
                arrays.append(facts.column(field.name).combine_chunks())
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cell(sequence: Sequence, name: str) -> Masked:
    if name == "ids":
        return sequence.tokens
    return sequence.loss_mask if name == "loss_mask" else sequence.logprob(name)


def flat_rows(tape: Tape, columns: Iterable[str] | None = None) -> Rows:
    """The flat table of a tape.

    Args:
        tape: any tape.
        columns: only these.

    Raises:
        UsageError: a column that is not there.
    """
    batches = _Batches(tape)
    rows = Rows(SCHEMA, batches, count=_Count(tape), take=batches.take, name=str(tape.place))
    return rows if columns is None else rows.select(columns)


class _Count:
    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def __call__(self) -> int:
        return len(self._tape)


class _TableBatches:
    """Batches of a stored table; picklable as the tape is."""

    def __init__(self, tape: Tape, table: str) -> None:
        self._tape, self._table = tape, table

    def __call__(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        for _, _, batch in self._tape.batches(self._table, columns):
            yield batch


def table_rows(tape: Tape, table: str) -> Rows:
    """A stored table of a tape.

    Raises:
        UsageError: there is no such table in the format.
    """
    if table not in TAPE_TABLES:
        raise UsageError(f"no table {table!r}", hint=" | ".join(TAPE_TABLES))
    return Rows(TAPE_TABLES[table], _TableBatches(tape, table), name=f"{tape.place}/{table}")


class FlatTable:
    """What a tape offers to Arrow tools: the methods of its flat table, with their names.

    Attributes:
        flat: the flat table.
    """

    flat: Rows

    @property
    def schema(self) -> pa.Schema:
        """Schema of the flat table."""
        return self.flat.schema

    def scanner(
        self, columns: Iterable[str] | None = None, filter: pc.Expression | None = None
    ) -> Scan:
        """See `rolltape.store.scan.Rows.scanner`."""
        return self.flat.scanner(columns, filter)

    def to_table(
        self, columns: Iterable[str] | None = None, filter: pc.Expression | None = None
    ) -> pa.Table:
        """See `rolltape.store.scan.Rows.to_table`."""
        return self.flat.to_table(columns, filter)

    def to_batches(
        self, columns: Iterable[str] | None = None, filter: pc.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        """See `rolltape.store.scan.Rows.to_batches`."""
        return self.flat.to_batches(columns, filter)

    def count_rows(self, filter: pc.Expression | None = None) -> int:
        """Number of sequences that match."""
        return self.flat.count_rows(filter)

    def head(self, num_rows: int, columns: Iterable[str] | None = None) -> pa.Table:
        """The first sequences."""
        return self.flat.head(num_rows, columns)

    def take(self, indices: Any, columns: Iterable[str] | None = None) -> pa.Table:
        """Sequences by their number in `keys()`; see `rolltape.store.scan.Rows.take`."""
        return self.flat.take(indices, columns)

    def to_pandas(
        self, columns: Iterable[str] | None = None, filter: pc.Expression | None = None
    ) -> Any:
        """See `rolltape.store.scan.Rows.to_pandas`."""
        return self.flat.to_pandas(columns, filter)

    def to_ray(self) -> Any:
        """See `rolltape.store.scan.Rows.to_ray`."""
        return self.flat.to_ray()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.flat.__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        return self.flat._repr_html_()
